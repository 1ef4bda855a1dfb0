"""Real processes that share a folder: killed, stopped, in each other's way, on a full disk. In real time."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.discovery import measure
from pipeline import Unavailable
from pipeline.network.files import FileStore
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.files.worlds import keys_of
from tests.pipeline.network.worlds import eventually, record_watch

TTL_S = 2.0
ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.slow


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """A loop in real time."""
    return request.param


@asynccontextmanager
async def opened(folder: Path, ttl_s: float = TTL_S) -> AsyncIterator[FileStore]:
    async with AnyIOScheduler() as scheduler:
        store = FileStore(folder, scheduler, ttl_s)
        await store.open()
        yield store
        await store.close()


@contextmanager
def process(*arguments: object, waits: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run a holder, once it is ready; it is killed at the end."""
    command = [sys.executable, "-m", "tests.pipeline.network.files.holder", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            if waits:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def keys(prefix: str, count: int) -> dict[str, bytes]:
    return {f"{prefix}/{number}": b"%d" % number for number in range(count)}


async def test_the_keys_of_a_killed_process_expire_and_no_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        received, _ = record_watch(store)
        with process("hold", tmp_path, TTL_S, "a", 5) as killed, process("hold", tmp_path, TTL_S, "b", 5):
            await eventually(lambda: keys_of(received) == keys("a", 5) | keys("b", 5))
            killed.kill()
            await eventually(lambda: keys_of(received) == keys("b", 5), 15.0)
            await anyio.sleep(2 * TTL_S)
            assert keys_of(received) == keys("b", 5)
            assert len(received) == 15


async def test_a_process_that_ends_in_order_leaves_nothing(tmp_path: Path) -> None:
    ttl_s = 60.0  # its keys do not lapse meanwhile
    async with opened(tmp_path, ttl_s) as store:
        received, _ = record_watch(store)
        with process("hold", tmp_path, ttl_s, "a", 3) as child:
            await eventually(lambda: keys_of(received) == keys("a", 3))
            assert child.stdin is not None
            child.stdin.close()
            await eventually(lambda: keys_of(received) == {}, 20.0)
            await eventually(lambda: not list((tmp_path / "records").glob("[!.]*")))


async def test_a_stopped_process_registers_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        received, _ = record_watch(store)
        with process("hold", tmp_path, TTL_S, "a", 3) as child:
            await eventually(lambda: keys_of(received) == keys("a", 3))
            child.send_signal(signal.SIGSTOP)
            await anyio.sleep(4 * TTL_S)
            assert keys_of(received) == {}
            assert not list((tmp_path / "records").glob("[!.]*"))
            child.send_signal(signal.SIGCONT)
            await eventually(lambda: keys_of(received) == keys("a", 3), 15.0)
            assert len(received) == 9


async def test_a_stopped_watcher_keeps_what_lives(tmp_path: Path) -> None:
    """The watcher is this process's loop, which takes no turn meanwhile."""
    async with opened(tmp_path) as store:
        received, _ = record_watch(store)
        with process("hold", tmp_path, TTL_S, "a", 3):
            await eventually(lambda: keys_of(received) == keys("a", 3))
            subprocess.run(["sleep", str(3 * TTL_S)], check=True)  # noqa: ASYNC221
            await anyio.sleep(2 * TTL_S)
            assert len(received) == 3


async def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    async with opened(tmp_path, 600.0) as store:  # this loop stands still while the other process starts
        created = await store.create("a/k", b"1")
        with process("lock", tmp_path) as child:
            with anyio.move_on_after(0.5) as waited:
                await store.replace("a/k", b"2", created.revision)
            assert waited.cancelled_caught
            child.kill()
            child.wait()
            assert (await store.replace("a/k", b"2", created.revision)).outcome == "created"


async def test_processes_that_replace_one_key_lose_no_write(tmp_path: Path) -> None:
    async with opened(tmp_path, 600.0) as store:
        await store.create("a/k", b"0")
        received, _ = record_watch(store)
        counting = "count", tmp_path, 600, "a/k", 50
        with process(*counting, waits=False) as first, process(*counting, waits=False) as second:
            await eventually(lambda: None not in (first.poll(), second.poll()), 60.0)
        known = await store.get("a/k")
        assert known is not None
        assert known.value == b"100"
        await eventually(lambda: keys_of(received) == {"a/k": b"100"})


async def test_on_a_full_disk_leases_are_held_and_it_goes_on_by_itself(tmp_path: Path) -> None:
    """A real one, of 256 KB, where this process may mount it."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:  # noqa: ASYNC221
        pytest.skip("needs the right to mount a small disk")
    try:
        async with opened(tmp_path) as store:
            received, _ = record_watch(store)
            with process("hold", tmp_path, TTL_S, "a", 5):
                await eventually(lambda: keys_of(received) == keys("a", 5))
                with pytest.raises(OSError, match="No space"):
                    (tmp_path / "junk").write_bytes(bytes(1 << 20))
                with pytest.raises(Unavailable, match="No space"):
                    await store.create("b/0", b"0" * 10_000)
                await anyio.sleep(4 * TTL_S)
                assert len(received) == 5
                (tmp_path / "junk").unlink()
                await store.create("b/0", b"0" * 10_000)
                await eventually(lambda: len(keys_of(received)) == 6)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: ASYNC221


async def test_thousands_of_keys_are_seen_and_held(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        received, _ = record_watch(store)
        with process("hold", tmp_path, TTL_S, "a", 3000) as child:
            await eventually(lambda: keys_of(received) == keys("a", 3000), 30.0)
            await anyio.sleep(3 * TTL_S)
            assert len(received) == 3000
            child.kill()
            await eventually(lambda: keys_of(received) == {}, 30.0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_cost_of_discovery_can_be_measured(tmp_path: Path) -> None:
    figures = await measure(f"file:{tmp_path}", instances=12, stores=8, idle_s=2, joins=2)
    assert figures.instances == 12
    assert 0 < figures.snapshot_s < 10
    assert 0 < figures.first_answer_s < 10
    assert 0 < figures.join_s < 5
    assert 0 < figures.watching_cpu < 0.5
    assert not list((tmp_path / "records").glob("[!.]*"))
