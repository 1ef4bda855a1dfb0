"""A folder that is full, damaged, slow, gone or away: discovery stops changing, nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from threading import Event, active_count
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import Unavailable
from pipeline.errors import CannotConnect
from pipeline.loop import time_held
from pipeline.network.discovery import Gone, Put
from pipeline.network.files import FileStore, folder_calls
from pipeline.network.files.folder import Folder
from pipeline.network.files.leases import Leases
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.files.worlds import Deployment, keys_of
from tests.pipeline.network.worlds import TTL_S, eventually, record_watch


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    made = Deployment(tmp_path / "shared")
    made.patch(monkeypatch)
    return made


def fill_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse every new file in the folder. Others are not affected, nor are times of files."""
    opens = os.open

    def full(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(folder)) and not Path(path).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opens(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)


# -- full, read-only, unreachable


async def test_on_a_full_disk_leases_are_renewed_and_writes_fail(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"1")
        received, _ = record_watch(front_end)
        await eventually(lambda: keys_of(received) == {"a/k": b"1"})
        with monkeypatch.context() as full:
            fill_disk(full, deployment.path)
            with pytest.raises(Unavailable, match="No space left"):
                await worker.create("a/new", b"2")
            known = await worker.get("a/k")
            assert known is not None
            with pytest.raises(Unavailable, match="No space left"):
                await worker.replace("a/k", b"2", known.revision)
            await anyio.sleep(5 * TTL_S)
            assert keys_of(received) == {"a/k": b"1"}
            await worker.delete("a/k")
            await eventually(lambda: keys_of(received) == {})
        await worker.create("a/new", b"2")
        await eventually(lambda: keys_of(received) == {"a/new": b"2"})
        assert len(received) == 3


async def test_while_no_process_reaches_the_folder_watches_keep_what_they_know(deployment: Deployment) -> None:
    """However long it takes, and no lease ends because of it; one that ended meanwhile does so after it."""
    async with deployment.store() as alive, deployment.store() as dead, deployment.store() as front_end:
        await alive.create("a/alive", b"1")
        await dead.create("a/dead", b"2")
        received, _ = record_watch(front_end)
        await eventually(lambda: len(received) == 2)
        deployment.cut(alive, dead, front_end)
        deployment.kill(dead)
        await anyio.sleep(10 * TTL_S)
        for call in (front_end.entries(), front_end.get("a/alive"), alive.create("a/new", b"3"), alive.delete("a/x")):
            with pytest.raises(Unavailable):
                await call
        deployment.mend()
        await anyio.sleep(TTL_S - 2)
        assert len(received) == 2
        await anyio.sleep(4)
        assert received[2:] == [Gone("a/dead")]
        assert await front_end.entries() == {"a/alive": b"1"}


async def test_a_process_that_cannot_reach_the_folder_loses_its_leases_and_regains_them(deployment: Deployment) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        created = await worker.create("a/k", b"1")
        received, _ = record_watch(front_end)
        deployment.cut(worker)
        await anyio.sleep(3 * TTL_S)
        deployment.mend()
        await eventually(lambda: len(received) == 3)
        put = Put("a/k", b"1", created.revision)
        assert received == [put, Gone("a/k"), put]


