"""A worker process that floods a slow reader with a million items, fifty other streams on the same connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import pytest

from pipeline import Annotated, AsyncEngine, Context, Disconnected
from pipeline.network.names import Instance
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.protocols import LLMEngineOutput
from pipeline.rx import AnyIOScheduler
from pipeline.wire import from_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc"),
]

ROOT = Path(__file__).parents[4]
WORKER = Path(__file__).parent / "flood_worker.py"
ITEMS = 1_000_000
OTHERS = 50
KIND: Any = Annotated[LLMEngineOutput]


@pytest.fixture
def anyio_backend() -> str:
    """In real time, with real processes."""
    return "asyncio"


@contextmanager
def worker() -> Iterator[tuple[int, Instance]]:
    """A worker process: its id and its instance."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, WORKER], stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.pid, from_json(process.stdout.readline(), Instance)
        finally:
            process.kill()


def memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def gap_p99_ms(engine: AsyncEngine[Any, Any], items: int) -> float:
    """Return the 99th percentile of the gaps between the tokens of 50 streams."""
    found: list[float] = []

    async def read() -> None:
        async with await engine.generate(Context({"items": items, "paced": True})) as stream:
            before_s: float | None = None
            async for _ in stream:
                now_s = anyio.current_time()
                if before_s is not None:
                    found.append((now_s - before_s) * 1000)
                before_s = now_s

    async with anyio.create_task_group() as tasks:
        for _ in range(OTHERS):
            tasks.start_soon(read)
    return sorted(found)[len(found) * 99 // 100]


class SlowReader:
    """Reads a flood at some 50,000 items a second, while it may."""

    def __init__(self) -> None:
        self.read = 0
        self.has_ended = False
        self._may_read = anyio.Event()

    def goes_on(self) -> None:
        self._may_read.set()

    def pauses(self) -> None:
        self._may_read = anyio.Event()

    async def read_all(self, engine: AsyncEngine[Any, Any]) -> None:
        async with await engine.generate(Context({"items": ITEMS, "paced": False})) as stream:
            async for item in stream:
                count = len(item.data.token_ids)  # those that wait together are one item
                assert item.data.token_ids == list(range(self.read, self.read + count))
                before, self.read = self.read, self.read + count
                if self.read // 500 > before // 500:
                    await anyio.sleep(0.01)
                    await self._may_read.wait()
        self.has_ended = True


async def test_a_flood_of_a_million_items_takes_no_memory_and_holds_up_no_other_stream() -> None:
    with worker() as (pid, instance):
        async with AnyIOScheduler() as scheduler:
            plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False))
            await plane.open()
            engine, reader = plane.engine(instance, KIND), SlowReader()
            await gap_p99_ms(engine, 50)
            before = memory_mib(pid), memory_mib(os.getpid())
            most, quiet_ms, flooded_ms = [0.0, 0.0], list[float](), list[float]()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader.read_all, engine)
                while not reader.has_ended:  # in turns, so that what disturbs the machine disturbs both
                    reader.pauses()
                    quiet_ms.append(await gap_p99_ms(engine, 50))
                    reader.goes_on()
                    flooded_ms.append(await gap_p99_ms(engine, 150))
                    now = memory_mib(pid), memory_mib(os.getpid())
                    most = [max(more, at - then) for more, at, then in zip(most, now, before, strict=True)]
            await plane.close()
    assert reader.read == ITEMS
    assert max(most) < 15
    assert median(flooded_ms) <= 2 * median(quiet_ms), (flooded_ms, quiet_ms)


async def test_a_worker_process_that_is_killed_or_stands_still_is_a_disconnect() -> None:
    """The end of a process is seen at once, not by its silence; one that stands still is silent."""
    for sent, lost_after_s, within_s in ((signal.SIGKILL, 60.0, 10.0), (signal.SIGSTOP, 0.8, 60.0)):
        options = TcpOptions(has_unix_socket=False, heartbeat_s=0.2, lost_after_s=lost_after_s)
        with worker() as (pid, instance):
            async with AnyIOScheduler() as scheduler:
                plane = TcpRequestPlane(scheduler, options)
                await plane.open()
                stream = await plane.engine(instance, KIND).generate(Context({"items": 10_000, "paced": True}))
                async with stream:
                    await stream.__anext__()
                    os.kill(pid, sent)
                    with anyio.fail_after(within_s), pytest.raises(Disconnected):
                        async for _ in stream:
                            pass
                os.kill(pid, signal.SIGCONT)
                await plane.close()
