"""Busy thresholds, and the watch of the workers that are busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators import AllBusy, BusyThresholds, PushRouter
from operators.pool import BusyWatch, Configs, PoolCards, WorkerLoads, cards_of, load_reports
from operators.pool.busy import is_rank_busy, is_worker_busy, latch
from operators.pool.load import MISSING_REPORTS, RankLoad
from pipeline import InvalidArgument
from pipeline.network import Runtime, Scope, Workers, static_workers
from pipeline.protocols.card import ModelDeploymentCard, ModelRuntimeConfig
from pipeline.protocols.kv import KV_METRICS_TOPIC, LOADS_EVERY_S, ActiveLoad
from pipeline.rx import AnyIOScheduler, BehaviorSubject, Subject
from pipeline.testing import ScriptedEngine

NAME = "ns/comp/ep"
HUNDRED = ModelRuntimeConfig(total_kv_blocks=100, max_num_batched_tokens=1000)


def decode(fraction: float) -> BusyThresholds:
    return BusyThresholds(active_decode_blocks_threshold=fraction)


def prefill(tokens: int | None = None, fraction: float | None = None) -> BusyThresholds:
    return BusyThresholds(active_prefill_tokens_threshold=tokens, active_prefill_tokens_threshold_frac=fraction)


def is_busy(load: RankLoad, thresholds: BusyThresholds, capacity: ModelRuntimeConfig = HUNDRED) -> bool:
    return is_rank_busy(load, None, capacity, thresholds)


# -- one rank


@given(st.builds(RankLoad, *[st.none() | st.integers(0, 10**9)] * 3))
def test_without_a_threshold_nothing_is_busy(load: RankLoad) -> None:
    assert not is_busy(load, BusyThresholds())


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (RankLoad(active_decode_blocks=10, kv_used_blocks=90), True),
        (RankLoad(active_decode_blocks=90), True),
        (RankLoad(active_decode_blocks=60, kv_used_blocks=60), False),
        (RankLoad(active_decode_blocks=61), True),
        (RankLoad(), False),
    ],
)
def test_either_number_of_blocks_above_the_fraction_is_busy(load: RankLoad, expected: bool) -> None:
    """A load at the fraction is not busy."""
    assert is_busy(load, decode(0.6)) is expected


@pytest.mark.parametrize("total", [None, 0])
def test_without_a_known_capacity_blocks_do_not_count(total: int | None) -> None:
    assert not is_busy(RankLoad(10**6, 10**6), decode(0.0), ModelRuntimeConfig(total_kv_blocks=total))
    assert latch(RankLoad(10**6), ModelRuntimeConfig(total_kv_blocks=total), decode(0.0)) is None


def test_each_test_looks_at_its_own_numbers_only() -> None:
    assert not is_busy(RankLoad(active_prefill_tokens=10**9), decode(0.5))
    assert not is_rank_busy(RankLoad(100, 100), True, HUNDRED, prefill(5))


@pytest.mark.parametrize(
    ("thresholds", "capacity", "tokens", "expected"),
    [
        (prefill(1000), HUNDRED, 1000, False),
        (prefill(1000), HUNDRED, 1001, True),
        (prefill(fraction=1.5), HUNDRED, 1500, False),
        (prefill(fraction=1.5), HUNDRED, 1501, True),
        (prefill(fraction=1.5), ModelRuntimeConfig(), 15_000_000, False),
        (prefill(fraction=1.5), ModelRuntimeConfig(), 15_000_001, True),
        (prefill(fraction=1.5), ModelRuntimeConfig(max_num_batched_tokens=0), 1, True),
        (prefill(10, 100.0), HUNDRED, 11, True),
        (prefill(0), HUNDRED, 0, False),
    ],
)
def test_prefill_tokens_are_held_against_a_number_and_a_fraction(
    thresholds: BusyThresholds, capacity: ModelRuntimeConfig, tokens: int, expected: bool
) -> None:
    assert is_busy(RankLoad(active_prefill_tokens=tokens), thresholds, capacity) is expected


def test_a_latch_is_cleared_by_the_last_number_that_falls() -> None:
    load = RankLoad()
    story = [
        (ActiveLoad(1, kv_used_blocks=95), True),
        (ActiveLoad(1, active_decode_blocks=95), True),
        (ActiveLoad(1, kv_used_blocks=10), True),  # the other is still high
        (ActiveLoad(1, active_prefill_tokens=0), True),
        (ActiveLoad(1, active_decode_blocks=10), False),
        (ActiveLoad(1, active_decode_blocks=95, kv_used_blocks=95), True),
        (ActiveLoad(1, active_decode_blocks=10, kv_used_blocks=10), False),  # both in one
    ]
    for report, expected in story:
        load = load.updated(report)
        assert latch(load, HUNDRED, decode(0.9)) is expected


def test_a_latch_outlives_a_change_of_the_threshold_and_only_without_one_numbers_count() -> None:
    load = RankLoad(active_decode_blocks=70)
    assert is_rank_busy(load, True, HUNDRED, decode(0.9))
    assert not is_rank_busy(load, False, HUNDRED, decode(0.5))
    assert is_rank_busy(load, None, HUNDRED, decode(0.5))


def test_a_worker_is_busy_when_all_its_ranks_are() -> None:
    """A worker that never reported is not busy."""
    high, low = RankLoad(active_decode_blocks=95), RankLoad(active_decode_blocks=5)
    assert not is_worker_busy({0: high, 1: low}, {}, HUNDRED, decode(0.9))
    assert is_worker_busy({0: high, 1: high}, {}, HUNDRED, decode(0.9))
    assert is_worker_busy({0: high, 1: low}, {1: True}, HUNDRED, decode(0.9))
    assert not is_worker_busy({}, {}, HUNDRED, decode(0.9))


# -- thresholds


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_fraction_of_blocks_lies_between_0_and_1(value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(value)
    assert caught.value.field == "active_decode_blocks_threshold"


@pytest.mark.parametrize("value", [0, 0.85, 1])
def test_the_bounds_of_a_fraction_are_valid(value: float) -> None:
    assert decode(value).active_decode_blocks_threshold == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"active_prefill_tokens_threshold": -1},
        {"active_prefill_tokens_threshold_frac": -0.5},
        {"active_prefill_tokens_threshold_frac": float("inf")},
        {"active_prefill_tokens_threshold_frac": float("nan")},
    ],
)
def test_prefill_thresholds_are_finite_and_not_negative(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        BusyThresholds(**wrong)
    assert caught.value.field in wrong


def test_a_partial_change_keeps_the_others() -> None:
    changed = BusyThresholds(0.9, 5, 2.0).updated(BusyThresholds(active_prefill_tokens_threshold=0))
    assert changed == BusyThresholds(0.9, 0, 2.0)


# -- the watch


class World:
    """A pool of two with a watch over it, and the means to report."""

    def __init__(self, thresholds: BusyThresholds, configs: Configs | None = None) -> None:
        self.workers: Workers[Any, Any] = static_workers({i: ScriptedEngine([i]) for i in (1, 2)}, name=NAME)
        self.loads = WorkerLoads(self.workers)
        self.reports = Subject[ActiveLoad]()
        self.loads.follow(self.reports)
        known: Configs = {1: HUNDRED, 2: HUNDRED} if configs is None else configs
        self.cards = BehaviorSubject(PoolCards(known))
        self.watch = BusyWatch(self.loads, thresholds, self.cards)

    def report(self, worker_id: int, dp_rank: int = 0, **numbers: int) -> None:
        self.reports.on_next(ActiveLoad(worker_id, dp_rank, **numbers))


@pytest.fixture
def world() -> Iterator[World]:
    made = World(decode(0.9))
    yield made
    made.watch.close()


def test_the_watch_knows_which_workers_are_busy(world: World) -> None:
    seen: list[Any] = []
    world.watch.changes().subscribe(seen.append, on_completed=lambda: seen.append("completed"))
    world.report(1, kv_used_blocks=95)
    world.report(1, dp_rank=1, kv_used_blocks=5)
    assert world.watch.busy() == set()
    world.report(1, dp_rank=1, kv_used_blocks=96)
    world.report(1, dp_rank=1, active_prefill_tokens=7)
    world.loads.begin(1).release()
    world.report(2, kv_used_blocks=96)
    world.report(1, kv_used_blocks=1)
    world.watch.close()
    assert world.watch.busy() == set()
    none_busy = frozenset[int]()
    assert seen == [none_busy, {1}, none_busy, {1}, {1, 2}, {2}, none_busy, "completed"]
    world.report(1, kv_used_blocks=95)
    assert world.watch.busy() == set()


def test_only_workers_above_are_flagged() -> None:
    world = World(prefill(5000))
    world.report(1, active_prefill_tokens=300_000)
    world.report(2, active_prefill_tokens=100)
    assert world.watch.busy() == {1}


def test_a_router_that_joins_late_sees_the_same_at_once(world: World) -> None:
    for worker_id in (1, 2):
        world.report(worker_id, kv_used_blocks=95)
    prefill_pool = static_workers({i: ScriptedEngine([i]) for i in (2, 3)})
    late = PushRouter(prefill_pool, busy=world.watch.changes())
    assert late.health.view.free == (3,)
    assert isinstance(PushRouter(world.workers, busy=world.watch.changes()).refusal(), AllBusy)


def test_a_watch_begins_with_what_was_reported_before_it(world: World) -> None:
    world.report(2, kv_used_blocks=95)
    with closing(BusyWatch(world.loads, decode(0.9), world.cards)) as late:
        assert late.busy() == {2}
    assert late.busy() == set()
    world.report(1, active_prefill_tokens=9)
    assert BusyWatch(world.loads, prefill(8)).busy() == {1}


def test_a_report_without_a_threshold_leaves_nothing_latched(world: World) -> None:
    world.report(1, kv_used_blocks=95)
    world.watch.thresholds = BusyThresholds()
    world.report(1, kv_used_blocks=5)
    world.watch.thresholds = decode(0.9)
    world.report(2, kv_used_blocks=5)
    assert world.watch.busy() == set()


def test_new_thresholds_hold_from_the_next_report_on(world: World) -> None:
    """Of whomever; a latch stays until its own rank reports."""
    world.report(1, active_prefill_tokens=50, kv_used_blocks=95)
    world.report(2, active_prefill_tokens=50)
    world.watch.thresholds = world.watch.thresholds.updated(prefill(40))
    world.loads.begin(2).release()
    assert world.watch.busy() == {1}
    world.report(1, active_decode_blocks=0)
    assert world.watch.busy() == {1, 2}
    world.watch.thresholds = decode(1.0)
    world.report(2, active_prefill_tokens=50)
    assert world.watch.busy() == {1}
    world.report(1, active_decode_blocks=1)
    assert world.watch.busy() == set()


def test_capacities_count_as_soon_as_they_are_known() -> None:
    world = World(decode(0.9), {})
    world.report(1, kv_used_blocks=95)
    assert world.watch.busy() == set()
    world.cards.on_next(PoolCards({1: HUNDRED}))
    assert world.watch.busy() == {1}


def test_a_report_that_may_be_of_another_pool_makes_no_worker_busy(world: World) -> None:
    world.report(1, kv_used_blocks=95)
    elsewhere = Subject[ActiveLoad]()
    world.loads.follow(elsewhere, elsewhere=[static_workers({1: ScriptedEngine([])})])
    assert world.watch.busy() == {1}
    elsewhere.on_next(ActiveLoad(1, kv_used_blocks=96))
    assert world.watch.busy() == set()


async def test_a_watch_over_discovery_and_the_event_plane() -> None:
    """Time alone frees no worker; closing frees all at once. A worker that leaves is forgotten."""
    settings = ModelRuntimeConfig(total_kv_blocks=100, max_num_batched_tokens=1000)
    card = ModelDeploymentCard.named("m", kv_cache_block_size=16)
    card.runtime_config = settings
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(NAME)
        loads = WorkerLoads(workers)
        loads.follow(load_reports(runtime.events, NAME))
        watch = BusyWatch(loads, decode(0.9), cards_of(runtime.discovery.watch_models(NAME)))
        seen: list[frozenset[int]] = []
        watch.changes().subscribe(seen.append)
        report = runtime.events.publisher(Scope("ns", "comp"), KV_METRICS_TOPIC).publish
        served = await runtime.serve(NAME, ScriptedEngine([]), instance_id=1, card=card)
        report(ActiveLoad(1, kv_used_blocks=91))
        await anyio.sleep(1000)
        assert watch.busy() == {1}
        await served.close()
        assert seen == [frozenset(), {1}, frozenset()]
        assert not watch._latches
        served = await runtime.serve(NAME, ScriptedEngine([]), instance_id=1, card=card)
        assert watch.busy() == set()
        report(ActiveLoad(1, kv_used_blocks=90))
        assert watch.busy() == set()
        report(ActiveLoad(1, kv_used_blocks=91))
        assert watch.busy() == {1}
        workers.close()
        assert workers.instance_ids() == (1,)  # the watch still listens
        watch.close()
        assert workers.instance_ids() == ()


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 1), st.sampled_from(["a", "k", "p"]), st.integers(0, 100)),
        max_size=20,
    )
)
def test_the_watch_agrees_with_looking_at_everything_anew(reports: list[tuple[int, int, str, int]]) -> None:
    """While the thresholds stay the same there is nothing to remember but the numbers."""
    names = {"a": "active_decode_blocks", "k": "kv_used_blocks", "p": "active_prefill_tokens"}
    thresholds = BusyThresholds(0.5, 80)
    world = World(thresholds)
    for worker_id, dp_rank, name, number in reports:
        world.report(worker_id, dp_rank, **{names[name]: number})
        expected = {
            i
            for i, load in world.loads.current().items()
            if load.ranks and all(is_busy(rank, thresholds) for rank in load.ranks.values())
        }
        assert world.watch.busy() == expected
    world.watch.close()


async def test_a_busy_worker_whose_reports_stop_is_not_busy_until_it_reports_again() -> None:
    """It may be free by now: the way of its reports is broken, not that of requests."""
    world = World(decode(0.9))
    async with AnyIOScheduler() as scheduler:
        with world.loads.follow(world.reports, scheduler=scheduler):
            for worker_id in (1, 2):
                world.report(worker_id, kv_used_blocks=91)
            assert world.watch.busy() == {1, 2}
            for _ in range(2 * MISSING_REPORTS):
                await anyio.sleep(LOADS_EVERY_S)
                world.report(1, kv_used_blocks=91)
            assert world.watch.busy() == {1}
            world.report(2, kv_used_blocks=91)
            assert world.watch.busy() == {1, 2}
    world.watch.close()
