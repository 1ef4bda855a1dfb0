"""Objects in a shared folder: whole or not at all, whatever happens to the folder, the disk or the caller."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import anyio
import pytest

from pipeline import Unavailable
from pipeline.errors import CannotConnect, InvalidMessage
from pipeline.network.files import FileObjects, folder_objects
from pipeline.network.files.folder_objects import RESTORE_INTERVAL_S
from pipeline.network.objects import ObjectName
from pipeline.rx import AnyIOScheduler

CONTENT = b"a tokenizer" * 1000


@pytest.fixture
async def objects(tmp_path: Path) -> FileObjects:
    made = FileObjects(tmp_path / "shared")
    await made.open()
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(CONTENT)
    return tmp_path / "source"


def stored(objects: FileObjects) -> list[Path]:
    return list(objects._folder.objects.iterdir())


def nothing_is_left(objects: FileObjects, tmp_path: Path) -> bool:
    """Return whether no part of a file lies anywhere."""
    return not list(objects._folder.work.iterdir()) and sorted(os.listdir(tmp_path)) == ["shared", "source"]


async def test_many_processes_put_one_object_and_all_get_it(tmp_path: Path, source: Path) -> None:
    processes = [FileObjects(tmp_path / "shared") for _ in range(5)]
    for process in processes:
        await process.open()

    async def put_and_get(number: int) -> None:
        name = await processes[number].put(source)
        await processes[number].get(name, tmp_path / f"target{number}")
        assert (tmp_path / f"target{number}").read_bytes() == CONTENT
        (tmp_path / f"target{number}").unlink()

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(put_and_get, number)
    assert [path.stat().st_size for path in stored(processes[0])] == [len(CONTENT)]
    assert nothing_is_left(processes[0], tmp_path)


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:], b""])
async def test_a_damaged_object_is_refused_and_leaves_no_file(
    objects: FileObjects, source: Path, tmp_path: Path, damage: bytes
) -> None:
    name = await objects.put(source)
    stored(objects)[0].write_bytes(damage)
    with pytest.raises(InvalidMessage, match="came with"):
        await objects.get(name, tmp_path / "target")
    assert nothing_is_left(objects, tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
async def test_what_is_no_file_is_no_object(objects: FileObjects, source: Path, tmp_path: Path, kind: str) -> None:
    name = await objects.put(source)
    (place,) = stored(objects)
    place.unlink()
    _make(kind, place, source)
    with anyio.fail_after(5), pytest.raises(Unavailable):
        await objects.get(name, tmp_path / "target")
    assert nothing_is_left(objects, tmp_path)
    if kind != "folder":
        assert await objects.put(source) == name
        await objects.get(name, tmp_path / "target")
        assert (tmp_path / "target").read_bytes() == CONTENT


def _make(kind: str, place: Path, source: Path) -> None:
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(source)
    else:
        place.mkdir()


async def test_an_object_that_was_cut_is_put_again(objects: FileObjects, source: Path, tmp_path: Path) -> None:
    name = await objects.put(source)
    stored(objects)[0].write_bytes(CONTENT[:-1])
    assert await objects.put(source) == name
    await objects.get(name, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT


@pytest.mark.parametrize("is_shared_full", [True, False])
async def test_a_full_disk_is_an_error_and_leaves_no_part(
    objects: FileObjects, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared_full: bool
) -> None:
    """Of the folder: Unavailable. Of the caller's file: its own error."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = await objects.put(source) if not is_shared_full else ObjectName("0" * 64, 0)
    monkeypatch.setattr(folder_objects._Copy, "_write", full)
    if is_shared_full:
        with pytest.raises(Unavailable, match="No space"):
            await objects.put(source)
        assert not stored(objects)
    else:
        with pytest.raises(OSError, match="No space"):
            await objects.get(name, tmp_path / "target")
    assert nothing_is_left(objects, tmp_path)


@pytest.mark.parametrize("call", ["put", "get"])
async def test_a_cancelled_call_leaves_no_part(
    objects: FileObjects, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(folder_objects, "READ_BYTES", 100)  # many parts
    name = await objects.put(source) if call == "get" else ObjectName("0" * 64, 0)
    writes = 0
    write = folder_objects._Copy._write

    def counted(copy: folder_objects._Copy, content: bytes) -> None:
        nonlocal writes
        writes += 1
        write(copy, content)
        if writes == 5:
            anyio.from_thread.run_sync(scope.cancel)

    monkeypatch.setattr(folder_objects._Copy, "_write", counted)
    with anyio.CancelScope() as scope:
        await (objects.put(source) if call == "put" else objects.get(name, tmp_path / "target"))
    assert scope.cancelled_caught
    assert writes < 10
    assert nothing_is_left(objects, tmp_path)


@pytest.mark.parametrize("has_changed", [False, True])
async def test_what_is_gone_from_the_folder_is_put_again(
    objects: FileObjects, source: Path, tmp_path: Path, has_changed: bool
) -> None:
    """By the process that put it, unless its file is another by now."""
    async with AnyIOScheduler() as scheduler:
        process = FileObjects(tmp_path / "shared", scheduler)
        await process.open()
        name = await process.put(source)
        stored(objects)[0].unlink()
        if has_changed:
            (tmp_path / "source").write_bytes(b"another")
        await anyio.sleep(2 * RESTORE_INTERVAL_S)
        if has_changed:
            with pytest.raises(Unavailable):
                await objects.get(name, tmp_path / "target")
            stored(objects)[0].unlink()
            await anyio.sleep(2 * RESTORE_INTERVAL_S)
            assert not stored(objects)
        else:
            await objects.get(name, tmp_path / "target")
        await process.close()


async def test_what_cannot_be_put_again_is_tried_again(
    objects: FileObjects, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AnyIOScheduler() as scheduler:
        process = FileObjects(tmp_path / "shared", scheduler)
        await process.open()
        name = await process.put(source)
        shutil.rmtree(tmp_path / "shared")
        await anyio.sleep(3 * RESTORE_INTERVAL_S)
        assert caplog.text.count("are not put again") == 1
        await objects.open()  # makes the folder
        await anyio.sleep(2 * RESTORE_INTERVAL_S)
        await objects.get(name, tmp_path / "target")
        await process.close()


async def test_without_the_folder_it_is_unavailable(objects: FileObjects, source: Path, tmp_path: Path) -> None:
    name = await objects.put(source)
    (tmp_path / "shared").rename(tmp_path / "away")
    with pytest.raises(Unavailable):
        await objects.put(source)
    with pytest.raises(Unavailable):
        await objects.get(name, tmp_path / "target")
    assert sorted(os.listdir(tmp_path)) == ["away", "source"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CannotConnect):
        await FileObjects(tmp_path / "file").open()
