"""The expected delay of a request on each rank, and the choices by it."""

from __future__ import annotations

from math import ceil, isfinite
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kv.decision import Prompt
from operators.kv.eligibility import Candidates, RoutingRules, WorkerPool
from operators.kv.index import CandidateOverlap, Overlap
from operators.kv.load import RankLoads
from operators.kv.pace import UNOBSERVED, Pace
from operators.kv.rates import BATCH_TOKENS
from operators.kv.selection import WorkerType, costs, delays, judge, select_worker
from operators.kv.types import RequestSettings, WorkerRank
from pipeline.protocols.card import ModelRuntimeConfig

BY_DELAY = RequestSettings(placement="expected_delay")
A, B, C = WorkerRank(0), WorkerRank(1), WorkerRank(2)
Row = tuple[int, int, int, int, int]
"""Of a rank: prompt tokens in flight, blocks held, blocks added, requests, blocks cached."""

sizes = st.sampled_from([1, 16, 64])
lengths = st.integers(1, 100_000)
counts = st.integers(0, 500)
row = st.tuples(st.integers(0, 200_000), counts, counts, counts, st.integers(0, 2000))
rows = st.lists(row, min_size=1, max_size=4)
paces = st.builds(Pace, st.floats(0, 0.3), st.floats(1, 5000), st.floats(1, 5))


def loads(table: list[Row]) -> RankLoads:
    prefill, held, added, requests, _ = zip(*table, strict=True)
    return RankLoads(prefill, held, requests, added)


def overlap(table: list[Row]) -> Overlap:
    return Overlap(device={WorkerRank(worker): row[4] for worker, row in enumerate(table) if row[4]})


def found(
    prompt: Prompt,
    table: list[Row],
    by: RequestSettings = BY_DELAY,
    worker_type: WorkerType = "aggregated",
    pace: Pace = UNOBSERVED,
) -> list[float]:
    seen = CandidateOverlap(overlap(table), {WorkerRank(worker): 0 for worker in range(len(table))})
    return delays(prompt, seen, loads(table), by, worker_type, pace)


def chosen(
    prompt: Prompt, table: list[Row], seed: int = 0, by: RequestSettings = BY_DELAY, pace: Pace = UNOBSERVED
) -> WorkerRank:
    ranks = Candidates(tuple(map(WorkerRank, range(len(table)))))
    return select_worker(prompt, ranks, overlap(table), loads(table), by, Random(seed), pace=pace).rank


def slow_delay(prompt: Prompt, row: Row, pace: Pace = UNOBSERVED) -> float:
    """The formula, as documented, with its constants in figures."""
    in_flight, held, added, requests, cached = row
    new = max(0, prompt.isl_tokens - cached * prompt.block_size_tokens)
    own = 2 * in_flight + new
    displaced = 2 * pace.congestion * new
    shared = min(new, max(0, 8192 - in_flight)) if in_flight else 0
    passes = ceil((in_flight + max(1, new)) / 8192) - ceil(in_flight / 8192)
    paused = pace.pause_weight * requests * (new + 1024 * passes)
    slower = pace.pause_weight * pace.answer_tokens / 300 * prompt.block_size_tokens * (held + added)
    slower += pace.pause_weight * pace.answer_tokens / 300 * prompt.block_size_tokens * added * requests / 2
    return own + displaced + shared + paused + 1024 * requests + slower


@given(lengths, sizes, rows, paces)
def test_the_columns_agree_with_the_formula_rank_by_rank(isl: int, size: int, table: list[Row], pace: Pace) -> None:
    prompt = Prompt(isl, size)
    delay = found(prompt, table, pace=pace)
    assert delay == pytest.approx([slow_delay(prompt, row, pace) for row in table])
    assert all(isfinite(one) and one >= 0 for one in delay)


@given(lengths, sizes, row, st.integers(1, 2000), paces)
def test_more_overlap_at_equal_load_never_loses(isl: int, size: int, first: Row, more: int, pace: Pace) -> None:
    better = (*first[:4], first[4] + more)
    less, greater = found(Prompt(isl, size), [first, better], pace=pace)
    assert greater <= less
    if first[4] * size < isl:
        assert chosen(Prompt(isl, size), [first, better], pace=pace) == B


@given(lengths, sizes, row, st.integers(1, 3), st.integers(1, 500), paces)
def test_more_load_at_equal_overlap_never_wins(
    isl: int, size: int, first: Row, column: int, more: int, pace: Pace
) -> None:
    a, b, c, d, cached = (count + more * (column == position) for position, count in enumerate(first))
    less, greater = found(Prompt(isl, size), [first, (a, b, c, d, cached)], pace=pace)
    assert greater >= less


