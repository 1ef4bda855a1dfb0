"""select_worker: the lowest cost, ties, temperature, pins, and the reasons it keeps."""

from __future__ import annotations

import math
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.decision import Decision, Prompt
from operators.kv.eligibility import Candidates, RoutingRules, WorkerPool
from operators.kv.index import Overlap
from operators.kv.load import ActiveSequences, RankLoads, SequenceLoad
from operators.kv.selection import pick, select_worker
from operators.kv.types import RequestSettings, WorkerRank
from pipeline import InvalidArgument, Unavailable
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig

A, B, C = WorkerRank(0), WorkerRank(1), WorkerRank(2)


def decode_loads(*blocks: int) -> RankLoads:
    zeros = [0] * len(blocks)
    return RankLoads(zeros, blocks, zeros, zeros)


def chosen(
    candidates: Candidates,
    loads: RankLoads,
    overlap: Overlap | None = None,
    settings: RequestSettings | None = None,
    seed: int = 0,
) -> Decision:
    return select_worker(
        Prompt(64, 16), candidates, overlap or Overlap(), loads, settings or RequestSettings(), Random(seed)
    )


def test_the_cheapest_candidate_wins() -> None:
    decision = chosen(Candidates((A, B, C)), decode_loads(3, 1, 2))
    assert (decision.rank, decision.cost, decision.margin) == (B, 5, 1)


def test_load_can_outweigh_overlap() -> None:
    warm, cold = RankLoads([48, 0], [0, 0], [0, 0], [0, 0]), Overlap(device={A: 4})
    assert chosen(Candidates((A, B)), warm, cold).rank == A
    assert chosen(Candidates((A, B)), warm, cold, RequestSettings(overlap_score_credit_decay=1.0)).rank == B


def test_equal_candidates_take_turns_by_chance() -> None:
    rng, column = Random(1), [4.0, 4.0, 4.0]
    drawn = Counter(pick(column, 0.0, rng) for _ in range(3000))
    assert set(drawn) == {0, 1, 2}
    assert max(drawn.values()) - min(drawn.values()) < 300


def test_a_seed_repeats_the_choices_whatever_the_order_of_the_workers() -> None:
    names = [3, 1, 2]
    forwards = WorkerPool({name: ModelRuntimeConfig() for name in names})
    backwards = WorkerPool({name: ModelRuntimeConfig() for name in reversed(names)})
    loads, prompt = RankLoads.idle(3), Prompt(16, 16)
    for temperature in (0.0, 0.7):
        settings, drawn = RequestSettings(temperature=temperature), list[list[WorkerRank]]()
        for pool, rng in ((forwards, Random(42)), (backwards, Random(42))):
            candidates = pool.candidates(RoutingRules())
            drawn.append([select_worker(prompt, candidates, Overlap(), loads, settings, rng).rank for _ in range(64)])
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) == 3


def test_no_number_is_drawn_where_there_is_no_choice() -> None:
    rng = Random(5)
    before = rng.getstate()
    assert [pick([2.0, 1.0], 0.0, rng), pick([1.0], 0.5, rng)] == [1, 0]
    assert rng.getstate() == before


def test_temperature_makes_dearer_ones_rarer_by_their_place_between_lowest_and_highest() -> None:
    """With temperature 1 the dearest of all is e times rarer than the cheapest."""
    rng = Random(7)
    drawn = Counter(pick([10.0, 15.0, 20.0], 1.0, rng) for _ in range(30_000))
    assert drawn[0] / drawn[2] == pytest.approx(2.718, rel=0.1)
    assert drawn[0] / drawn[1] == pytest.approx(1.649, rel=0.1)


def test_temperature_among_equals_is_fair_and_near_zero_is_strict() -> None:
    rng = Random(3)
    drawn = Counter(pick([1.0, 1.0], 0.5, rng) for _ in range(2000))
    assert abs(drawn[0] - drawn[1]) < 200
    assert {pick([1.0, 2.0, 3.0], 1e-9, rng) for _ in range(50)} == {0}


extremes = st.floats(0, allow_nan=False) | st.sampled_from([0.0, 5e-324, sys.float_info.max])


@given(
    st.lists(extremes, min_size=1, max_size=8),
    st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 1e300]),
    st.randoms(use_true_random=False),
)
def test_extreme_costs_and_temperatures_are_safe(costs: list[float], temperature: float, rng: Random) -> None:
    position = pick(costs, temperature, rng)
    assert 0 <= position < len(costs)
    if temperature == 0:
        assert costs[position] == min(costs)