async def test_an_outage_is_logged_once_a_minute_and_at_its_end(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    def logged(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async with deployment.store() as store:
        await store.create("a/k", b"1")
        record_watch(store)
        await anyio.sleep(1)
        assert not caplog.records
        deployment.cut(store)
        await anyio.sleep(150)
        assert logged("stands still") == logged("are not renewed") == 3
        deployment.mend()
        await anyio.sleep(TTL_S)
        assert logged("works again") == 2
        await anyio.sleep(150)
        assert len(caplog.records) == 8


@pytest.mark.parametrize("name", ["a file", "a file/folder"])
async def test_a_folder_that_cannot_be_made_cannot_be_connected(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(CannotConnect) as caught:
        async with Deployment(tmp_path / name).store():
            pass
    assert (
        caught.value.message == f"the folder {tmp_path / name} cannot be used: it is no folder, or stands below a file"
    )


async def test_a_process_that_only_looks_is_shown_what_is_there_instead_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "a file").write_bytes(b"")
    (tmp_path / "other").mkdir()
    for name, text in (
        ("a file", "{} is no folder"),
        ("none", "there is no folder {}"),
        ("other", "no deployment is in the folder {}"),
    ):
        async with AnyIOScheduler() as scheduler:
            store = FileStore(tmp_path / name, scheduler, TTL_S, may_make=False)
            with pytest.raises(CannotConnect) as caught:
                await store.open()
        assert caught.value.message == text.format(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a file", "other"]


async def test_the_reason_names_the_file_and_no_number(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    path = deployment.path
    async with deployment.store() as store:
        for error, reason in (
            (OSError(errno.EROFS, "Read-only file system", str(path / "lock")), "Read-only file system: lock"),
            (OSError(errno.EROFS, "Read-only file system", str(path)), "Read-only file system"),
            (OSError(errno.EACCES, "Permission denied", "/elsewhere"), "Permission denied: /elsewhere"),
            (OSError("is not mounted"), "is not mounted"),
        ):

            def fails(error: OSError = error) -> None:
                raise error

            with pytest.raises(Unavailable) as caught:
                await store._calls.run(fails)
            assert caught.value.message == f"the folder {path} cannot be used: {reason}"


# -- gone and back


@pytest.mark.parametrize("part", ["", "records", "leases", "work"])
async def test_an_emptied_folder_is_filled_again_by_those_who_live(deployment: Deployment, part: str) -> None:
    """The watches do not notice, but that what a dead process had is gone at last."""
    async with deployment.store() as alive, deployment.store() as dead, deployment.store() as front_end:
        await alive.create("a/alive", b"1")
        await dead.create("a/dead", b"2")
        received, _ = record_watch(front_end)
        await eventually(lambda: len(received) == 2)
        deployment.kill(dead)
        shutil.rmtree(deployment.path / part)
        await anyio.sleep(TTL_S / 2)
        assert (deployment.records / "a%2falive").exists()
        assert len(received) == 2
        await anyio.sleep(2 * TTL_S)
        assert received[2:] == [Gone("a/dead")]
        assert await front_end.entries() == {"a/alive": b"1"}


async def test_a_folder_that_is_away_for_long_is_not_made_again_by_those_who_only_watch(deployment: Deployment) -> None:
    async with deployment.store() as front_end:
        received, _ = record_watch(front_end)
        await anyio.sleep(1)
        shutil.rmtree(deployment.path)
        await anyio.sleep(10 * TTL_S)
        assert not deployment.path.exists()
        async with deployment.store() as worker:
            await worker.create("a/k", b"1")
            await eventually(lambda: keys_of(received) == {"a/k": b"1"})


async def test_a_folder_whose_disk_is_not_mounted_is_left_alone(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment.store() as worker:
        await worker.create("a/k", b"1")
        with monkeypatch.context() as unmounted:
            unmounted.setattr("pipeline.network.files.folder._device_of", lambda _: -1)
            deployment.path.rename(deployment.path.with_name("unmounted"))
            deployment.path.mkdir()
            await anyio.sleep(3 * TTL_S)
            await anyio.sleep(60)  # why is logged once a minute; at first it may have been that there is no folder
        assert not list(deployment.path.iterdir())
        assert "is not mounted" in caplog.text
        deployment.path.rmdir()
        deployment.path.with_name("unmounted").rename(deployment.path)
        await anyio.sleep(TTL_S)
        assert await worker.entries() == {"a/k": b"1"}


# -- processes that stand still, and clocks


async def test_a_process_that_stood_still_registers_again(deployment: Deployment) -> None:
    """Its lease ran out for all others, who removed the file; back again, its key is Added again."""
    async with deployment.store() as stopped, deployment.store() as front_end:
        created = await stopped.create("a/k", b"1")
        received, _ = record_watch(front_end)
        await anyio.sleep(2 * TTL_S)
        deployment.stop(stopped)
        await anyio.sleep(30)
        put = Put("a/k", b"1", created.revision)
        assert received == [put, Gone("a/k")]
        assert not list(deployment.records.glob("[!.]*"))
        deployment.go_on(stopped)
        await eventually(lambda: received == [put, Gone("a/k"), put])
        await anyio.sleep(3 * TTL_S)
        assert len(received) == 3


async def test_a_process_that_stood_still_leaves_what_others_have_taken(deployment: Deployment) -> None:
    async with deployment.store() as stopped, deployment.store() as other:
        await stopped.create("a/k", b"1")
        deployment.stop(stopped)
        await anyio.sleep(TTL_S + 1)
        assert (await other.create("a/k", b"2")).outcome == "created"
        deployment.go_on(stopped)
        await anyio.sleep(3 * TTL_S)
        assert await other.entries() == {"a/k": b"2"}
        await stopped.close()
        assert await other.entries() == {"a/k": b"2"}


async def test_a_write_after_a_stop_finds_the_keys_of_before(deployment: Deployment) -> None:
    """Whether or not the lease has been renewed by then."""
    async with deployment.store() as store, deployment.store() as other:
        created = await store.create("a/k", b"1")
        record_watch(other)
        assert store._renewing is not None
        store._renewing.dispose()
        await anyio.sleep(3 * TTL_S)
        assert await other.entries() == {}
        assert (await store.replace("a/k", b"2", created.revision)).outcome == "created"
        await anyio.sleep(1)
        assert await other.entries() == {"a/k": b"2"}
        await anyio.sleep(3 * TTL_S)
        assert (await store.create("a/new", b"3")).outcome == "created"
        await anyio.sleep(1)
        assert await other.entries() == {"a/k": b"2", "a/new": b"3"}


async def test_one_that_stood_still_before_its_first_renewal_registers_again(deployment: Deployment) -> None:
    async with deployment.store() as stopped, deployment.store() as other:
        await stopped.create("a/k", b"1")
        deployment.stop(stopped)
        record_watch(other)
        await anyio.sleep(30)
        deployment.go_on(stopped)
        await anyio.sleep(1)
        assert await other.entries() == {"a/k": b"1"}


async def test_a_watcher_that_stood_still_loses_nothing_that_lives(deployment: Deployment) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"1")
        received, _ = record_watch(front_end)
        await anyio.sleep(1)
        deployment.stop(front_end)
        await anyio.sleep(30)
        deployment.go_on(front_end)
        await anyio.sleep(TTL_S)
        assert len(received) == 1


@pytest.mark.parametrize("step_s", [3600, -3600, TTL_S - 1, 1 - TTL_S])
async def test_a_clock_that_is_set_ends_no_lease(deployment: Deployment, step_s: float) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"1")
        received, _ = record_watch(front_end)
        await anyio.sleep(1)
        deployment.offset_ns = round(step_s * 1e9)
        await anyio.sleep(5 * TTL_S)
        assert len(received) == 1
        deployment.kill(worker)
        await anyio.sleep(3 * TTL_S)
        assert received[1:] == [Gone("a/k")]


async def test_what_a_dead_process_left_is_removed_from_the_folder(deployment: Deployment) -> None:
    async with deployment.store() as dead, deployment.store() as front_end:
        for number in range(20):
            await dead.create(f"a/{number}", b"1")
        deployment.kill(dead)
        (deployment.path / "work" / "left").write_bytes(b"half")
        received, _ = record_watch(front_end)
        await anyio.sleep(TTL_S + 2)
        assert keys_of(received) == {}
        await eventually(lambda: not list(deployment.records.glob("[!.]*")), 2 * TTL_S)
        await eventually(lambda: not list((deployment.path / "leases").iterdir()))


async def test_what_cannot_be_removed_is_gone_all_the_same(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the files of another user in a folder where each removes their own only."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    async with deployment.store() as dead, deployment.store() as alive, deployment.store() as front_end:
        await dead.create("a/dead", b"1")
        received, _ = record_watch(front_end)
        await eventually(lambda: keys_of(received) == {"a/dead": b"1"})
        deployment.kill(dead)
        with monkeypatch.context() as other_user:
            other_user.setattr(Leases, "remove", refused)
            other_user.setattr(Path, "unlink", refused)
            await anyio.sleep(3 * TTL_S)
            assert keys_of(received) == {}
        await alive.create("a/k", b"2")
        await eventually(lambda: keys_of(received) == {"a/k": b"2"})


async def test_a_key_that_is_abandoned_twice_lapses_after_the_second_time(deployment: Deployment) -> None:
    async with deployment.store() as store:
        created = await store.create("a/k", b"1")
        store.abandon("a/k")
        await anyio.sleep(TTL_S / 2)
        await store.replace("a/k", b"2", created.revision)
        store.abandon("a/k")
        await anyio.sleep(TTL_S - 1)
        assert await store.get("a/k") is not None
        await anyio.sleep(2)
        assert await store.get("a/k") is None


async def test_a_key_abandoned_while_the_folder_is_away_lapses_when_it_is_back(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.create("a/k", b"1")
        store.abandon("a/k")
        deployment.cut(store)
        await anyio.sleep(3 * TTL_S)
        deployment.mend()
        await anyio.sleep(2)
        assert await store.get("a/k") is None


# -- damaged files, and files of others


@pytest.mark.parametrize(
    "damage", [b"", b"garbage", b"{}\n", b"\xff\xfe\n\n", None, b'{"key": "a/k", "revision": 1}\n']
)
async def test_a_damaged_file_is_passed_over_and_repaired_by_its_writer(
    deployment: Deployment, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    """None: the file, cut."""
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"value")
        await worker.create("a/other", b"value")
        received, _ = record_watch(front_end)
        await anyio.sleep(1)
        path = deployment.records / "a%2fk"
        path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
        await anyio.sleep(1)
        assert "passing over the file" in caplog.text
        await anyio.sleep(TTL_S)
        assert await front_end.entries() == {"a/k": b"value", "a/other": b"value"}
        assert len(received) == 2


async def test_a_damaged_file_of_no_process_stops_no_other(deployment: Deployment) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        (deployment.records / "a%2fk").write_bytes(b"garbage")
        record_watch(front_end)
        await anyio.sleep(1)
        assert await front_end.entries() == {}
        assert await front_end.get("a/k") is None
        assert (await worker.replace("a/k", b"1", 0)).outcome == "missing"
        assert (await worker.create("a/k", b"1")).outcome == "created"
        assert await front_end.entries() == {"a/k": b"1"}


async def test_what_is_not_ours_is_left_alone(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"1")
        strange = deployment.records
        (strange / "README").write_text("hello")
        (strange / ".nfs0001").write_bytes(b"")
        (strange / "folder").mkdir()
        (strange / "link").symlink_to(strange / "a%2fk")
        (strange / "b%2fk").write_bytes((strange / "a%2fk").read_bytes())  # a copy, in the place of another key
        os.mkfifo(strange / "c%2fk")
        with (strange / "huge").open("wb") as huge:
            huge.truncate(2**33)
        received, _ = record_watch(front_end)
        await anyio.sleep(5 * TTL_S)
        assert keys_of(received) == {"a/k": b"1"}
        assert await front_end.get("c/k") is None
        assert len(list(strange.glob("[!.]*"))) == 7
        assert len(caplog.records) == 3


async def test_a_replacement_whose_result_was_not_waited_for_keeps_the_lease(deployment: Deployment) -> None:
    """Otherwise a cancelled change of taints would end a worker's registration."""
    async with deployment.store() as worker, deployment.store() as front_end:
        created = await worker.create("a/k", b"1")
        with anyio.CancelScope() as scope:
            deployment.stop(worker)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worker.replace, "a/k", b"2", created.revision)
                await anyio.sleep(0.1)
                deployment.go_on(worker)
                while not any(b"\n2" in path.read_bytes() for path in deployment.records.glob("[!.]*")):
                    await checkpoint()
                scope.cancel()
        with time_held():  # until the thread has ended, which no task waits for
            await worker.get("a/k")
        await anyio.sleep(5 * TTL_S)
        assert await front_end.entries() == {"a/k": b"2"}


async def test_a_key_whose_creation_was_not_waited_for_is_removed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds it, and it would live as long as its process."""
    async with deployment.store() as worker, deployment.store() as front_end:
        for _ in range(2):
            await _created_unheard(worker, "a/k", monkeypatch)
            with time_held():  # until the thread has ended, which no task waits for
                assert await worker.get("a/k") is not None
            await anyio.sleep(TTL_S)
            assert await front_end.entries() == {}
        assert (await worker.create("a/k", b"2")).outcome == "created"
        await anyio.sleep(3 * TTL_S)
        assert await front_end.entries() == {"a/k": b"2"}


async def test_a_creation_that_was_not_waited_for_is_none_for_the_next_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store() as worker:
        await _created_unheard(worker, "a/k", monkeypatch)
        assert (await worker.create("a/k", b"2")).outcome == "created"
        await anyio.sleep(3 * TTL_S)
        assert await worker.entries() == {"a/k": b"2"}


async def _created_unheard(store: FileStore, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the key in a call that is cancelled when the file is there, before its thread has ended."""
    put_new, is_there, goes_on = Folder.put_new, Event(), Event()

    def put_slowly(folder: Folder, path: Path, content: bytes) -> bool:
        result = put_new(folder, path, content)
        is_there.set()
        goes_on.wait(10)
        return result

    with monkeypatch.context() as slow, anyio.CancelScope() as scope:
        slow.setattr(Folder, "put_new", put_slowly)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.create, key, b"1")
            while not is_there.is_set():
                await checkpoint()
            scope.cancel()
    goes_on.set()


async def test_a_key_deleted_while_a_renewal_waits_for_the_lock_stays_deleted(deployment: Deployment) -> None:
    async with deployment.store() as worker, deployment.store() as front_end:
        await worker.create("a/k", b"1")
        await worker.create("a/other", b"2")
        record_watch(front_end)
        deployment.stop(worker)
        await anyio.sleep(2 * TTL_S)
        assert not list(deployment.records.glob("[!.]*"))
        with (deployment.path / "lock").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            deployment.go_on(worker)
            await anyio.sleep(1)
            await worker.delete("a/k")
        await anyio.sleep(1)
        assert await front_end.entries() == {"a/other": b"2"}


async def test_a_view_that_comes_behind_a_later_one_takes_nothing_back(deployment: Deployment) -> None:
    async with deployment.store() as store:
        received, _ = record_watch(store)
        before = store._index.view
        await store.create("a/k", b"1")
        await anyio.sleep(1)
        store._show(before)
        assert keys_of(received) == {"a/k": b"1"}
        assert len(received) == 1


async def test_a_closed_store_writes_nothing(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.close()
        with pytest.raises(Unavailable, match="is closed"):
            await store.create("a/k", b"1")
        await store.delete("a/k")
        assert not list(deployment.records.glob("[!.]*"))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_folder_that_hangs_keeps_one_thread(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    """In real time: virtual time stands still while a thread works."""
    hanging = Event()
    async with deployment.store() as store:
        await store.create("a/k", b"1")
        before = active_count()
        with monkeypatch.context() as hung:
            hung.setattr(folder_calls, "CALL_TIMEOUT_S", 0.05)
            hung.setattr(Folder, "now", lambda _: hanging.wait(30))
            for _ in range(5):
                with pytest.raises(Unavailable, match="did not answer"):
                    await store.entries()
            assert active_count() <= before + 1
        hanging.set()
        with anyio.fail_after(20):
            while True:
                try:
                    assert await store.entries() == {"a/k": b"1"}
                    break
                except Unavailable:
                    await anyio.sleep(0.01)


# -- the lock


async def test_a_lock_that_is_held_for_long_is_unavailable_and_then_free(deployment: Deployment) -> None:
    async with deployment.store() as store:
        created = await store.create("a/k", b"1")
        with (deployment.path / "lock").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(Unavailable, match="did not answer within 10 s"):
                await store.replace("a/k", b"2", created.revision)
            assert (await store.create("a/new", b"3")).outcome == "created"
            assert (await store.entries()) == {"a/k": b"1", "a/new": b"3"}
        assert (await store.replace("a/k", b"2", created.revision)).outcome == "created"


async def test_a_lock_file_that_was_removed_locks_again(deployment: Deployment) -> None:
    async with deployment.store() as store:
        created = await store.create("a/k", b"1")
        (deployment.path / "lock").unlink()
        assert (await store.replace("a/k", b"2", created.revision)).outcome == "created"


async def test_a_key_that_cannot_be_deleted_is_no_longer_renewed(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.create("a/k", b"1")
        deployment.cut(store)
        with pytest.raises(Unavailable):
            await store.delete("a/k")
        deployment.mend()
        await anyio.sleep(TTL_S + 1)
        assert await store.entries() == {}


async def test_closing_without_the_folder_completes_the_watches(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment.store() as worker, deployment.store() as other:
        await worker.create("a/k", b"1")
        received, _ = record_watch(worker)
        deployment.cut(worker)
        await worker.close()
        assert received[-1] == "completed"
        assert "1 keys could not be removed" in caplog.text
        await anyio.sleep(TTL_S + 1)
        assert await other.entries() == {}
