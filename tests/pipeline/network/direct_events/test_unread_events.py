"""Events that are made when they are sent; those that nobody receives are numbered only.

The publisher's own subscriber may leave its events out.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import anyio
import pytest
from attrs import define, frozen

from pipeline.network import Event, Missed, Scope
from pipeline.network.events import Publisher
from pipeline.protocols.field_rules import U64
from tests.pipeline.network.direct_events.worlds import Process, processes

HERE = Scope("ns", "comp")
TOPIC = "load"


@frozen
class Load:
    """What the tests publish."""

    blocks: U64


@define
class Made:
    """Publishes loads that count up, and counts those that were made."""

    publisher: Publisher
    published: int = 0
    made: int = 0

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.publisher.publish_soon(self._maker(self.published))
            self.published += 1

    def _maker(self, number: int) -> Callable[[], Load]:
        def make() -> Load:
            self.made += 1
            return Load(number)

        return make


def record(process: Process, but: Publisher | None = None) -> list[Any]:
    """Subscribe; return the list of numbers received and of losses reported, which grows with them."""
    received: list[Any] = []
    process.events.missed(HERE, TOPIC).subscribe(received.append)

    def take(event: Event[Load]) -> None:
        assert event.payload.blocks == event.sequence
        received.append(event.sequence)

    process.events.subscribe(HERE, TOPIC, Load, but=but).subscribe(take)
    return received


async def test_an_event_without_a_reader_is_not_made_and_one_that_comes_later_has_missed_it() -> None:
    async with processes(3) as (_, (here, there, later)):
        loads = Made(here.events.publisher(HERE, TOPIC))
        loads.publish(3)
        assert loads.made == 0
        received = record(there)
        await anyio.sleep(1)
        assert received == [Missed(loads.publisher.publisher_id)]
        loads.publish(2)
        await anyio.sleep(1)
        assert (received[1:], loads.made) == ([3, 4], 2)
        last = record(later)
        await anyio.sleep(1)
        loads.publish()
        await anyio.sleep(1)
        assert (received[1:], last) == ([3, 4, 5], [Missed(loads.publisher.publisher_id), 5])


async def test_events_while_no_process_can_read_are_missed_when_one_can_again() -> None:
    async with processes(2) as (made, (here, there)):
        loads, received = Made(here.events.publisher(HERE, TOPIC)), record(there)
        await anyio.sleep(1)
        loads.publish()
        await anyio.sleep(1)
        made.faults.cut.add(here.number)
        made.faults.break_streams()
        await anyio.sleep(20)
        loads.publish(2)
        assert loads.made == 1
        made.faults.cut.clear()
        await anyio.sleep(6)
        loads.publish()
        await anyio.sleep(1)
        assert received == [0, Missed(loads.publisher.publisher_id), 3]


async def test_a_subscriber_without_its_own_events_receives_those_of_all_others() -> None:
    async with processes(2) as (_, (here, there)):
        mine, other = (Made(here.events.publisher(HERE, TOPIC)) for _ in range(2))
        elsewhere = Made(there.events.publisher(HERE, TOPIC))
        received = record(here, but=mine.publisher)
        await anyio.sleep(1)
        mine.publish()
        assert (received, mine.made) == ([], 0)
        for number, loads in enumerate((other, elsewhere)):
            loads.publish()
            await anyio.sleep(1)
            assert (received, loads.made) == ([0] * (number + 1), 1)
        everything = record(here)
        mine.publish()
        assert (everything, mine.made) == ([1], 1)
        assert received == [0, 0]


async def test_threads_publish_what_is_read_in_the_order_of_the_numbers() -> None:
    """In another thread it is not known whether there are readers."""
    async with processes(1) as (_, (here,)):
        loads = Made(here.events.publisher(HERE, TOPIC))
        loads.publish(2)
        received = record(here)
        thread = Thread(target=loads.publish, args=(50,))
        thread.start()
        thread.join()  # the loop does nothing meanwhile
        loads.publish(2)
        await anyio.sleep(1)
        assert received == list(range(2, 54))
        assert loads.made == 52


async def test_an_event_is_made_when_it_is_sent_and_not_before() -> None:
    """So whatever happened until then can be part of it, however many processes read."""
    async with processes(3) as (_, (here, *others)):
        publisher, happened = here.events.publisher(HERE, TOPIC), [3]
        received = [loads_received(other) for other in others]
        await anyio.sleep(1)
        assert publisher.publish_soon(lambda: Load(sum(happened)))
        happened.append(4)
        await anyio.sleep(1)
        happened.append(5)
        assert received == [[7], [7]]


def loads_received(process: Process) -> list[int]:
    received: list[int] = []
    process.events.subscribe(HERE, TOPIC, Load).subscribe(lambda event: received.append(event.payload.blocks))
    return received


@pytest.mark.parametrize("how", ["publish", "publish_soon"])
async def test_an_event_that_is_due_comes_before_the_next_one(how: str) -> None:
    async with processes(2) as (_, (here, there)):
        loads, received = Made(here.events.publisher(HERE, TOPIC)), record(there)
        await anyio.sleep(1)
        loads.publish(2)
        assert loads.made == 1
        if how == "publish":
            loads.publisher.publish(Load(2))
            assert loads.made == 2
        else:
            loads.publish()
        await anyio.sleep(1)
        assert received == [0, 1, 2]


async def test_an_event_that_cannot_be_made_is_missed_and_ends_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> object:
        raise ValueError("no event")

    async with processes(2) as (_, (here, there)):
        loads, received = Made(here.events.publisher(HERE, TOPIC)), record(there)
        await anyio.sleep(1)
        for make in (fail, object):  # the second has no MessagePack form
            loads.publisher.publish_soon(make)
            await anyio.sleep(1)
            assert "is lost" in caplog.text
            caplog.clear()
        loads.published = 2
        loads.publish()
        await anyio.sleep(1)
        assert received == [Missed(loads.publisher.publisher_id), 2]


async def test_an_event_that_is_due_leaves_with_the_plane() -> None:
    async with processes(2) as (_, (here, there)):
        loads, received = Made(here.events.publisher(HERE, TOPIC)), record(there)
        await anyio.sleep(1)
        loads.publish()
        await here.events.close()
        assert loads.made == 1
        await anyio.sleep(1)
        assert received == [0]


async def test_an_event_whose_only_reader_has_gone_is_made_and_missed() -> None:
    async with processes(2) as (made, (here, there)):
        loads, received = Made(here.events.publisher(HERE, TOPIC)), record(there)
        await anyio.sleep(1)
        made.faults.held = anyio.Event()  # the reader takes nothing more
        loads.publish()
        await anyio.sleep(1)
        loads.publish()
        made.faults.break_streams()
        made.faults.held.set()
        made.faults.held = None
        await anyio.sleep(10)
        assert loads.made == 2
        loads.publish()
        await anyio.sleep(1)
        assert (received[-1], loads.made) == (2, 3)
        assert received[:-1] in ([0, Missed(loads.publisher.publisher_id)], [Missed(loads.publisher.publisher_id)])
