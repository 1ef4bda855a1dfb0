"""The two processes of the flood: `python -m tests.processes.flood worker` and `... client`, joined by one connection.

The worker has two engines: one that yields items as fast as they are taken, and one that yields an item per tick. The
client reads the first slowly, in turns with pauses, and many streams of the second beside it. It prints a line when the
flood begins, and a report as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from statistics import quantiles
from typing import Any

import anyio
from attrs import asdict, evolve, frozen

from pipeline import AsyncEngine, Context, ResponseStream
from pipeline.network import EndpointId, Instance
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.rx import AnyIOScheduler

TICK_S = 0.01
"""Time between the items of a paced stream."""
STREAMS = 50
"""Paced streams."""
ITEMS = 1_000_000
"""Items of the flood."""
READ_AT_ONCE, PAUSE_S = 400, 0.01
"""The slow reader pauses after so many items."""
CALM_S = 5.0
"""Time of the paced streams before the flood."""
FLOODED_TURN_S, SETTLE_S, CALM_TURN_S = 4.0, 0.5, 1.5
"""The flood is read for so long; then it stands, and after what settles the paced streams are calm for so long. In
turns, so that what disturbs the machine disturbs both."""


@frozen
class Report:
    """What the client has seen."""

    items: int
    """Of the flood, in order, each once."""
    flood_s: float
    calm_p99_ms: float
    """99th percentile of the time between items of a paced stream, before the flood and while it stands."""
    flooded_p99_ms: float
    """The same while the flood is read."""
    calm_gaps: int
    flooded_gaps: int


class Flood(AsyncEngine[int, int]):
    """Yields as many numbers as the payload has, counted from 0, without a pause but to let others run."""

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(self._items(request), request)

    async def _items(self, request: Context[int]) -> AsyncGenerator[int, None]:
        for item in range(request.payload):
            if item % 64 == 0:
                await anyio.lowlevel.checkpoint()
                if request.is_stopped:
                    return
            yield item


class Paced(AsyncEngine[int, int]):
    """Yields a number per tick until it is stopped."""

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(self._items(request), request)

    async def _items(self, request: Context[int]) -> AsyncGenerator[int, None]:
        item, next_s = 0, anyio.current_time()
        while not request.is_stopped:
            next_s += TICK_S
            await anyio.sleep_until(next_s)
            yield item
            item += 1


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def instance(name: str) -> Instance:
    return Instance.of(EndpointId("tests", "flood", name), 1)


async def worker() -> None:
    """Serve both engines until standard input ends; print their addresses."""
    async with AnyIOScheduler() as scheduler:
        plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False))
        await plane.open()
        reached, _ = await plane.serve(instance("flood"), Flood())
        await plane.serve(instance("paced"), Paced())
        print_line(json.dumps(dict(reached.transport)))
        await anyio.to_thread.run_sync(sys.stdin.read)
        await plane.close()


class Gaps:
    """The times between the items of all paced streams, calm ones and those during the flood."""

    def __init__(self) -> None:
        self.is_flooded: bool | None = False
        """None: neither, it changes."""
        self.may_read = anyio.Event()
        """Whether the flood is read now."""
        self.seen: dict[bool, list[float]] = {False: [], True: []}

    async def take_turns(self) -> None:
        while True:
            self.is_flooded = True
            self.may_read.set()
            await anyio.sleep(FLOODED_TURN_S)
            self.may_read, self.is_flooded = anyio.Event(), None
            await anyio.sleep(SETTLE_S)
            self.is_flooded = False
            await anyio.sleep(CALM_TURN_S)

    async def follow(self, stream: ResponseStream[int]) -> None:
        last_s, expected = anyio.current_time(), 0
        async with stream:
            async for item in stream:
                assert item == expected, f"{item} in the place of {expected}"
                expected += 1
                now_s = anyio.current_time()
                if self.is_flooded is not None:
                    self.seen[self.is_flooded].append(now_s - last_s)
                last_s = now_s

    def p99_ms(self, is_flooded: bool) -> float:
        return quantiles(self.seen[is_flooded], n=100)[-1] * 1000


async def client(transport: dict[str, str], items: int) -> Report:
    """Read all streams as the module has it."""
    gaps = Gaps()
    async with AnyIOScheduler() as scheduler, anyio.create_task_group() as tasks:
        plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False))
        await plane.open()
        paced, flood = (plane.engine(evolve(instance(name), transport=transport), int) for name in ("paced", "flood"))
        control = [Context(0) for _ in range(STREAMS)]
        for each in control:
            tasks.start_soon(gaps.follow, await paced.generate(each))
        await anyio.sleep(1.0)  # until all are under way
        gaps.seen[False].clear()
        await anyio.sleep(CALM_S)
        print_line("the flood begins")
        begun_s, count = anyio.current_time(), 0
        tasks.start_soon(gaps.take_turns)
        async with await flood.generate(Context(items)) as stream:
            async for item in stream:
                assert item == count, f"{item} in the place of {count}"
                count += 1
                if count % READ_AT_ONCE == 0:
                    await anyio.sleep(PAUSE_S)
                    await gaps.may_read.wait()
        flood_s = anyio.current_time() - begun_s
        for each in control:
            each.stop()
        calm, flooded = gaps.seen[False], gaps.seen[True]
        report = Report(count, flood_s, gaps.p99_ms(False), gaps.p99_ms(True), len(calm), len(flooded))
        await plane.close()  # which ends what is left of them
        tasks.cancel_scope.cancel()
        return report
    raise AssertionError("a task group let a failure pass")


def main(role: str, *arguments: str) -> None:
    if role == "worker":
        anyio.run(worker)
        return
    transport: dict[str, Any] = json.loads(arguments[0])
    print_line(json.dumps(asdict(anyio.run(client, transport, int(arguments[1])))))


if __name__ == "__main__":
    main(*sys.argv[1:])