@given(lengths, sizes, row, st.integers(1, 100_000), paces)
def test_more_prompts_in_flight_save_at_most_a_pass_that_pauses_answers(
    isl: int, size: int, first: Row, more: int, pace: Pace
) -> None:
    longer = (first[0] + more, *first[1:])
    less, greater = found(Prompt(isl, size), [first, longer], pace=pace)
    assert greater + pace.pause_weight * first[3] * 1024 >= less
    quiet, waiting = ((*one[:3], 0, one[4]) for one in (first, longer))
    less, greater = found(Prompt(isl, size), [quiet, waiting], pace=pace)
    assert greater > less


@given(rows, st.floats(0.1, 8), paces)
def test_a_pool_that_is_slower_as_a_whole_chooses_as_before(table: list[Row], slow: float, pace: Pace) -> None:
    ranks = [WorkerRank(worker) for worker in range(len(table))]
    slower = Pace(pace.pause_weight, pace.answer_tokens, pace.congestion, dict.fromkeys(ranks, slow))
    prompt, candidates = Prompt(640, 64), Candidates(tuple(ranks))
    plain, other = (judge(prompt, candidates, overlap(table), loads(table), BY_DELAY, pace=p) for p in (pace, slower))
    assert other.costs == pytest.approx([slow * cost for cost in plain.costs])


@given(rows, st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.integers(0, 3))
def test_only_an_eligible_worker_is_chosen(table: list[Row], allowed: set[int], busy: set[int], seed: int) -> None:
    pool = WorkerPool({worker: ModelRuntimeConfig() for worker in range(len(table))}, None, frozenset(busy))
    eligible = [worker for worker in range(len(table)) if worker in allowed and worker not in busy]
    if not eligible:
        return
    candidates = pool.candidates(RoutingRules(allowed_worker_ids=allowed))
    some = loads([table[worker] for worker in eligible])
    decision = select_worker(Prompt(640, 64), candidates, overlap(table), some, BY_DELAY, Random(seed))
    assert decision.rank.worker_id in eligible


@settings(max_examples=30)
@given(rows, st.integers(0, 2**32), st.sampled_from([0.0, 0.7]))
def test_a_seed_repeats_the_choices(table: list[Row], seed: int, temperature: float) -> None:
    warm = RequestSettings(placement="expected_delay", temperature=temperature)
    first, second = (chosen(Prompt(640, 64), table + table, seed, warm) for _ in range(2))
    assert first == second


def test_equal_ranks_take_turns_by_the_given_chance() -> None:
    equal: list[Row] = [(64, 1, 1, 1, 0)] * 3
    drawn = [chosen(Prompt(64, 16), equal, seed) for seed in range(60)]
    assert set(drawn) == {A, B, C}


def test_blocks_held_do_not_send_a_conversation_away_from_its_cache_as_they_do_by_cost() -> None:
    """Both are idle but for answers they write: 300 blocks of 64 tokens held there, 150 of the prompt's 160 cached."""
    table: list[Row] = [(0, 300, 160, 2, 150), (0, 0, 160, 0, 0)]
    assert chosen(Prompt(10_240, 64), table) == A
    assert chosen(Prompt(10_240, 64), table, by=RequestSettings()) == B


def test_a_queue_longer_than_what_the_cache_saves_and_spares_sends_it_away() -> None:
    prompt = Prompt(10_240, 64)
    assert chosen(prompt, [(15_000, 0, 160, 0, 160), (0, 0, 160, 0, 0)]) == A
    assert chosen(prompt, [(16_000, 0, 160, 0, 160), (0, 0, 160, 0, 0)]) == B


def test_where_prompts_queue_what_is_cached_is_worth_more() -> None:
    prompt, table = Prompt(10_240, 64), list[Row]([(16_000, 0, 160, 0, 160), (0, 0, 160, 0, 0)])
    assert chosen(prompt, table, pace=Pace(congestion=2.0)) == A


def test_a_hot_prefix_goes_elsewhere_when_its_rank_has_too_many_requests_more() -> None:
    """A prompt of 4,096 tokens is worth twelve requests."""
    prompt, alone = Prompt(4096, 64), Pace(pause_weight=0.0)
    assert chosen(prompt, [(0, 0, 0, 11, 64), (0, 0, 0, 0, 0)], pace=alone) == A
    assert chosen(prompt, [(0, 0, 0, 13, 64), (0, 0, 0, 0, 0)], pace=alone) == B