def test_a_preferred_taint_outweighs_a_little_load_and_an_avoided_one_repels() -> None:
    pool = WorkerPool({0: ModelRuntimeConfig(taints={"mdc-a"}), 1: ModelRuntimeConfig()})
    liked = pool.candidates(RoutingRules(constraints=RoutingConstraints(preferred_taints={"mdc-a": 0.85})))
    avoided = pool.candidates(RoutingRules(constraints=RoutingConstraints(preferred_taints={"mdc-a": -0.25})))
    assert chosen(liked, decode_loads(100, 90)).rank == A
    assert chosen(avoided, decode_loads(90, 100)).rank == B


def test_a_pinned_rank_is_chosen_whatever_it_costs_and_not_multiplied() -> None:
    pool = WorkerPool({0: ModelRuntimeConfig(taints={"a"}), 1: ModelRuntimeConfig()})
    rules = RoutingRules(pinned=A, constraints=RoutingConstraints(preferred_taints={"a": 1.0}))
    decision = chosen(pool.candidates(rules), decode_loads(500))
    assert (decision.rank, decision.cost, decision.margin) == (A, 504, None)


def test_a_decision_keeps_its_reasons() -> None:
    loads = RankLoads([16, 0], [2, 9], [1, 3], [4, 4])
    overlap = Overlap(device={A: 1, B: 3, C: 99}, host={A: 2})
    decision = chosen(Candidates((A, B)), loads, overlap)
    assert decision.rank == A
    assert (decision.overlap_blocks, decision.best_available_overlap_blocks) == (1, 3)
    assert (decision.effective_overlap_blocks, decision.cached_tokens) == (2.5, 40)
    assert decision.attributes() == {
        "placement": "cost",
        "worker_id": 0,
        "dp_rank": 0,
        "candidates": 2,
        "cost": 8.5,
        "margin": 5.5,
        "overlap_blocks": 1,
        "best_available_overlap_blocks": 3,
        "effective_overlap_blocks": 2.5,
        "prompt_blocks": 4,
        "active_prefill_tokens": 16,
        "active_decode_blocks": 2,
        "additional_blocks": 4,
        "active_requests": 1,
    }
    assert [(one.rank, one.cost, one.overlap_blocks) for one in decision.report()] == [(A, 8.5, 1), (B, 14.0, 3)]


def test_the_margin_is_below_zero_when_chance_took_a_dearer_one() -> None:
    hot = RequestSettings(temperature=1e9)
    margins = {chosen(Candidates((A, B)), decode_loads(1, 3), settings=hot, seed=seed).margin for seed in range(20)}
    assert margins == {2, -2}


@pytest.mark.parametrize(("requests", "margin"), [((1, 1), 0.0), ((3, 3), 0.0), ((0, 3), math.inf)])
def test_between_infinite_costs_there_is_a_margin_too(requests: tuple[int, int], margin: float) -> None:
    extreme = RequestSettings(decode_active_request_weight=sys.float_info.max, prefill_load_scale=0.0)
    assert chosen(Candidates((A, B)), RankLoads([0, 0], [0, 0], requests, [0, 0]), settings=extreme).margin == margin


def test_a_choice_needs_tokens_and_candidates() -> None:
    with pytest.raises(InvalidArgument):
        select_worker(Prompt(0, 16), Candidates((A,)), Overlap(), RankLoads.idle(1), RequestSettings(), Random(0))
    with pytest.raises(Unavailable):
        chosen(Candidates(()), RankLoads.idle(0))


def test_advice_for_a_request_changes_nothing() -> None:
    sequences, pool = ActiveSequences(), WorkerPool({0: ModelRuntimeConfig(), 1: ModelRuntimeConfig()})
    sequences.set_workers({0: range(1), 1: range(1)})
    sequences.book("r1", A, SequenceLoad([1, 2], 16), 0.0)
    candidates = pool.candidates(RoutingRules())

    def decide() -> Decision:
        return chosen(candidates, sequences.project([1, 2, 3, 4], candidates.ranks, 1.0))

    first, second = decide(), decide()
    assert (first.rank, first.attributes()) == (B, second.attributes())
    assert (len(sequences), sequences.project([], [B], 1.0).requests[0]) == (1, 0)
