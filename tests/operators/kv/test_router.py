"""KvRouter: what it knows, which worker it chooses, and workers that come and go."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.kv.errors import DuplicateRequest
from operators.kv.pace import UNOBSERVED
from operators.kv.queue import PolicyProfile
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument, ResourceExhausted, Unavailable, WorkerOverloaded
from pipeline.llm import block_hashes, sequence_hashes
from pipeline.network import static_workers
from pipeline.protocols import RouterConfigOverride, RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import KvEvent, KvStored, RouterEvent, StoredBlock
from pipeline.rx import Subject
from pipeline.testing import ScriptedEngine

from .worlds import BLOCK, GivenHealth, prompt, published, reserved, router_of


def stored(worker_id: int, count: int, event_id: int = 1) -> RouterEvent:
    """The worker holds the first so many tokens of every `prompt`."""
    local = block_hashes(list(range(count)), BLOCK)
    blocks = [StoredBlock(name, own) for name, own in zip(sequence_hashes(local), local, strict=True)]
    return RouterEvent(worker_id, KvEvent(event_id, KvStored(None, blocks)))


async def settled() -> None:
    for _ in range(5):
        await checkpoint()


# -- what is known


async def test_events_decide_once_the_feed_runs() -> None:
    router, events = router_of(1, 2, config={"use_kv_events": True}), Subject[RouterEvent]()
    router.follow(events)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(router.run)
        await settled()
        events.on_next(stored(2, 8))
        decision = router.advise(prompt(16))
        assert (decision.rank, decision.overlap_blocks) == (WorkerRank(2), 2)
        assert router.overlap_blocks(prompt(16).blocks, WorkerRank(2)) == 2
        assert router.overlap_blocks(prompt(16).blocks, WorkerRank(1)) == 0
        tasks.cancel_scope.cancel()


async def test_routed_prompts_count_until_events_arrive() -> None:
    config = {"use_kv_events": True, "router_predicted_ttl_secs": 5.0}
    router, events = router_of(1, config=config), Subject[RouterEvent]()
    router.follow(events)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(router.run)
        await settled()
        (await reserved(router, prompt(8))).release()
        assert router.advise(prompt(16)).overlap_blocks == 2
        events.on_next(stored(1, 12))
        assert router.advise(prompt(16)).overlap_blocks == 3
        await anyio.sleep(6)
        assert router.advise(prompt(16)).overlap_blocks == 3
        tasks.cancel_scope.cancel()


async def test_a_routed_prompt_is_remembered_for_its_time_only() -> None:
    router = router_of(7, config={"router_ttl_secs": 1.0})
    (await reserved(router, prompt(4, worker_id=7))).release()
    assert router.advise(prompt(4)).overlap_blocks == 1
    await anyio.sleep(2)
    assert router.advise(prompt(4)).overlap_blocks == 0


async def test_without_credit_nothing_is_looked_up() -> None:
    router = router_of(1, config={"overlap_score_credit": 0.0})
    (await reserved(router, prompt(8))).release()
    assert router.advise(prompt(8)).overlap_blocks == 0


async def test_a_record_that_fails_does_not_stop_the_routing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(1)

    def fails(*_: Any) -> None:
        raise ValueError("full")

    monkeypatch.setattr(router.lookup._approximate, "record", fails)
    assert (await reserved(router, prompt())).is_live
    assert "full" in caplog.text


# -- which worker is chosen


@pytest.mark.parametrize(("placement", "worker_id"), [("cost", 2), ("expected_delay", 1), ("marginal_delay", 1)])
async def test_the_configuration_names_the_rule_by_which_is_chosen(placement: str, worker_id: int) -> None:
    """Worker 1 has most of the prompt and computes nothing, but answers are written in many of its blocks."""
    router = router_of(1, 2, config={"router_placement": placement})
    for request_id, there in (("same", prompt(4000, worker_id=1)), ("other", prompt(8000, first=10**6, worker_id=1))):
        (await reserved(router, there, request_id)).mark_prefill_completed()
    decision = router.advise(prompt(4400))
    assert (decision.rank, decision.placement) == (WorkerRank(worker_id), placement)


async def answered(router: KvRouter, worker_id: int, number: int, wait_s: float) -> None:
    """A request gets its first token after this time, and ten more in a second."""
    there = prompt(400, first=1000 * number, worker_id=worker_id)
    reservation = await reserved(router, there, f"{number} on {worker_id}")
    for tokens, seconds in ((1, wait_s), (10, 1.0)):
        await anyio.sleep(seconds)
        reservation.output_tokens += tokens
        reservation.advance()
    reservation.release()


@pytest.mark.parametrize(
    ("placement", "is_observed"), [("cost", False), ("expected_delay", True), ("marginal_delay", True)]
)
async def test_by_a_delay_a_worker_that_answers_more_slowly_gets_less(placement: str, is_observed: bool) -> None:
    router = router_of(1, 2, config={"router_placement": placement, "overlap_score_credit": 0.0})
    for number in range(80):
        for worker_id, wait_s in ((1, 0.1), (2, 0.5)):
            await answered(router, worker_id, number, wait_s)
    pace = router.loads.pace(router.loads.now_s())
    if is_observed:
        assert pace.slowness[WorkerRank(2)] > 1.2
        assert pace.answer_tokens == pytest.approx(11)
    else:
        assert pace is UNOBSERVED
    there = await reserved(router, prompt(40, first=5 * 10**6, worker_id=1))
    there.mark_prefill_completed()
    assert router.advise(prompt(4000, first=7 * 10**6)).rank == WorkerRank(1 if is_observed else 2)


async def test_the_marginal_delay_goes_by_the_blocks_held_lately_also_among_many() -> None:
    """Worker 1 writes answers from the same prompt again and again; between them it holds nothing."""
    router = router_of(*range(1, 71), config={"router_placement": "marginal_delay"})
    for number in range(40):
        again = await reserved(router, prompt(40_000, worker_id=1), f"turn {number}")
        again.mark_prefill_completed()
        await anyio.sleep(1)
        router.advise(prompt(40))  # others come meanwhile
        again.release()
    loads, now_s = router.loads, router.loads.now_s()
    ranks = tuple(WorkerRank(worker_id) for worker_id in range(1, 71))
    seen = loads.sequences.project([], ranks, now_s)
    assert seen.decode_blocks[0] == 0
    assert seen.blocks_lately[0] > 1000 > max(seen.blocks_lately[1:])
    assert loads.pace(now_s).returns > 10
    found = router.advise(prompt(40, first=9 * 10**6))
    assert found.rank != WorkerRank(1)
    assert (found.placement, len(found.costs)) == ("marginal_delay", 70)


async def test_the_load_of_bookings_sends_others_elsewhere() -> None:
    router = router_of(1, 2)
    first, second = [await reserved(router, prompt(64, first=n * 100), str(n)) for n in range(2)]
    assert {first.rank, second.rank} == {WorkerRank(1), WorkerRank(2)}
    assert first.release()
    assert router.advise(prompt(64, first=900)).rank == first.rank


async def test_allowed_workers_and_taints_narrow_the_choice() -> None:
    health = published({1: ModelRuntimeConfig(taints={"a"}), 2: ModelRuntimeConfig(taints={"b"})})
    router = router_of(1, 2, health=health)
    assert router.advise(prompt(constraints=RoutingConstraints({"b"}))).rank == WorkerRank(2)
    assert router.advise(prompt(allowed_worker_ids={1})).rank == WorkerRank(1)
    with pytest.raises(Unavailable):
        router.advise(prompt(allowed_worker_ids={1}, constraints=RoutingConstraints({"b"})))


async def test_a_named_worker_with_several_ranks_needs_the_rank_too() -> None:
    health = published({7: ModelRuntimeConfig(data_parallel_start_rank=2, data_parallel_size=3)})
    router = router_of(7, health=health)
    assert router.advise(prompt(worker_id=7, dp_rank=4)).rank == WorkerRank(7, 4)
    assert {rank.dp_rank for rank in router.advise(prompt()).ranks} == {2, 3, 4}
    with pytest.raises(InvalidArgument, match="ranks 2 to 4"):
        router.advise(prompt(worker_id=7))
    with pytest.raises(Unavailable, match="not 5"):
        router.advise(prompt(worker_id=7, dp_rank=5))


async def test_overloaded_and_excluded_workers_are_passed_over() -> None:
    health = GivenHealth(1, 2, 3)
    router = router_of(1, 2, 3, health=health)
    health.overloaded(2)
    assert {rank.worker_id for rank in router.advise(prompt()).ranks} == {1, 3}
    with pytest.raises(WorkerOverloaded):
        router.advise(prompt(worker_id=2))
    health.left_out(3)
    assert router.advise(prompt()).rank == WorkerRank(1)
    health.overloaded(1, 2)
    with pytest.raises(ResourceExhausted):
        router.advise(prompt())
    health.left_out(1, 2, 3)
    with pytest.raises(Unavailable):
        router.advise(prompt())


async def test_a_prompt_that_is_not_tracked_is_a_request_without_prompt_work() -> None:
    router = router_of(1)
    await reserved(router, prompt(override=RouterConfigOverride(track_prefill_tokens=False)))
    loads = router.loads.sequences.project((), [WorkerRank(1)], 0.0)
    assert (list(loads.prefill_tokens), list(loads.requests)) == ([0], [1])


async def test_potential_loads_are_those_with_the_prompt_added() -> None:
    router = router_of(1, 2)
    await reserved(router, prompt(8, worker_id=1))
    loads = router.potential_loads(prompt(12).blocks)
    assert [(load.worker_id, load.potential_prefill_tokens) for load in loads] == [(1, 8 + 4), (2, 12)]
    assert [(load.potential_decode_blocks, load.active_requests) for load in loads] == [(3, 1), (3, 0)]


@pytest.mark.parametrize(
    ("config", "tokens", "reported", "in_use"),
    [
        ({}, 9, 3, 4),  # the unfinished third block; the first of the two whole ones is there
        ({}, 8, 3, 3),
        ({"router_assume_kv_reuse": False}, 9, 4, 5),
        ({"router_track_active_blocks": False}, 9, 0, 3),
    ],
)
async def test_blocks_that_are_not_tracked_are_in_use_all_the_same(
    config: dict[str, Any], tokens: int, reported: int, in_use: int
) -> None:
    router = router_of(1, config=config)
    await reserved(router, prompt(4))
    await reserved(router, prompt(4, first=100), "other")
    request = prompt(tokens)
    decision = router.advise(request)
    assert decision.chosen.active_decode_blocks + decision.chosen.additional_blocks == reported
    assert router.potential_decode_blocks(request, decision) == in_use


async def test_an_empty_prompt_and_a_booked_id_are_refused() -> None:
    router = router_of(1)
    with pytest.raises(InvalidArgument):
        await reserved(router, prompt(0))
    await reserved(router, prompt())
    with pytest.raises(DuplicateRequest):
        await reserved(router, prompt())
    assert len(router.loads) == 1


# -- workers that come and go


async def test_a_worker_that_leaves_takes_its_bookings_and_what_it_holds_along() -> None:
    workers = GivenHealth(7, 8)
    router = router_of(7, 8, health=workers)
    lost = await reserved(router, prompt(worker_id=7), "a")
    await reserved(router, prompt(worker_id=8), "b")
    workers.set(8)
    assert (lost.is_live, lost.release(), len(router.loads)) == (False, False, 1)
    workers.set(7, 8)
    assert router.overlap_blocks(prompt().blocks, WorkerRank(7)) == 0
    assert router.overlap_blocks(prompt().blocks, WorkerRank(8)) == 2


async def test_a_closed_router_no_longer_follows_its_workers() -> None:
    workers = GivenHealth(1)
    with router_of(1, health=workers):
        assert workers.views.observers
    assert not workers.views.observers


async def test_a_router_that_follows_events_and_does_not_run_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    router, events = router_of(1, 2, config={"use_kv_events": True}), Subject[RouterEvent]()
    with router, router.follow(events):
        events.on_next(stored(2, 8))
        events.on_next(stored(2, 12, event_id=2))
        assert router.advise(prompt(16)).overlap_blocks == 0
        assert ["KvRouter.run does not run" in record.getMessage() for record in caplog.records] == [True]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(router.run)
            await settled()
            assert router.overlap_blocks(prompt(16).blocks, WorkerRank(2)) == 3
            tasks.cancel_scope.cancel()


async def test_an_entered_router_runs_before_the_first_event(caplog: pytest.LogCaptureFixture) -> None:
    router, events = router_of(1, 2, config={"use_kv_events": True}), Subject[RouterEvent]()
    async with router:
        with router.follow(events):
            events.on_next(stored(2, 8))
            (await reserved(router, prompt())).release()
            await settled()
            assert router.overlap_blocks(prompt().blocks, WorkerRank(2)) == 2
    assert caplog.records == []


async def test_a_router_whose_entering_is_cancelled_is_closed_and_leaves_no_task() -> None:
    workers = GivenHealth(1)
    router = router_of(1, config={"use_kv_events": True}, health=workers)
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with router:
            raise AssertionError("it was entered")
    assert not workers.views.observers
    assert router.lookup.feed is not None
    async with anyio.create_task_group() as tasks:  # which it refuses while it runs
        await tasks.start(router.lookup.feed.run)
        tasks.cancel_scope.cancel()


async def test_a_request_is_enough_for_that_warning(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(1, config={"use_kv_events": True})
    with router, router.follow(Subject[RouterEvent]()):
        (await reserved(router, prompt())).release()
        assert len(caplog.records) == 1


async def test_a_router_that_runs_or_follows_nothing_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    router_of(1, config={"use_kv_events": True}).advise(prompt())
    router, events = router_of(1, config={"use_kv_events": True}), Subject[RouterEvent]()
    with router, router.follow(events):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(router.run)
            await settled()
            events.on_next(stored(1, 8))
            router.advise(prompt())
            tasks.cancel_scope.cancel()
    assert caplog.records == []


@pytest.mark.parametrize("config", [{"use_kv_events": False}, {"use_kv_events": True, "overlap_score_credit": 0.0}])
async def test_without_an_index_of_events_none_are_subscribed(config: dict[str, Any]) -> None:
    router, events = router_of(1, config=config), Subject[RouterEvent]()
    with router.follow(events):
        assert not events.observers
    with router_of(1, config={"use_kv_events": True}) as other, other.follow(events):
        assert len(events.observers) == 1


async def test_a_closed_router_follows_no_events_any_more() -> None:
    router, events = router_of(1, config={"use_kv_events": True}), Subject[RouterEvent]()
    with router:
        router.follow(events)
        assert events.observers
    assert not events.observers


async def test_settings_that_make_no_sense_leave_their_worker_out(caplog: pytest.LogCaptureFixture) -> None:
    health = published({}, 1, 2)
    router = router_of(1, 2, health=health)
    with pytest.raises(Unavailable):
        router.advise(prompt())
    health.publish({1: ModelRuntimeConfig(data_parallel_size=0), 2: ModelRuntimeConfig()})
    assert router.advise(prompt()).ranks == (WorkerRank(2),)
    assert "worker 1 is left out" in caplog.text


# -- arguments that do not fit the settings


def router(block_size_tokens: int = 4, *, config: dict[str, Any] | None = None, **given: Any) -> KvRouter:
    pool = static_workers({1: ScriptedEngine([])})
    return kv_router(pool, KvRouterConfig(**(config or {})), block_size_tokens=block_size_tokens, **given)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"router_prefill_load_model": "aic"}, "prefill_duration"),
        ({"router_policy_config": "policies.yaml"}, "profile"),
        ({"router_replica_sync": True}, "peers"),
        ({"use_remote_indexer": True}, "use_remote_indexer"),
        ({"serve_indexer": True}, "serve_indexer"),
        ({"shared_cache_type": "hicache"}, "shared_cache_type"),
        ({"shared_cache_multiplier": 0.5}, "shared_cache_multiplier"),
        ({"router_prefill_policy": "mine"}, "router_prefill_policy"),
        ({"router_decode_policy": "mine"}, "router_decode_policy"),
    ],
)
def test_what_is_missing_or_not_offered_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as refused:
        router(config=config)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"router_tracking_hash": "keyed-xxh3-v1"}, "router_tracking_hash"),
        ({"durable_kv_events": True}, "durable_kv_events"),
    ],
)
def test_what_no_configuration_may_hold_does_not_reach_a_router(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        router(config=config)
    assert refused.value.field == field


def test_all_problems_are_listed_and_the_first_is_the_field() -> None:
    with pytest.raises(InvalidArgument) as refused:
        router(0, config={"serve_indexer": True, "router_replica_sync": True, "router_decode_policy": "mine"})
    assert refused.value.field == "block_size_tokens"
    for name in ("block_size_tokens", "peers", "serve_indexer", "router_decode_policy"):
        assert name in str(refused.value)


def test_what_is_given_is_accepted() -> None:
    config = {"router_prefill_load_model": "aic", "router_policy_config": "policies.yaml"}
    profile = PolicyProfile.from_config(KvRouterConfig())
    with router(config=config, prefill_duration=lambda prompt, cached: 1.0, profile=profile) as given:
        assert given.config.router_prefill_load_model == "aic"


def test_conditional_disaggregation_is_another_stages_business() -> None:
    with router(config={"conditional_disagg_enabled": True}) as given:
        assert given.config.conditional_disagg_enabled
