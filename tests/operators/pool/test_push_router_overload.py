"""An instance that refuses a request as overloaded is passed over, until its own reports readmit it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from operators import BusyThresholds, PushRouter
from operators.pool import BusyWatch, PoolCards, WorkerLoads
from operators.pool.load import RankLoad, is_idle
from pipeline import WorkerOverloaded
from pipeline.network import Workers, static_workers
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import ActiveLoad
from pipeline.rx import BehaviorSubject, Subject
from pipeline.testing import ScriptedEngine

from .worlds import send_to

HALF = BusyThresholds(active_decode_blocks_threshold=0.5)


class Pool:
    """Workers 1 and 2, of which the first refuses whatever it is asked; `reports` are what they report."""

    def __init__(self, thresholds: BusyThresholds | None = None) -> None:
        engines: Any = {1: ScriptedEngine([], fails=WorkerOverloaded("full")), 2: ScriptedEngine([1])}
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
async def test_a_worker_that_reports_that_it_is_idle_is_asked_again(thresholds: BusyThresholds | None) -> None:
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
async def test_a_report_from_before_the_refusal_readmits_nobody(thresholds: BusyThresholds | None) -> None:
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
