"""The marginal delay of a request on each rank, and the choices by it."""

from __future__ import annotations

from math import ceil, isfinite, log, sqrt
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.decision import Prompt
from operators.kv.eligibility import Candidates
from operators.kv.index import CandidateOverlap, Overlap
from operators.kv.load import RankLoads
from operators.kv.marginal import felt_tokens, marginal_delays, marginal_weights
from operators.kv.pace import Pace
from operators.kv.selection import WorkerType, costs, judge, select_worker
from operators.kv.types import RequestSettings, WorkerRank

BY_DELAY = RequestSettings(placement="marginal_delay")
A, B = WorkerRank(0), WorkerRank(1)
Row = tuple[int, int, int, int, int, float]
"""Of a rank: prompt tokens in flight, blocks held, blocks added, requests, blocks cached, blocks held lately."""

counts = st.integers(0, 500)
lately = st.floats(0, 10_000)
row = st.tuples(st.integers(0, 200_000), counts, counts, counts, st.integers(0, 2000), lately)
rows = st.lists(row, min_size=1, max_size=4)
prompts = st.builds(Prompt, st.integers(1, 100_000), st.sampled_from([1, 16, 64]))
paces = st.builds(Pace, st.sampled_from([0.0, 0.1]), st.floats(0, 5000), st.floats(1, 5), st.just({}), st.floats(0, 20))


def loads(table: list[Row]) -> RankLoads:
    prefill, held, added, requests, _, held_lately = zip(*table, strict=True)
    return RankLoads(prefill, held, requests, added, held_lately)


def found(prompt: Prompt, table: list[Row], pace: Pace) -> list[float]:
    cached = [min(one[4], prompt.isl_tokens / prompt.block_size_tokens) for one in table]
    return marginal_delays(prompt, cached, loads(table), pace)


def chosen(prompt: Prompt, table: list[Row], pace: Pace, by: RequestSettings = BY_DELAY) -> WorkerRank:
    ranks = tuple(map(WorkerRank, range(len(table))))
    cached = Overlap(device={rank: one[4] for rank, one in zip(ranks, table, strict=True) if one[4]})
    return select_worker(prompt, Candidates(ranks), cached, loads(table), by, Random(0), pace=pace).rank


def slow_delay(prompt: Prompt, one: Row, pace: Pace) -> float:
    """The formula, as documented, with its constants in figures."""
    in_flight, held, added, requests, cached, held_lately = one
    size, answer = prompt.block_size_tokens, max(1.0, pace.answer_tokens)
    new = max(0, prompt.isl_tokens - cached * size)
    passes = ceil((in_flight + max(1, new)) / 8192)
    shared = min(new, max(0, 8192 - in_flight)) if in_flight else 0
    ahead = passes + (0.5 if in_flight else 0)
    if not pace.pause_weight:
        return in_flight + new + ahead * 1024 + 2 * new + shared
    felt = min(20, pace.pause_weight * answer)
    wait = in_flight + new + ahead * (1024 + (384 + size * (held + added) / 300 if requests else 0))
    own = (size * (held + added) + requests * answer / 2) / 300
    pauses = requests * (new + 1024 * (passes - ceil(in_flight / 8192))) / answer
    longer = requests / 600 * (size * added + answer / 2)
    turns = pace.returns * 384 * log(1 + size * held_lately / 300 / 384)
    return wait + 2 * new + shared + felt * (own + longer) + sqrt(felt * 20) * pauses + 20 * turns


@given(prompts, rows, paces)
def test_the_columns_agree_with_the_formula_rank_by_rank(prompt: Prompt, table: list[Row], pace: Pace) -> None:
    delays = found(prompt, table, pace)
    assert delays == pytest.approx([slow_delay(prompt, one, pace) for one in table])
    assert all(isfinite(one) and one > 0 for one in delays)


@given(prompts, row, st.integers(1, 2000), paces)
def test_more_overlap_at_equal_load_never_loses(prompt: Prompt, first: Row, more: int, pace: Pace) -> None:
    less, greater = found(prompt, [first, (*first[:4], first[4] + more, first[5])], pace)
    assert greater <= less


