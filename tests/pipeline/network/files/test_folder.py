"""One process's access to a shared folder."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from pipeline.network.files.folder import Busy, Folder, open_regular, read_all


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "shared")
    made.make()
    return made


def test_it_is_for_its_user_only(folder: Folder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_making_it_again_changes_nothing(folder: Folder) -> None:
    identity = folder.identity()
    folder.make()
    Folder(folder.path).make()
    assert folder.identity() == identity
    assert not list(folder.work.iterdir())


def test_an_emptied_folder_is_another(folder: Folder) -> None:
    identity = folder.identity()
    (folder.records / ".id").unlink()
    with pytest.raises(FileNotFoundError):
        folder.identity()
    folder.make()
    assert folder.identity() != identity


def test_the_clock_is_that_of_the_file_system_and_comes_back(folder: Folder) -> None:
    before = folder.now()
    folder.leave()
    (folder.path / "other").write_bytes(b"")
    assert before <= folder.now()
    assert (folder.path / "other").stat().st_mtime_ns <= folder.now()
    folder.leave()
    assert not list(folder.work.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_put_once_and_whole(folder: Folder, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = folder.records / "a"
    assert folder.put_new(path, b"1") is links
    assert path.exists() is links
    folder.put(path, b"2")
    assert folder.put_new(path, b"3") is False
    assert path.read_bytes() == b"2"
    assert not list(folder.work.iterdir())


def test_it_is_made_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no links")))
    Folder(tmp_path).make()
    assert len(Folder(tmp_path).identity()) == 32


def test_a_write_that_fails_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for put in (folder.put, folder.put_new):
        with pytest.raises(OSError, match="No space"):
            put(folder.records / "a", b"1")
    assert not list(folder.work.iterdir())
    assert not list(folder.records.glob("[!.]*"))


def test_the_lock_keeps_others_out(folder: Folder) -> None:
    other = Folder(folder.path)
    with folder.locked(), pytest.raises(Busy), other.locked():
        pass
    with other.locked():
        pass


def test_a_lock_file_that_is_replaced_while_it_is_locked_locks_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def too_late(file: int, how: int) -> None:
        (folder.path / "lock").unlink()
        (folder.path / "lock").touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with pytest.raises(Busy), folder.locked():
        pytest.fail("another process may have the new one")


def test_leftovers_are_removed_by_age(folder: Folder) -> None:
    old, new = folder.new_part(), folder.new_part()
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, ns=(0, folder.now() - 10**12))
    folder.tidy(folder.now() - 10**11)
    assert not old.exists()
    assert new.exists()


def test_only_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("fifo", "link", "missing"):
        with pytest.raises(FileNotFoundError):
            open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path)
    for limit, found in ((3, b"1234"), (5, b"12345"), (9, b"12345")):
        opened = open_regular(tmp_path / "file")
        try:
            assert read_all(opened, limit) == found
        finally:
            os.close(opened)
