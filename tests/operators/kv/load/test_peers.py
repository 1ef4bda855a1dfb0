"""shared_bookings: routers in different processes know each other's bookings, whatever was lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kv import KvRouter, WorkerRank, shared_bookings
from operators.kv.load import (
    ACTIVE_SEQUENCES_TOPIC,
    ActiveSequenceEvent,
    AddRequest,
    BookingsPart,
    BookingsRequest,
    ReplicaSync,
    SequenceLoad,
    ShareLimits,
)
from operators.kv.load.peers import BOOKINGS_ENDPOINT
from operators.kv.reservation import Reservation
from pipeline import AsyncEngine, function_engine
from pipeline.network import Missed, Scope
from pipeline.network.direct_events import DirectEventLimits
from pipeline.wire import from_msgpack, to_msgpack
from tests.operators.kv.load.worlds import ENDPOINT, placed, prompt, router_of, view
from tests.pipeline.network.direct_events.worlds import Deployment, Process, deployment

BOOKINGS = f"ns/workers/{BOOKINGS_ENDPOINT}"


@define(eq=False)
class Front:
    """A front end: a process with a router."""

    process: Process
    router: KvRouter
    peers: ReplicaSync

    @property
    def loads(self) -> list[tuple[int, ...]]:
        """What its router believes its workers have to do."""
        return view(self.router)


@asynccontextmanager
async def front(made: Deployment, limits: ShareLimits | None = None, **given: Any) -> AsyncIterator[Front]:
    """Give another front end, which ends with the block."""
    events = given.pop("events", None)
    async with (
        made.process(events) as process,
        shared_bookings(process, ENDPOINT, limits=limits) as peers,
        router_of(peers, **given) as router,
    ):
        yield Front(process, router, peers)


@asynccontextmanager
async def fronts(count: int, **given: Any) -> AsyncIterator[tuple[Deployment, list[Front]]]:
    """Give a deployment of so many front ends that have seen each other."""
    async with deployment() as made, AsyncExitStack() as stack:
        found = [await stack.enter_async_context(front(made, **given)) for _ in range(count)]
        await anyio.sleep(1)
        yield made, found


IDLE = view(router_of(None))


async def test_front_ends_see_each_others_bookings() -> None:
    async with fronts(3) as (_, (here, *others)):
        booked = await placed(here.router, prompt(), "r")
        await anyio.sleep(1)
        assert here.loads != IDLE
        assert [other.loads for other in others] == [here.loads] * 2
        booked.mark_prefill_completed()
        await anyio.sleep(1)
        assert [other.loads for other in others] == [here.loads] * 2
        booked.release()
        await anyio.sleep(1)
        assert [one.loads for one in (here, *others)] == [IDLE] * 3


async def test_a_front_end_that_starts_late_gets_what_is_booked() -> None:
    async with fronts(2) as (made, (here, there)):
        computed = await placed(here.router, prompt(40), "computed")
        computed.mark_prefill_completed()
        ended = await placed(here.router, prompt(), "ended")
        ended.release()
        held = [await placed(one.router, prompt(12, first=n), f"{n}") for n in range(200) for one in (here, there)]
        await anyio.sleep(1)
        async with front(made) as late:
            await anyio.sleep(1)
            assert late.loads == here.loads == there.loads
            for booked in (computed, *held):
                booked.release()
            await anyio.sleep(1)
            assert late.loads == IDLE


async def test_a_prompt_that_is_half_computed_counts_half_for_one_that_comes_late() -> None:
    given: dict[str, Any] = {
        "config": {"router_prefill_load_model": "aic"},
        "prefill_duration": lambda prompt, cached: 10.0,
    }
    async with fronts(1, **given) as (made, (here,)):
        await placed(here.router, prompt(40, worker_id=1), "r")
        await anyio.sleep(5)
        async with front(made, **given) as late:
            await anyio.sleep(1)
            assert late.loads == here.loads
            assert here.loads[0][1] < 40
            await anyio.sleep(2)
            assert late.loads == here.loads


async def test_the_bookings_of_a_front_end_that_died_go_when_its_lease_has_lapsed() -> None:
    async with fronts(2) as (_, (here, there)):
        await placed(there.router, prompt(), "theirs")
        await anyio.sleep(1)
        alone = here.loads
        await placed(here.router, prompt(12), "mine")
        await anyio.sleep(1)
        there.process.crash()
        await anyio.sleep(5)
        assert len(here.router.loads) == 2
        await anyio.sleep(10)
        assert len(here.router.loads) == 1
        assert here.loads not in (alone, IDLE)


async def test_a_front_end_that_hung_is_known_again_with_what_happened_meanwhile() -> None:
    async with fronts(2) as (made, (here, there)):
        old = await placed(there.router, prompt(), "old")
        (key,) = [
            key for key in await made.store.entries() if key.endswith(f"{BOOKINGS_ENDPOINT}/{there.peers.router_id:x}")
        ]
        value = (await made.store.entries())[key]
        made.store.abandon(key)
        await anyio.sleep(11)
        assert here.loads == IDLE
        old.release()
        await placed(there.router, prompt(16), "new")
        await made.store.create(key, value)
        await anyio.sleep(1)
        assert here.loads == there.loads != IDLE


async def test_an_end_of_a_front_end_makes_room_for_requests_that_wait_elsewhere() -> None:
    async with fronts(1) as (made, (here,)):
        woken: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.peers.run, lambda: woken.append(anyio.current_time()))
            async with front(made) as there:
                await anyio.sleep(1)
                await placed(there.router, prompt(), "r")
                await anyio.sleep(1)
                assert (here.loads != IDLE, woken) == (True, [])
            await anyio.sleep(1)
            assert (here.loads, len(woken)) == (IDLE, 1)
            tasks.cancel_scope.cancel()


async def test_what_happened_while_a_connection_was_broken_is_repaired_without_another_event() -> None:
    async with fronts(2) as (made, (here, there)):
        old = [await placed(here.router, prompt(8, first=n), f"old {n}") for n in range(4)]
        await anyio.sleep(1)
        made.faults.cut.add(here.process.number)
        made.faults.break_streams()
        for booked in old[:3]:
            booked.release()
        for number in range(3):
            await placed(here.router, prompt(16, first=number), f"new {number}")
        await anyio.sleep(60)
        assert there.loads != here.loads, "what is known stays"
        made.faults.cut.clear()
        await anyio.sleep(12)
        assert there.loads == here.loads


async def test_events_lost_on_the_way_are_repaired() -> None:
    async with fronts(2, events=DirectEventLimits(events=4, batch_events=1)) as (made, (here, there)):
        made.faults.held = anyio.Event()
        for number in range(50):
            booked = await placed(here.router, prompt(8, first=number), f"{number}")
            if number % 3:
                booked.release()
        made.faults.held.set()
        await anyio.sleep(1)
        assert there.loads == here.loads != IDLE


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_reported_loss_requests_the_bookings_of_that_router_or_of_all(is_named: bool) -> None:
    """A plane over a broker reports all after it was away."""
    async with fronts(3) as (_, (here, there, elsewhere)):
        for one in (there, elsewhere):
            await placed(one.router, prompt(), "r")
        await anyio.sleep(1)
        known = here.loads
        for one in (there, elsewhere):
            here.peers.forget(one.peers.router_id)
        assert here.loads == IDLE
        lost = Missed(there.peers.router_id) if is_named else Missed()
        here.process.events.incoming._missed[Scope("ns", "workers"), ACTIVE_SEQUENCES_TOPIC].push(lost)
        await anyio.sleep(1)
        assert len(here.router.loads) == (1 if is_named else 2)
        assert (here.loads == known) is not is_named


async def test_what_happens_while_a_snapshot_is_on_its_way_counts() -> None:
    """The answer is held while the router goes on; its events arrive before it, and after."""
    async with fronts(1) as (made, (here,)):
        kept = [await placed(here.router, prompt(8, first=n), f"{n}") for n in range(5)]
        async with front(made) as late:
            await anyio.lowlevel.checkpoint()
            made.faults.held = anyio.Event()
            kept.pop().release()
            kept.append(await placed(here.router, prompt(40), "new"))
            await anyio.sleep(3)
            made.faults.held.set()
            await anyio.sleep(1)
            assert late.loads == here.loads
            kept[0].mark_prefill_completed()
            await anyio.sleep(1)
            assert late.loads == here.loads


async def test_more_events_than_are_kept_during_a_repair_make_another_one_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.kv.load.replicas.KEPT_EVENTS", 3)
    sync, events = None, [added(number) for number in range(5)]
    async with fronts(1) as (_, (here,)):
        sync = here.peers
        sync.begin_repair(5)
        for event in events:
            sync._since[5].append(event)
        assert not sync.end_repair(5, [])
        assert len(here.router.loads) == 3
        sync.begin_repair(5)
        assert sync.end_repair(5, events)
        assert len(here.router.loads) == 5
        sync.forget(5)
        assert not sync.end_repair(5, events), "it is gone"
        assert len(here.router.loads) == 0


def added(number: int, router_id: int = 5) -> ActiveSequenceEvent:
    """A booking of another router."""
    return ActiveSequenceEvent(f"r{number}", WorkerRank(1), AddRequest.of(SequenceLoad([number], 4)), router_id)


@asynccontextmanager
async def stranger(made: Deployment, engine: AsyncEngine[Any, Any], router_id: int = 5) -> AsyncIterator[None]:
    """Have a process that answers with this engine for the router of this id."""
    async with made.process() as process:
        await process.serve(BOOKINGS, engine, instance_id=router_id)
        yield


def giving(*bookings: ActiveSequenceEvent) -> AsyncEngine[Any, Any]:
    """Return an engine that gives these bookings, all of one router."""

    async def give(request: BookingsRequest) -> AsyncIterator[BookingsPart]:
        yield BookingsPart(bookings[0].router_id, list(bookings))

    return function_engine(give)


async def test_a_router_answers_for_itself_only() -> None:
    engine = giving(added(1), added(2, router_id=6), added(3))
    async with fronts(1) as (made, (here,)), stranger(made, engine):
        await anyio.sleep(1)
        assert len(here.router.loads) == 2


async def test_a_router_that_does_not_answer_delays_no_other() -> None:
    open_answers: list[int] = []

    @function_engine
    async def give(request: BookingsRequest) -> AsyncIterator[BookingsPart]:
        open_answers.append(1)
        try:
            yield BookingsPart(5, [added(1)])
            await anyio.sleep_forever()
        finally:
            open_answers.pop()

    async with fronts(1) as (made, (here,)), stranger(made, give):
        await anyio.sleep(1)
        async with stranger(made, giving(added(2, router_id=6)), router_id=6):
            await anyio.sleep(1)
            assert len(here.router.loads) == 1, "half an answer does not count"
        await anyio.sleep(1)
        assert len(here.router.loads) == 0
        async with front(made) as late:
            await placed(here.router, prompt(), "r")
            await anyio.sleep(1)
            assert (len(late.router.loads), len(open_answers)) == (1, 2)
        await anyio.sleep(1)
        assert len(open_answers) == 1, "the requests of a front end that has ended are closed"


async def test_a_router_that_is_back_under_its_id_is_known_anew() -> None:
    async with fronts(1) as (made, (here,)):
        for bookings in ([added(1), added(2)], [added(3)]):
            async with stranger(made, giving(*bookings)):
                await anyio.sleep(1)
                assert len(here.router.loads) == len(bookings)
        await anyio.sleep(1)
        assert here.loads == IDLE


@pytest.mark.parametrize("answer", [5, {"bookings": []}, {"router_id": 5, "bookings": [{}]}])
async def test_a_malformed_answer_changes_nothing_and_is_requested_again_ever_later(answer: Any) -> None:
    requests: list[float] = []

    @function_engine
    async def give(request: BookingsRequest) -> AsyncIterator[Any]:
        requests.append(anyio.current_time())
        yield answer if len(requests) < 30 else BookingsPart(5, [added(1)])

    async with fronts(2) as (made, (here, there)):
        await placed(there.router, prompt(), "r")
        async with stranger(made, give):
            await anyio.sleep(20)
            assert (len(here.router.loads), 4 <= len(requests) < 30) == (1, True)
            await anyio.sleep(300)
            assert len(here.router.loads) == 2


async def test_an_answer_without_end_is_refused() -> None:
    requests: list[float] = []

    @function_engine
    async def give(request: BookingsRequest) -> AsyncIterator[BookingsPart]:
        requests.append(anyio.current_time())
        while True:
            yield BookingsPart(5, [added(1)] * 50)
            await anyio.sleep(0.001)

    async with fronts(1, limits=ShareLimits(bookings=500)) as (made, (here,)), stranger(made, give):
        await anyio.sleep(10)
        assert (len(here.router.loads), len(requests) > 1) == (0, True)


async def test_a_hash_below_two_parents_is_two_blocks_for_a_late_front_end_too() -> None:
    async with fronts(2) as (made, (here, there)):
        for one in (here, there):
            for name, hashes in (("a", [1, 2]), ("b", [3, 2])):
                load = SequenceLoad(hashes)
                one.router.loads.sequences.book(f"{name}", WorkerRank(1), load, one.router.loads.now_s())
        async with front(made) as late:
            await anyio.sleep(1)
            assert late.loads[0][2] - IDLE[0][2] == 4


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "book", "mark", "release", "cut", "heal", "hold", "go", "wait"]),
        st.integers(0, 1),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=settings().max_examples // 2)
async def test_whatever_is_lost_front_ends_agree_again_once_they_reach_each_other(
    script: list[tuple[str, int, int]],
) -> None:
    async with fronts(2, events=DirectEventLimits(events=3, batch_events=1)) as (made, both):
        held: tuple[list[Reservation], list[Reservation]] = ([], [])
        for number, (step, who, which) in enumerate(script):
            mine = held[who]
            if step == "book":
                mine.append(await placed(both[who].router, prompt(4 + 4 * which, first=which), str(number)))
            elif step == "wait":
                await anyio.sleep(which / 10)
            elif step == "cut":
                made.faults.cut.add(both[who].process.number)
                made.faults.break_streams()
            elif step == "heal":
                made.faults.cut.clear()
            elif step == "hold":
                made.faults.held = made.faults.held or anyio.Event()
            elif step == "go":
                release(made)
            elif mine and step == "mark":
                mine[which % len(mine)].mark_prefill_completed()
            elif mine:
                mine.pop(which % len(mine)).release()
        made.faults.cut.clear()
        release(made)
        await anyio.sleep(40)
        assert both[0].loads == both[1].loads
        assert [len(one.router.loads) for one in both] == [len(held[0]) + len(held[1])] * 2


def release(made: Deployment) -> None:
    """Let readers go on."""
    if made.faults.held is not None:
        made.faults.held.set()
        made.faults.held = None


hashes = st.integers(0, 2**64 - 1)
loads = st.builds(
    SequenceLoad, st.lists(hashes, max_size=4), st.integers(0, 2**32), st.none() | st.floats(0, 1e6, allow_nan=False)
)


@given(st.integers(0, 2**53 - 1), st.lists(st.tuples(st.text(), hashes, loads), max_size=4))
def test_an_answer_survives_its_bytes(router_id: int, booked: list[tuple[str, int, SequenceLoad]]) -> None:
    events = [
        ActiveSequenceEvent(name, WorkerRank(worker_id), AddRequest.of(load), router_id)
        for name, worker_id, load in booked
    ]
    part = BookingsPart(router_id, events)
    assert from_msgpack(to_msgpack(part), BookingsPart) == part
    assert from_msgpack(to_msgpack(BookingsRequest()), BookingsRequest) == BookingsRequest()