@given(prompts, row, st.sampled_from([1, 2, 3, 5]), st.integers(1, 500), paces)
def test_more_load_at_equal_overlap_never_wins(prompt: Prompt, first: Row, column: int, more: int, pace: Pace) -> None:
    a, b, c, d, cached, e = (count + more * (column == position) for position, count in enumerate(first))
    less, greater = found(prompt, [first, (int(a), int(b), int(c), int(d), int(cached), e)], pace)
    assert greater >= less * (1 - 1e-12)


@given(prompts, row, st.integers(1, 100_000), paces)
def test_more_prompts_in_flight_save_at_most_a_pass_that_pauses_answers(
    prompt: Prompt, first: Row, more: int, pace: Pace
) -> None:
    less, greater = found(prompt, [first, (first[0] + more, *first[1:])], pace)
    assert greater + 20 * first[3] * 1024 / max(1.0, pace.answer_tokens) >= less * (1 - 1e-12)


@given(prompts, counts, st.booleans(), row, paces)
def test_a_load_adds_at_least_its_weight(prompt: Prompt, added: int, is_cached: bool, one: Row, pace: Pace) -> None:
    """So nothing that a search passes over because of its weight is the cheapest."""
    in_flight, held, _, requests, cached, held_lately = one
    load = in_flight, held if requests else 0, requests, round(held_lately)
    cached = prompt.blocks if is_cached else cached
    idle, busy = found(prompt, [(0, 0, added, 0, cached, 0), (*load[:2], added, requests, cached, load[3])], pace)
    assert busy * (1 + 1e-9) >= idle + marginal_weights(prompt, pace).of(load)


def test_without_a_prompt_to_compute_a_load_adds_its_weight_and_half_of_a_pass_under_way() -> None:
    prompt, pace = Prompt(64, 64), Pace(returns=5.0)
    idle, busy = found(prompt, [(0, 0, 0, 0, 1, 0.0), (100, 300, 0, 2, 1, 900.0)], pace)
    under_way = (1024 + 384 + 64 * 300 / 300) / 2
    assert busy == pytest.approx(idle + marginal_weights(prompt, pace).of((100, 300, 2, 900)) + under_way)


def test_blocks_held_do_not_send_a_conversation_away_from_its_cache_as_they_do_by_cost() -> None:
    table: list[Row] = [(0, 300, 160, 2, 150, 0.0), (0, 0, 160, 0, 0, 0.0)]
    assert chosen(Prompt(10_240, 64), table, Pace()) == A
    assert chosen(Prompt(10_240, 64), table, Pace(), RequestSettings()) == B


def test_where_prompts_come_back_a_new_one_goes_where_less_was_held_lately() -> None:
    """Both do nothing right now; the prompt has its first 32 blocks on the one that was full."""
    table: list[Row] = [(0, 0, 64, 0, 32, 9000.0), (0, 0, 64, 0, 0, 100.0)]
    assert chosen(Prompt(4096, 64), table, Pace(returns=0.0)) == A
    assert chosen(Prompt(4096, 64), table, Pace(returns=15.0)) == B
    assert chosen(Prompt(4096, 64), table, Pace(pause_weight=0.0, returns=15.0)) == A  # no answers, no steps


def test_where_all_are_full_a_prompt_is_not_computed_again_to_be_where_less_was_held() -> None:
    """The difference is the same as where they are nearly empty."""
    empty, full = ([(0, 0, 64, 0, 64, base + 900.0), (0, 0, 64, 0, 0, base)] for base in (0.0, 9000.0))
    pace = Pace(returns=10.0)
    assert chosen(Prompt(4096, 64), list[Row](empty), pace) == B
    assert chosen(Prompt(4096, 64), list[Row](full), pace) == A


def test_short_prompts_share_a_pass_where_it_would_pause_many_answers() -> None:
    table: list[Row] = [(300, 0, 5, 200, 0, 0.0), (0, 0, 5, 200, 0, 0.0)]
    assert chosen(Prompt(300, 64), table, Pace()) == A
    assert chosen(Prompt(300, 64), table, Pace(pause_weight=0.0)) == B


