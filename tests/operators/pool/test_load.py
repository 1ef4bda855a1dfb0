"""Worker loads: what is in flight, what is reported, and that workers that leave are forgotten."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from operators import PushRouter
from operators.pool import WorkerLoads, load_reports
from operators.pool.load import MISSING_REPORTS, LoadReport, RankLoad, WorkerLoad
from operators.pool.pickers import Uncounted
from pipeline import AnyContext, Context
from pipeline.network import Instance, Runtime, Scope, Workers, static_workers
from pipeline.network.names import EndpointId
from pipeline.protocols.kv import KV_METRICS_TOPIC, LOADS_EVERY_S, ActiveLoad
from pipeline.rx import AnyIOScheduler, Subject
from pipeline.testing import ScriptedEngine

from .worlds import Changing, send_to

NAME = "ns/comp/ep"


def pool(*instance_ids: int) -> Workers[Any, Any]:
    return static_workers({i: ScriptedEngine([1]) for i in instance_ids}, name=NAME)


def counts(loads: WorkerLoads) -> dict[int, int]:
    return {i: load.in_flight for i, load in loads.current().items()}


# -- in flight


def test_a_request_counts_until_it_is_released_once() -> None:
    loads = WorkerLoads(pool(1, 2))
    held = loads.begin(2)
    assert counts(loads) == {1: 0, 2: 1}
    held.release()
    held.release()
    assert counts(loads) == {1: 0, 2: 0}


async def test_reservations_of_a_router_add_up_and_go() -> None:
    router = PushRouter(pool(1, 2), "power_of_two_choices")
    streams = [await router.generate(Context(None)) for _ in range(5)]
    assert sum(counts(router.loads).values()) == 5
    for stream in streams:
        await stream.aclose()
    assert counts(router.loads) == {1: 0, 2: 0}


async def test_routers_that_share_loads_see_each_others_requests() -> None:
    workers = pool(1, 2)
    loads = WorkerLoads(workers)
    busy, idle = PushRouter(workers, loads=loads), PushRouter(workers, "least_loaded", loads=loads)
    async with await send_to(busy, 1):
        assert idle.select_worker(Context(None), advances=False) == 2


async def test_a_choice_that_costs_nothing_is_not_counted() -> None:

    def cached(candidates: Any, loads: Any, request: AnyContext, rng: Any) -> int:
        return Uncounted(2)

    router = PushRouter(pool(1, 2), pick=cached)
    async with await router.generate(Context(None)) as stream:
        assert counts(router.loads) == {1: 0, 2: 0}
        assert [item async for item in stream] == [1]


def test_one_that_is_not_there_is_not_counted() -> None:
    loads = WorkerLoads(pool(1))
    loads.begin(9).release()
    assert counts(loads) == {1: 0}


async def test_an_instance_that_comes_back_begins_with_nothing() -> None:
    """And what is released of the time before does not touch it, also if the loads were not read in between."""
    async with Runtime.in_process() as runtime:
        loads = WorkerLoads(runtime.workers(NAME))
        for looks in (True, False):
            served = await runtime.serve(NAME, ScriptedEngine([]), instance_id=1)
            old = [loads.begin(1), loads.begin(1)]
            assert counts(loads) == {1: 2}
            await served.close()
            if looks:
                assert counts(loads) == {}
            served = await runtime.serve(NAME, ScriptedEngine([]), instance_id=1)
            new = loads.begin(1)
            assert counts(loads) == {1: 1}
            for held in old:
                held.release()
            assert counts(loads) == {1: 1}
            new.release()
            await served.close()


def test_an_instance_that_leaves_and_comes_back_between_two_looks_begins_anew() -> None:
    changing = Changing({1: ScriptedEngine([])})
    loads = WorkerLoads(changing.workers)
    loads.begin(1)
    before = loads.current()[1]
    changing.remove(1)
    changing.add(1)
    assert (before, loads.current()) == (WorkerLoad(1), {1: WorkerLoad()})


async def test_loads_know_the_device() -> None:
    async with Runtime.in_process() as runtime:
        loads = WorkerLoads(runtime.workers(NAME))
        await runtime.discovery.register(Instance.of(EndpointId.parse(NAME), 7, device_type="cpu"))
        assert loads.current()[7] == WorkerLoad(0, "cpu")


# -- reports


def test_a_report_changes_its_own_fields_and_leaves_the_rest() -> None:
    known = RankLoad(1, 2, 3)
    assert known.updated(ActiveLoad(9, kv_used_blocks=0)) == RankLoad(1, 0, 3)
    assert known.updated(ActiveLoad(9, active_decode_blocks=5, active_prefill_tokens=6)) == RankLoad(5, 2, 6)


def test_reports_are_kept_by_rank_beside_what_is_in_flight() -> None:
    loads, reports = WorkerLoads(pool(1, 2)), Subject[ActiveLoad]()
    following = loads.follow(reports)
    loads.begin(1)
    reports.on_next(ActiveLoad(1, 0, active_decode_blocks=5))
    reports.on_next(ActiveLoad(1, 3, kv_used_blocks=7))
    reports.on_next(ActiveLoad(1, 0, active_prefill_tokens=2))
    assert loads.current()[1] == WorkerLoad(1, None, {0: RankLoad(5, None, 2), 3: RankLoad(None, 7)})
    following.dispose()
    reports.on_next(ActiveLoad(2, active_decode_blocks=5))
    assert loads.current()[2] == WorkerLoad()


def test_reports_of_strangers_are_dropped_and_of_those_that_may_be_two_forgotten() -> None:
    loads, reports = WorkerLoads(pool(1, 2)), Subject[ActiveLoad]()
    elsewhere: dict[int, ScriptedEngine] = {}
    other = pool(2, 3)
    loads.follow(reports, elsewhere=[static_workers(elsewhere)])
    for worker_id in (1, 2, 3, 4):
        reports.on_next(ActiveLoad(worker_id, active_decode_blocks=5))
    assert {i: len(load.ranks) for i, load in loads.current().items()} == {1: 1, 2: 1}
    loads.follow(reports, elsewhere=[other])
    reports.on_next(ActiveLoad(2, active_decode_blocks=6))
    assert {i: len(load.ranks) for i, load in loads.current().items()} == {1: 1, 2: 0}


async def test_loads_follow_the_event_plane_and_forget_an_instance_that_leaves() -> None:
    async with Runtime.in_process() as runtime:
        loads, seen = WorkerLoads(runtime.workers(NAME)), list[LoadReport]()
        loads.follow(load_reports(runtime.events, NAME))
        loads.reports().subscribe(seen.append)
        served = await runtime.serve(NAME, ScriptedEngine([]), instance_id=1)
        publisher = runtime.events.publisher(Scope("ns", "comp"), KV_METRICS_TOPIC)
        publisher.publish(ActiveLoad(1, kv_used_blocks=4))
        publisher.publish(ActiveLoad(2, kv_used_blocks=4))
        known = {0: RankLoad(None, 4)}
        assert loads.current() == {1: WorkerLoad(ranks=known)}
        loads.begin(1).release()
        await served.close()
        publisher.publish(ActiveLoad(1, kv_used_blocks=4))
        assert loads.current() == {}
    assert seen == [LoadReport(1, 0, known)]


def test_a_subscribers_error_stays_its_own(caplog: pytest.LogCaptureFixture) -> None:
    loads, reports, seen = WorkerLoads(pool(1)), Subject[ActiveLoad](), list[int]()
    loads.follow(reports)

    def fail(report: LoadReport) -> None:
        raise LookupError("broken")

    loads.reports().subscribe(fail)
    loads.reports().subscribe(lambda report: seen.append(report.dp_rank))
    for dp_rank in (0, 1):
        reports.on_next(ActiveLoad(1, dp_rank, kv_used_blocks=4))
    assert seen == [0, 1]
    assert [record.getMessage() for record in caplog.records] == ["a subscriber failed"] * 2


async def test_a_report_that_is_not_repeated_is_forgotten_and_one_that_is_stays() -> None:
    loads, reports, seen = WorkerLoads(pool(1, 2)), Subject[ActiveLoad](), list[LoadReport]()
    loads.reports().subscribe(seen.append)
    async with AnyIOScheduler() as scheduler:
        following = loads.follow(reports, scheduler=scheduler)
        for worker_id, dp_rank in ((1, 0), (1, 1), (2, 0)):
            reports.on_next(ActiveLoad(worker_id, dp_rank, kv_used_blocks=4))
        for _ in range(2 * MISSING_REPORTS):
            await anyio.sleep(LOADS_EVERY_S)
            reports.on_next(ActiveLoad(1, 1, kv_used_blocks=4))
        assert [dict(load.ranks) for load in loads.current().values()] == [{1: RankLoad(kv_used_blocks=4)}, {}]
        assert [(one.instance_id, one.dp_rank) for one in seen if one.dp_rank not in one.ranks] == [(1, 0), (2, 0)]
        reports.on_next(ActiveLoad(2, kv_used_blocks=5))
        assert dict(loads.current()[2].ranks) == {0: RankLoad(kv_used_blocks=5)}
        following.dispose()
        await anyio.sleep(10 * MISSING_REPORTS * LOADS_EVERY_S)
        assert loads.current()[2].ranks
    assert not reports.observers


async def test_without_a_scheduler_a_report_stays() -> None:
    loads, reports = WorkerLoads(pool(1)), Subject[ActiveLoad]()
    with loads.follow(reports):
        reports.on_next(ActiveLoad(1, kv_used_blocks=4))
        await anyio.sleep(10 * MISSING_REPORTS * LOADS_EVERY_S)
        assert loads.current()[1].ranks
