"""ReplicaSync: routers that publish their bookings see the same loads and choose alike."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kv import KvRouterConfig, kv_router
from operators.kv.load import (
    ACTIVE_SEQUENCES_TOPIC,
    BATCH_EVENTS,
    BOOKED,
    ENDED,
    ReplicaSync,
    RouterSteps,
)
from operators.kv.queue import PolicyClass, PolicyProfile
from operators.kv.reservation import Reservation
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument
from pipeline.network import Event, Runtime, Scope, static_workers
from pipeline.network.events import Publisher
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import ScriptedEngine
from tests.operators.kv.load.worlds import BLOCK, ENDPOINT, WORKERS, pair, placed, prompt, router_of, view
from tests.operators.kv.worlds import published

ONE_AT_A_TIME = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))


async def settled() -> None:
    for _ in range(5):
        await checkpoint()


# -- the same view


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "mark", "output", "release", "wait", "look"]),
        st.integers(0, 1),  # which router
        st.integers(0, 7),  # which of its requests, or which prompt
        st.integers(1, 24),  # prompt length, or tenths of a second
    ),
    max_size=30,
)


@given(STEPS)
@settings(max_examples=3 * settings().max_examples // 5)
async def test_two_routers_see_the_same_loads_and_choose_like_one(script: list[tuple[str, int, int, int]]) -> None:
    """A third router gets every event by hand. Output is not published: blocks are compared where there is none."""
    config = {"router_prefill_load_model": "aic", "router_queue_threshold": None}
    given: dict[str, Any] = {"config": config, "prefill_duration": lambda prompt, cached: prompt.isl_tokens / 10}
    async with Runtime.in_process() as runtime:
        two, single = pair(runtime.events, **given), router_of(None, **given)
        held: tuple[list[tuple[Reservation, Reservation]], ...] = ([], [])
        grown: set[str] = set()
        for number, (step, who, which, size) in enumerate(script):
            mine = held[who]
            if step == "wait":
                await anyio.sleep(size / 10)
            elif step == "book":
                wanted = prompt(size, first=which % 3)
                assert grown or two[who].advise(wanted).costs == single.advise(wanted).costs
                booked = await placed(two[who], wanted, str(number))
                pinned = prompt(size, first=which % 3, worker_id=booked.rank.worker_id)
                mine.append((booked, await placed(single, pinned, str(number))))
            elif mine:
                both = mine[which % len(mine)]
                assert len({act(one, step) for one in both}) == 1
                if step == "output":
                    grown.add(both[0].request_id)
                if step == "release":
                    mine.remove(both)
                    grown.discard(both[0].request_id)
            if step == "look":
                views = [view(one, with_blocks=not grown) for one in (*two, single)]
                assert views[0] == views[1] == views[2]
        for booked, _ in (*held[0], *held[1]):
            booked.release()
        assert view(two[0]) == view(two[1]) == view(router_of(None))


def act(booked: Reservation, step: str) -> bool:
    if step == "output":
        return booked.add_output_blocks(2, 0.5)
    return booked.mark_prefill_completed() if step == "mark" else booked.release()


async def test_output_counts_where_it_is_booked_only_and_leaves_nothing_behind() -> None:
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events, config={"router_track_output_blocks": True})
        booked = await placed(here, prompt(worker_id=1), "r")
        before = view(there)
        booked.add_output_blocks(3, 0.5)
        assert view(there) == before != view(here)
        booked.release()
        assert view(here) == view(there) == view(router_of(None))


async def test_a_router_decides_on_all_events_it_received() -> None:
    """What arrived a moment ago counts at once, without a task that takes it in."""
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events, worker_ids=(1, 2))
        first = await placed(here, prompt(64), "r")
        assert there.advise(prompt(64, first=100)).rank != first.rank
        second = await placed(there, prompt(64, first=100), "r")
        assert second.rank != first.rank
        first.release()
        assert there.advise(prompt(64, first=200)).rank == first.rank


async def test_own_events_are_passed_over() -> None:
    async with Runtime.in_process() as runtime:
        alone, plain = router_of(ReplicaSync(runtime.events, ENDPOINT)), router_of(None)
        booked, _ = [await placed(one, prompt(worker_id=2), "r") for one in (alone, plain)]
        assert view(alone) == view(plain) != view(router_of(None))
        booked.release()
        assert view(alone) == view(router_of(None))


async def test_the_same_id_at_two_routers_is_two_requests() -> None:
    """One pool prefills what another decodes, or a request is sent again through another router."""
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events)
        mine, theirs = await placed(here, prompt(), "r"), await placed(there, prompt(), "r")
        view(here)
        assert mine.release()
        assert theirs.is_live
        assert view(here) == view(there) != view(router_of(None))


async def test_events_of_routers_of_another_component_are_ignored() -> None:
    async with Runtime.in_process() as runtime:
        here, there = router_of(ReplicaSync(runtime.events, "ns/a/x")), router_of(ReplicaSync(runtime.events, "ns/b/x"))
        await placed(here, prompt(), "r")
        assert view(there) == view(router_of(None))


# -- workers that not all know


async def test_the_load_of_a_worker_seen_by_one_router_first_is_there_when_the_other_sees_it() -> None:
    async with Runtime.in_process() as runtime:
        health = published({1: ModelRuntimeConfig()}, 2, 3)
        here = router_of(ReplicaSync(runtime.events, ENDPOINT))
        there = router_of(ReplicaSync(runtime.events, ENDPOINT), health=health)
        booked = await placed(here, prompt(worker_id=3), "r")
        assert [load[0] for load in view(there)] == [1]
        health.publish({worker_id: ModelRuntimeConfig() for worker_id in WORKERS})
        assert view(there) == view(here)
        booked.release()
        assert view(there) == view(here)


async def test_with_registration_required_a_booking_on_an_unknown_worker_is_dropped() -> None:
    async with Runtime.in_process() as runtime:
        health = published({1: ModelRuntimeConfig()}, 2, 3)
        here = router_of(ReplicaSync(runtime.events, ENDPOINT))
        there = router_of(ReplicaSync(runtime.events, ENDPOINT, registered_only=True), health=health)
        for worker_id in (1, 3):
            await placed(here, prompt(worker_id=worker_id), str(worker_id))
        view(there)
        assert (len(there.loads), there.loads.sequences.ranks()) == (1, [WorkerRank(1)])


# -- ends


async def test_the_bookings_of_a_router_that_dies_expire() -> None:
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events, expiry_s=100.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(there.run)
            await placed(here, prompt(), "r")
            here.close()
            assert view(there) != view(router_of(None))
            await anyio.sleep(200)
            assert len(there.loads) == 0
            tasks.cancel_scope.cancel()


async def test_an_end_is_published_though_the_worker_has_left_here() -> None:
    """The other router did not learn yet, or will not, that the worker is gone."""
    async with Runtime.in_process() as runtime:
        health = published({worker_id: ModelRuntimeConfig() for worker_id in WORKERS})
        here = router_of(ReplicaSync(runtime.events, ENDPOINT), health=health)
        there = router_of(ReplicaSync(runtime.events, ENDPOINT))
        booked = await placed(here, prompt(worker_id=3), "r")
        health.publish({1: ModelRuntimeConfig()})
        assert not booked.release()
        view(there)
        assert len(there.loads) == 0


async def test_an_end_long_after_expiry_does_not_end_the_same_id_booked_anew() -> None:
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events, expiry_s=10.0)
        old = await placed(here, prompt(), "r")
        await anyio.sleep(40)
        new = await placed(here, prompt(), "r")
        assert not old.release()
        assert view(there) == view(here) != view(router_of(None))
        assert new.release()
        assert view(there) == view(here) == view(router_of(None))


async def test_an_end_is_published_once_however_often_it_is_released() -> None:
    async with Runtime.in_process() as runtime:
        kinds: list[str] = []
        bookings = runtime.events.subscribe(Scope("ns", "workers"), ACTIVE_SEQUENCES_TOPIC, RouterSteps)
        with bookings.subscribe(lambda event: kinds.append(event.payload.kinds)):
            booked = await placed(router_of(ReplicaSync(runtime.events, ENDPOINT)), prompt(), "r")
            assert [booked.release() for _ in range(2)] == [True, False]
        assert kinds == [BOOKED, ENDED]


async def test_a_closed_router_receives_nothing_and_still_publishes_its_ends() -> None:
    async with Runtime.in_process() as runtime:
        here, there = pair(runtime.events)
        booked = await placed(here, prompt(), "a")
        here.close()
        await placed(there, prompt(), "b")
        assert view(here) != view(there)
        booked.release()
        view(there)
        assert len(there.loads) == 1


# -- the queue


@pytest.mark.parametrize("how", ["mark_prefill_completed", "release"])
async def test_an_end_at_another_router_makes_room_for_requests_that_wait(how: str) -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        here, there = pair(runtime.events, worker_ids=(1,), profile=ONE_AT_A_TIME)
        tasks.start_soon(there.run)
        booked = await placed(here, prompt(), "a")
        got: list[Reservation] = []

        async def place() -> None:
            got.append(await placed(there, prompt(first=100), "b"))

        tasks.start_soon(place)
        await anyio.sleep(1)
        assert (got, len(there.queue)) == ([], 1)
        getattr(booked, how)()
        await anyio.sleep(0.01)
        assert (len(got), len(there.queue)) == (1, 0)
        tasks.cancel_scope.cancel()


async def test_those_that_wait_go_before_one_that_comes_when_room_was_made_elsewhere() -> None:
    classes = [PolicyClass(name, prefill_busy_threshold=0) for name in ("slow", "fast")]
    profile = PolicyProfile(classes, "slow", {"slow": [0], "fast": [1]})
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        here, there = pair(runtime.events, worker_ids=(1,), profile=profile)
        booked = await placed(here, prompt(), "a")
        got: list[str] = []

        async def place(name: str) -> None:
            await placed(there, prompt(first=100 * len(name), policy_class=name), name)
            got.append(name)

        tasks.start_soon(place, "slow")
        await settled()
        booked.release()
        tasks.start_soon(place, "fast")
        await settled()
        assert (got, len(there.queue)) == (["slow"], 1)
        tasks.cancel_scope.cancel()


async def test_accounts_go_by_the_order_of_things_whenever_they_are_looked_at() -> None:
    """Time is taken off the oldest prompt, so it matters which began first and when the one before was computed."""
    given: dict[str, Any] = {
        "config": {"router_prefill_load_model": "aic"},
        "prefill_duration": lambda prompt, cached: 10.0,
        "worker_ids": (1,),
    }
    async with Runtime.in_process() as runtime:
        (here, there), single = pair(runtime.events, **given), router_of(None, **given)
        mine, its = [await placed(one, prompt(), "mine") for one in (there, single)]
        await anyio.sleep(1)
        for one in (here, single):
            await placed(one, prompt(40), "told")
        await anyio.sleep(2)
        mine.mark_prefill_completed()
        its.mark_prefill_completed()
        await anyio.sleep(1)
        assert view(there) == view(here) == view(single)


async def test_a_listener_that_releases_while_others_are_placed_places_more_and_loses_none() -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        router = router_of(ReplicaSync(runtime.events, ENDPOINT), worker_ids=(1, 2), profile=ONE_AT_A_TIME)
        first, second = [await placed(router, prompt(first=n), str(n)) for n in (100, 200)]
        got: list[Reservation] = []

        async def place(name: str) -> None:
            got.append(await placed(router, prompt(first=100 * len(name)), name))

        for name in ("aaa", "bbbb", "ccccc"):
            tasks.start_soon(place, name)
            await settled()
        bookings = runtime.events.subscribe(Scope("ns", "workers"), ACTIVE_SEQUENCES_TOPIC, RouterSteps)

        def release_another(event: Event[RouterSteps]) -> None:
            if event.payload.request_ids[0] == "aaa":
                second.release()

        with bookings.subscribe(release_another):
            first.release()
        await settled()
        assert sorted(one.request_id for one in got) == ["aaa", "bbbb"]
        assert {one.rank.worker_id for one in got} == {1, 2}
        assert len(router.queue) == 1
        tasks.cancel_scope.cancel()


# -- batches and failures


def added(number: int, router_id: int = 5) -> RouterSteps:
    return RouterSteps(router_id, BOOKED, [f"r{number}"], [1], [0], [[number]], [4], [None])


async def test_300_bookings_are_taken_in_as_256_and_44() -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        router = router_of(ReplicaSync(runtime.events, ENDPOINT))
        tasks.start_soon(router.run)
        await settled()
        elsewhere = runtime.events.publisher(Scope("ns", "workers"), ACTIVE_SEQUENCES_TOPIC)
        for number in range(300):
            elsewhere.publish(added(number))
        assert len(router.loads) == BATCH_EVENTS == 256
        await anyio.sleep(0.002)
        assert len(router.loads) == 300
        tasks.cancel_scope.cancel()


class Broken(Publisher):
    """Cannot send."""

    publisher_id = 7

    def publish(self, payload: object) -> None:
        raise OSError("the broker is away")


async def test_failures_to_publish_break_no_routing_and_are_logged_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Runtime.in_process() as runtime:
        monkeypatch.setattr(runtime.events, "publisher", lambda scope, topic: Broken())
        router = router_of(ReplicaSync(runtime.events, ENDPOINT))
        for number in range(10):
            assert (await placed(router, prompt(), str(number))).release()
        assert [record.getMessage().split()[0] for record in caplog.records] == ["1"]
        await anyio.sleep(11)
        await placed(router, prompt(), "later")
        assert [record.getMessage().split()[0] for record in caplog.records] == ["1", "20"]
        assert "the broker is away" in caplog.text


# -- what it must be given


async def test_sync_needs_peers_and_peers_need_sync_and_belong_to_one_router() -> None:
    async with Runtime.in_process() as runtime:
        pool, peers = static_workers({1: ScriptedEngine([])}), ReplicaSync(runtime.events, ENDPOINT)
        with pytest.raises(InvalidArgument) as missing:
            kv_router(pool, KvRouterConfig(router_replica_sync=True), block_size_tokens=BLOCK)
        with pytest.raises(InvalidArgument) as idle:
            kv_router(pool, KvRouterConfig(), block_size_tokens=BLOCK, peers=peers)
        router_of(peers)
        with pytest.raises(InvalidArgument) as shared:
            router_of(peers)
        fields = [error.value.field for error in (missing, idle, shared)]
        assert fields == ["peers", "router_replica_sync", "peers"]
