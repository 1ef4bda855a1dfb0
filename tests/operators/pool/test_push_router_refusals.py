"""Why no worker can get a request: each reason is an error of its own, and nothing is sent."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import anyio
import pytest

from operators import AllBusy, BusyThresholds, PushRouter
from operators.pool import BusyWatch, PoolCards, WorkerLoads
from operators.pool.load import RankLoad, is_idle
from operators.pool.push_router import RouterMode
from pipeline import CannotConnect, Context, Unavailable, WorkerOverloaded
from pipeline.network import Runtime, Workers, static_workers
from pipeline.protocols import PreprocessedRequest, RoutingHints
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import ActiveLoad
from pipeline.rx import BehaviorSubject, Subject
from pipeline.testing import ScriptedEngine

from .worlds import NAME, PICKING_MODES, answerer, answering, pool, send_to


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_without_an_instance_there_is_an_error_at_once(mode: RouterMode) -> None:
    with pytest.raises(Unavailable, match=f"no instances found for endpoint {NAME}: none has appeared yet"):
        await PushRouter(pool({}), mode).generate(Context(None))


async def test_the_error_without_an_instance_has_the_reason() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(NAME)
        engine: PushRouter[Any, Any] = PushRouter(workers)
        served = await runtime.serve(NAME, ScriptedEngine([]))
        assert engine.refusal() is None
        await served.close()
        with pytest.raises(Unavailable, match="all there were have left"):
            await engine.generate(Context(None))
        workers.close()
        with pytest.raises(Unavailable, match="its discovery was closed"):
            await engine.generate(Context(None))


async def test_an_instance_that_is_not_admitted_never_gets_a_request() -> None:
    engines = answering(1, 2, 3)
    engine = PushRouter(pool(engines), admits=lambda instance_id: instance_id == 2)
    assert [await answerer(engine) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(CannotConnect, match="instance_id=1 not found"):
        await send_to(engine, 1)
    with pytest.raises(Unavailable, match="is admitted"):
        await PushRouter(pool(engines), admits=lambda _: False).generate(Context(None))
    assert engines[1].requests == engines[3].requests == []


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_a_busy_instance_is_passed_over(mode: RouterMode) -> None:
    """Peeking included."""
    engine = PushRouter(pool(answering(1, 2)), mode, busy=BehaviorSubject[AbstractSet[int]]({1}))
    assert [engine.select_worker(Context(None), advances=False) for _ in range(6)] == [2] * 6
    assert [await answerer(engine) for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_all_busy_is_not_the_same_as_an_empty_pool(mode: RouterMode) -> None:
    engines = answering(1, 2)
    engine = PushRouter(pool(engines), mode, busy=BehaviorSubject[AbstractSet[int]]({1, 2, 3}))
    with pytest.raises(AllBusy, match=f"all workers are busy: 2 of endpoint {NAME}") as caught:
        await engine.generate(Context(None))
    assert (caught.value.retry_after_s, caught.value.status) == (None, 529)
    for advances in (True, False):
        with pytest.raises(AllBusy):
            engine.select_worker(Context(None), advances=advances)
    assert engines[1].requests == engines[2].requests == []


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_a_request_that_allows_some_workers_goes_to_none_other(mode: RouterMode) -> None:
    busy = BehaviorSubject[AbstractSet[int]](set())
    engine = PushRouter(pool(answering(1, 2, 3)), mode, busy=busy)
    some = PreprocessedRequest([1], routing=RoutingHints(allowed_worker_ids={2, 3, 9}))
    assert {await answerer(engine, some) for _ in range(40)} == {2, 3}
    busy.on_next({3})
    assert {await answerer(engine, some) for _ in range(10)} == {2}
    busy.on_next({2, 3})
    with pytest.raises(AllBusy, match=f"all workers of endpoint {NAME} that the request allows are busy"):
        await answerer(engine, some)
    assert await answerer(engine, PreprocessedRequest([1])) == 1
    with pytest.raises(Unavailable, match=r"no instance of endpoint .* that the request allows can take it"):
        await answerer(engine, PreprocessedRequest([1], routing=RoutingHints(allowed_worker_ids={9})))


async def test_an_instance_may_be_busy_before_it_is_there() -> None:
    """One that is not flagged is free at once."""
    async with Runtime.in_process() as runtime:
        engine: PushRouter[Any, Any] = PushRouter(runtime.workers(NAME), busy=BehaviorSubject[AbstractSet[int]]({7}))
        await runtime.serve(NAME, ScriptedEngine([]), instance_id=7)
        assert isinstance(engine.refusal(), AllBusy)
        await runtime.serve(NAME, ScriptedEngine([]), instance_id=8)
        assert engine.health.view.free == (8,)


async def test_where_requests_name_theirs_only_being_busy_refuses() -> None:
    """An instance that is left out may still be named."""
    engines = {1: ScriptedEngine([], fails=CannotConnect("down")), 2: ScriptedEngine([])}
    busy = BehaviorSubject[AbstractSet[int]]({2})
    engine = PushRouter(pool(engines), "direct", busy=busy)
    with pytest.raises(CannotConnect, match="down"):
        await send_to(engine, 1)
    assert list(engine.health.view.routable) == [2]
    assert engine.refusal() is None
    busy.on_next({1, 2})
    assert isinstance(engine.refusal(), AllBusy)
    busy.on_next({1})
    engines[2]._fails = CannotConnect("down")
    with pytest.raises(CannotConnect, match="down"):
        await send_to(engine, 2)
    busy.on_next({1, 2})
    assert isinstance(engine.refusal(), AllBusy)


async def test_a_busy_instance_gets_no_direct_request() -> None:
    engines = answering(1, 2)
    engine = PushRouter(pool(engines), busy=BehaviorSubject[AbstractSet[int]]({1}))
    with pytest.raises(WorkerOverloaded, match="the selected worker 1"):
        await send_to(engine, 1)
    assert engines[1].requests == []


# -- a worker that refuses as overloaded


HALF = BusyThresholds(active_decode_blocks_threshold=0.5)


class Pool:
    """Workers 1 and 2, of which the first refuses every request; `reports` are what they report."""

    def __init__(self, thresholds: BusyThresholds | None = None) -> None:
        engines = {1: ScriptedEngine([], fails=WorkerOverloaded("full")), 2: ScriptedEngine([1])}
        workers: Workers[Any, Any] = static_workers(engines)
        loads = WorkerLoads(workers)
        self.reports: Subject[ActiveLoad] = Subject()
        loads.follow(self.reports)
        self.busy = None
        if thresholds is not None:
            cards = BehaviorSubject(PoolCards(dict.fromkeys((1, 2), ModelRuntimeConfig(total_kv_blocks=100))))
            self.busy = BusyWatch(loads, thresholds, cards)
        self.router: PushRouter[Any, Any] = PushRouter(
            workers, loads=loads, busy=None if self.busy is None else self.busy.changes(), cooldown_s=5
        )

    async def refuse(self) -> None:
        with pytest.raises(WorkerOverloaded):
            await send_to(self.router, 1)

    def report(self, worker_id: int, used: int | None, dp_rank: int = 0) -> None:
        self.reports.on_next(ActiveLoad(worker_id, dp_rank, kv_used_blocks=used))

    @property
    def free(self) -> list[int]:
        return list(self.router.health.view.free)


@pytest.mark.parametrize("thresholds", [None, HALF])
async def test_a_worker_that_reports_that_it_is_idle_gets_requests_again(thresholds: BusyThresholds | None) -> None:
    """It is not left out for the whole cooldown."""
    pool = Pool(thresholds)
    for _ in range(2):
        await pool.refuse()
        await anyio.sleep(1)
        assert pool.free == [2]
        pool.report(1, 0)
        assert pool.free == [1, 2]
        assert pool.router.health.view.overloaded == frozenset()


@pytest.mark.parametrize("thresholds", [None, HALF])
async def test_a_report_from_before_the_refusal_does_not_readmit(thresholds: BusyThresholds | None) -> None:
    pool = Pool(thresholds)
    pool.report(1, 0)
    await pool.refuse()
    pool.report(2, 0)
    assert pool.free == [2]
    assert pool.router.health.view.overloaded == {1}
    await anyio.sleep(5)
    assert pool.free == [1, 2]


async def test_with_thresholds_they_decide_from_the_next_report_on() -> None:
    pool = Pool(HALF)
    await pool.refuse()
    pool.report(1, 60)
    await anyio.sleep(20)
    assert pool.free == [2]
    pool.report(1, 40)
    assert pool.free == [1, 2]


async def test_without_thresholds_a_worker_that_reports_work_stays_out() -> None:
    pool = Pool()
    await pool.refuse()
    for used in (60, None):
        pool.report(1, used)
        assert pool.free == [2]
    pool.report(1, 0, dp_rank=1)
    assert pool.free == [2]
    pool.report(1, 0)
    assert pool.free == [1, 2]


async def test_another_refusal_counts_anew() -> None:
    pool = Pool()
    await pool.refuse()
    pool.report(1, 0)
    await pool.refuse()
    assert pool.free == [2]
    await anyio.sleep(5)
    assert pool.free == [1, 2]


def test_idle_is_what_every_rank_reports() -> None:
    nothing = RankLoad()
    assert not is_idle({})
    assert not is_idle({0: nothing})
    assert is_idle({0: RankLoad(0), 1: RankLoad(0, 0, 0)})
    assert not is_idle({0: RankLoad(0), 1: RankLoad(0, 0, 1)})
    assert not is_idle({0: RankLoad(0), 1: nothing})