def test_short_prompts_take_passes_of_their_own_where_first_tokens_come_soon_beside_answers() -> None:
    """To share the next pass is to wait for the one under way. That is a larger part of a short wait."""
    table: list[Row] = [(300, 0, 5, 140, 0, 0.0), (0, 0, 5, 140, 0, 0.0)]
    assert chosen(Prompt(300, 64), table, Pace(pause_weight=0.003, answer_tokens=1000)) == B
    assert chosen(Prompt(300, 64), table, Pace(pause_weight=0.02, answer_tokens=1000)) == A


def test_a_turn_stays_at_its_cache_where_first_tokens_come_soon_beside_answers() -> None:
    """The time per token counts by what it is beside the time to the first token, at most like twenty of it."""
    table: list[Row] = [(0, 900, 32, 6, 20, 0.0), (0, 0, 32, 0, 0, 0.0)]
    assert chosen(Prompt(2048, 64), table, Pace(pause_weight=0.03, answer_tokens=175)) == A
    assert chosen(Prompt(2048, 64), table, Pace(pause_weight=0.2, answer_tokens=175)) == B
    assert felt_tokens(Pace(pause_weight=0.2, answer_tokens=175)) == felt_tokens(Pace()) == 20


def test_half_of_a_pass_under_way_is_still_to_come() -> None:
    pace = Pace(pause_weight=0.0)
    idle, busy = found(Prompt(640, 64), [(0, 0, 10, 0, 0, 0.0), (100, 0, 10, 0, 0, 0.0)], pace)
    assert busy - idle == 100 + 1024 / 2 + 640


def test_a_rank_that_takes_longer_gets_less() -> None:
    table: list[Row] = [(2000, 0, 5, 2, 0, 0.0), (2000, 0, 5, 3, 0, 0.0)]
    assert chosen(Prompt(300, 64), table, Pace()) == A
    assert chosen(Prompt(300, 64), table, Pace(slowness={A: 2.0})) == B


def test_the_block_size_changes_nothing() -> None:
    coarse: list[Row] = [(0, 30, 10, 2, 8, 40.0), (500, 10, 10, 1, 2, 4.0)]
    fine: list[Row] = [(a, 4 * b, 4 * c, d, 4 * cached, 4 * e) for a, b, c, d, cached, e in coarse]
    pace = Pace(returns=3.0)
    assert found(Prompt(640, 64), coarse, pace) == pytest.approx(found(Prompt(640, 16), fine, pace))


@pytest.mark.parametrize("worker_type", ["aggregated", "prefill", "decode"])
def test_where_prompts_are_not_tracked_the_cost_decides(worker_type: WorkerType) -> None:
    table: list[Row] = [(640, 30, 10, 2, 8, 9.0), (0, 20, 10, 9, 2, 0.0)]
    untracked = RequestSettings(track_prefill_tokens=False, decode_active_request_weight=2.0)
    cached, candidates = Overlap(device={A: 8, B: 2}), Candidates((A, B))
    pace = Pace(slowness={A: 3.0}, returns=5.0)
    by = evolve(untracked, placement="marginal_delay")
    judged = judge(Prompt(640, 64), candidates, cached, loads(table), by, worker_type, pace)
    seen = CandidateOverlap(cached, {A: 0, B: 0})
    assert judged.costs == costs(Prompt(640, 64), seen, loads(table), untracked, worker_type)


def test_credit_and_lower_tiers_count_as_for_the_cost_up_to_the_whole_prompt() -> None:
    cached, candidates = Overlap(device={A: 4}, host={A: 4}), Candidates((A, B))
    idle, pace = RankLoads.idle(2), Pace(pause_weight=0.0)
    plain = judge(Prompt(640, 64), candidates, cached, idle, BY_DELAY, pace=pace)
    assert plain.costs == [1024 + 3 * (640 - 64 * 7), 1024 + 3 * 640]
    half = RequestSettings(placement="marginal_delay", overlap_score_credit=0.5, host_cache_hit_weight=0.0)
    assert judge(Prompt(640, 64), candidates, cached, idle, half, pace=pace).costs[0] == 1024 + 3 * (640 - 64 * 2)
    double = RequestSettings(placement="marginal_delay", overlap_score_credit=9.0)
    assert judge(Prompt(640, 64), candidates, cached, idle, double, pace=pace).costs[0] == 1024
