"""Events gather for a process that is just being sent some; one that comes alone leaves at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from pipeline import Context
from pipeline.network.direct_events.channels import ChannelRequest, DirectEventLimits
from pipeline.network.direct_events.outgoing import ReaderQueue
from pipeline.network.events import Scope

pytestmark = pytest.mark.anyio

LIMITS = DirectEventLimits(batch_events=4, gather_s=0.5)
Item = tuple[float, list[bytes]]


class Reading:
    """A queue whose items are read at once, each with its time."""

    def __init__(self) -> None:
        self.queue = ReaderQueue([], LIMITS)
        self.request = Context(ChannelRequest(Scope("ns"), "topic"))
        self.items: list[Item] = []
        self.has_ended = False
        self._begun_s = anyio.current_time()
        self._sequence = 0

    def push(self, count: int = 1) -> None:
        for _ in range(count):
            self.queue.push(str(self._sequence).encode(), 7, self._sequence, 0)
            self._sequence += 1

    async def read(self) -> None:
        async for batch in self.queue.batches(self.request):
            if batch.runs:
                (run,) = batch.runs
                self.items.append((round(anyio.current_time() - self._begun_s, 6), run.payloads))
        self.has_ended = True


@asynccontextmanager
async def reading() -> AsyncIterator[Reading]:
    one = Reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.read)
        await anyio.sleep(10)
        yield one
        tasks.cancel_scope.cancel()


async def test_an_event_that_comes_alone_is_sent_at_once() -> None:
    async with reading() as one:
        one.push()
        await anyio.sleep(0.001)
        assert one.items == [(10, [b"0"])]
        await anyio.sleep(0.6)
        one.push()
        await anyio.sleep(0.001)
        assert one.items[1:] == [(10.601, [b"1"])]


async def test_events_that_follow_an_item_gather_into_the_next_one() -> None:
    async with reading() as one:
        one.push()
        for _ in range(3):
            await anyio.sleep(0.1)
            one.push()
        assert len(one.items) == 1
        await anyio.sleep(1)
        assert one.items == [(10, [b"0"]), (10.5, [b"1", b"2", b"3"])]


async def test_a_full_item_waits_no_longer() -> None:
    async with reading() as one:
        one.push()
        await anyio.sleep(0.1)
        one.push(3)
        await anyio.sleep(0.1)
        assert len(one.items) == 1
        one.push(2)
        await anyio.sleep(0.001)
        assert one.items == [(10, [b"0"]), (10.2, [b"1", b"2", b"3", b"4"]), (10.2, [b"5"])]


@pytest.mark.parametrize("end", ["close", "stop"])
async def test_the_end_waits_for_nothing_and_what_has_gathered_is_sent(end: str) -> None:
    async with reading() as one:
        one.push()
        await anyio.sleep(0.1)
        one.push()
        await anyio.sleep(0.1)
        if end == "close":
            one.queue.close()
        else:
            one.request.stop()
        await anyio.sleep(0.001)
        assert one.items == [(10, [b"0"]), (10.2, [b"1"])]
        assert one.has_ended
