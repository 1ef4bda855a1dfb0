"""A router alone publishes nothing to anyone; one that appears gets all, whenever it comes."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv.load import (
    ACTIVE_SEQUENCES_TOPIC,
    BATCH_EVENTS,
    BOOKED,
    COMPUTED,
    RouterSteps,
    SequenceLoad,
    shared_bookings,
)
from operators.kv.reservation import Reservation
from pipeline.network import Scope
from tests.operators.kv.load.worlds import ENDPOINT, placed, prompt, router_of, view
from tests.pipeline.network.direct_events.worlds import Deployment, deployment

IDLE = view(router_of(None))


@pytest.mark.parametrize("turns", [*range(0, 24, 3), 40])
async def test_a_router_that_comes_between_any_two_steps_gets_all(turns: int) -> None:
    """The other one books, computes and ends without a pause: before, while and after it is asked, found and read."""
    async with (
        deployment() as made,
        made.process() as here,
        shared_bookings(here, ENDPOINT) as peers,
        router_of(peers) as busy,
    ):
        held: list[Reservation] = []

        async def work() -> None:
            for number in range(60):
                held.append(await placed(busy, prompt(8 + number, first=number), f"{number}"))
                await checkpoint()
                held[len(held) // 2].mark_prefill_completed()
                await checkpoint()
                if number % 3:
                    held.pop(0).release()
                    await checkpoint()

        found: list[list[tuple[int, ...]]] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            for _ in range(turns):
                await checkpoint()
            await _join(made, found)
        assert len(held) == 20
        assert found == [view(busy)]
        for booked in held:
            booked.release()


async def _join(made: Deployment, found: list[list[tuple[int, ...]]]) -> None:
    async with made.process() as late, shared_bookings(late, ENDPOINT) as peers, router_of(peers) as router:
        await anyio.sleep(2)
        assert view(router) != IDLE
        found.append(view(router))


async def test_a_router_that_is_alone_again_goes_on_for_the_next_one() -> None:
    async with (
        deployment() as made,
        made.process() as here,
        shared_bookings(here, ENDPOINT) as peers,
        router_of(peers) as alone,
    ):
        held = []
        for number in range(3):
            held.append(await placed(alone, prompt(20, first=number), f"{number}"))
            found: list[list[tuple[int, ...]]] = []
            await _join(made, found)
            assert found == [view(alone)]
            held[0].mark_prefill_completed()
            await anyio.sleep(20)
        for booked in held:
            booked.release()


class Hashes(list[int]):
    """Hashes that count how often they are read."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        self.read += 1
        return super().__iter__()


async def test_what_a_router_publishes_is_made_for_another_one_only() -> None:
    async with (
        deployment() as made,
        made.process() as here,
        shared_bookings(here, ENDPOINT) as peers,
        router_of(peers) as alone,
    ):
        booked, hashes = await placed(alone, prompt(), "r"), Hashes([1])
        peers.publish(BOOKED, booked, SequenceLoad(hashes, 4))
        peers.publish(COMPUTED, booked)
        await anyio.sleep(1)
        assert hashes.read == 0
        async with made.process() as there, shared_bookings(there, ENDPOINT) as other, router_of(other):
            await anyio.sleep(2)
            peers.publish(BOOKED, booked, SequenceLoad(hashes, 4))
            await anyio.sleep(1)
            assert hashes.read == 1
        booked.release()


async def test_steps_until_events_are_sent_are_one_event_of_so_many_at_most() -> None:
    async with (
        deployment() as made,
        made.process() as here,
        made.process() as there,
        shared_bookings(here, ENDPOINT) as peers,
        router_of(peers) as router,
    ):
        events: list[str] = []
        steps = there.events.subscribe(Scope("ns", "workers"), ACTIVE_SEQUENCES_TOPIC, RouterSteps)
        steps.subscribe(lambda event: events.append(event.payload.kinds))
        await anyio.sleep(1)
        booked = await placed(router, prompt(), "r")
        booked.mark_prefill_completed()
        booked.release()
        await anyio.sleep(1)
        assert events == ["bce"]
        events.clear()
        for _ in range(BATCH_EVENTS + 1):
            peers.publish(COMPUTED, booked)
        await anyio.sleep(1)
        assert list(map(len, events)) == [BATCH_EVENTS, 1]