def test_a_long_prompt_goes_where_it_keeps_fewer_waiting() -> None:
    """The queue before it is a little longer there; a short prompt would not go."""
    table: list[Row] = [(BATCH_TOKENS, 0, 0, 0, 0), (0, 0, 0, 5, 0)]
    assert chosen(Prompt(40_000, 64), table) == A
    assert chosen(Prompt(1000, 64), table) == B


def test_short_prompts_share_a_pass_where_it_would_pause_many_answers() -> None:
    table: list[Row] = [(300, 0, 5, 200, 0), (0, 0, 5, 200, 0)]
    assert chosen(Prompt(300, 64), table) == A
    assert chosen(Prompt(300, 64), table, pace=Pace(pause_weight=0.0)) == B


def test_a_rank_that_takes_longer_gets_less() -> None:
    table: list[Row] = [(2000, 0, 5, 2, 0), (2000, 0, 5, 3, 0)]
    assert chosen(Prompt(300, 64), table) == A
    assert chosen(Prompt(300, 64), table, pace=Pace(slowness={A: 2.0})) == B


def test_the_block_size_changes_nothing() -> None:
    coarse: list[Row] = [(0, 30, 10, 2, 8), (500, 10, 10, 1, 2)]
    fine: list[Row] = [(flight, 4 * held, 4 * added, n, 4 * cached) for flight, held, added, n, cached in coarse]
    assert found(Prompt(640, 64), coarse) == pytest.approx(found(Prompt(640, 16), fine))


@pytest.mark.parametrize("worker_type", ["aggregated", "prefill", "decode"])
def test_where_prompts_are_not_tracked_the_cost_decides(worker_type: WorkerType) -> None:
    table: list[Row] = [(640, 30, 10, 2, 8), (0, 20, 10, 9, 2)]
    untracked: dict[str, Any] = {"track_prefill_tokens": False, "decode_active_request_weight": 2.0}
    by_delay = RequestSettings(placement="expected_delay", **untracked)
    seen = CandidateOverlap(overlap(table), {A: 0, B: 0})
    expected = costs(Prompt(640, 64), seen, loads(table), RequestSettings(**untracked), worker_type)
    assert found(Prompt(640, 64), table, by_delay, worker_type) == expected


@pytest.mark.parametrize(
    "by", [RequestSettings(), RequestSettings(placement="expected_delay", track_prefill_tokens=False)]
)
def test_slowness_changes_no_cost(by: RequestSettings) -> None:
    table, candidates = list[Row]([(640, 30, 10, 2, 8), (0, 20, 10, 9, 2)]), Candidates((A, B))
    plain, other = (
        judge(Prompt(640, 64), candidates, overlap(table), loads(table), by, pace=pace)
        for pace in (UNOBSERVED, Pace(slowness={A: 3.0}))
    )
    assert other.costs == plain.costs


def test_credit_and_lower_tiers_count_as_for_the_cost() -> None:
    seen = CandidateOverlap(Overlap(device={A: 4}, host={A: 4}), {A: 0, B: 0})
    idle = RankLoads.idle(2)
    assert delays(Prompt(640, 64), seen, idle, BY_DELAY) == [3 * (640 - 64 * 7), 3 * 640]
    half = RequestSettings(placement="expected_delay", overlap_score_credit=0.5, host_cache_hit_weight=0.0)
    assert delays(Prompt(640, 64), seen, idle, half) == [3 * (640 - 64 * 2), 3 * 640]


def test_a_decision_names_its_rule_and_shows_its_terms() -> None:
    table: list[Row] = [(0, 10, 5, 1, 5), (0, 0, 10, 0, 0)]
    decision = select_worker(Prompt(640, 64), Candidates((A, B)), overlap(table), loads(table), BY_DELAY, Random(0))
    reasons = decision.attributes()
    assert (decision.rank, decision.placement, reasons["placement"]) == (B, "expected_delay", "expected_delay")
    assert [one.cost for one in decision.report()] == pytest.approx([slow_delay(Prompt(640, 64), row) for row in table])
    (warm, _) = decision.report()
    assert (warm.overlap_blocks, warm.active_prefill_tokens, warm.active_requests) == (5, 0, 1)
    assert (warm.active_decode_blocks, warm.additional_blocks) == (10, 5)
