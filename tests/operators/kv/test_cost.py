"""The cost of a request on each rank, and the overlap it is reckoned from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.decision import Prompt
from operators.kv.index import CandidateOverlap, Overlap
from operators.kv.load import RankLoads
from operators.kv.selection import WorkerType, cache_credits, costs
from operators.kv.types import RequestSettings, WorkerRank

A, B = WorkerRank(0), WorkerRank(1)
NOTHING: dict[WorkerRank, float] = {A: 0, B: 0}


def loads(*rows: tuple[int, int, int, int]) -> RankLoads:
    """Ranks with (prefill tokens, decode blocks, additional blocks, requests)."""
    prefill, decode, additional, requests = zip(*rows, strict=True)
    return RankLoads(prefill, decode, requests, additional)


def seen(overlap: Overlap, nothing: Mapping[WorkerRank, float] = NOTHING) -> CandidateOverlap:
    return CandidateOverlap(overlap, nothing)


def one(
    prompt: Prompt,
    load: tuple[int, int, int, int],
    overlap: Overlap | None = None,
    worker_type: WorkerType = "aggregated",
    **settings: Any,
) -> float:
    """The cost on a single rank."""
    (cost,) = costs(prompt, seen(overlap or Overlap(), {A: 0}), loads(load), RequestSettings(**settings), worker_type)
    return cost


def test_prompt_work_not_credited_is_scaled_and_decode_blocks_are_added() -> None:
    overlap = Overlap(device={A: 6})
    assert overlap.cached_tokens(A, RequestSettings(), 16) == 96
    assert one(Prompt(64, 16), (16, 2, 3, 0), overlap, prefill_load_scale=2.0) == 7
    assert one(Prompt(64, 16), (16, 2, 3, 0), overlap, prefill_load_scale=2.0, track_prefill_tokens=False) == 5


@pytest.mark.parametrize(("weight", "cost"), [(32.0, 228), (0.0, 100)])
def test_active_requests_cost_their_weight(weight: float, cost: float) -> None:
    assert one(Prompt(0, 16), (0, 100, 0, 4), decode_active_request_weight=weight) == cost


@pytest.mark.parametrize(("credit", "cost"), [(1.0, 7), (0.0, 10)])
def test_a_decode_worker_with_credit_is_chosen_by_its_cache(credit: float, cost: float) -> None:
    overlap = Overlap(device={A: 3})
    found = one(
        Prompt(64, 16), (0, 10, 0, 0), overlap, "decode", track_prefill_tokens=False, overlap_score_credit=credit
    )
    assert found == cost


def test_credit_takes_decode_blocks_off_only_on_decode_workers_and_not_below_zero() -> None:
    overlap = Overlap(device={A: 30})
    untracked: dict[str, Any] = {"track_prefill_tokens": False, "decode_active_request_weight": 2.0}
    assert one(Prompt(64, 16), (0, 10, 0, 1), overlap, "decode", **untracked) == 2
    assert one(Prompt(64, 16), (0, 10, 0, 1), overlap, "prefill", **untracked) == 12


@pytest.mark.parametrize(("decay", "expected"), [(0.0, [3, 4]), (1.0, [7 - 4 / 1.75, 4])])
def test_decay_takes_credit_from_ranks_with_more_prompt_work_than_the_calmest(
    decay: float, expected: list[float]
) -> None:
    settings = RequestSettings(overlap_score_credit_decay=decay)
    found = costs(Prompt(64, 16), seen(Overlap(device={A: 4})), loads((48, 0, 0, 0), (0, 0, 0, 0)), settings)
    assert found == pytest.approx(expected)
    assert (found[0] < found[1]) == (decay == 0)


def test_the_shared_cache_credits_what_lies_behind_the_device() -> None:
    overlap = Overlap(device={A: 2}, shared=[range(4)])
    settings = RequestSettings(shared_cache_multiplier=0.5)
    assert costs(Prompt(4, 1), seen(overlap), RankLoads.idle(2), settings) == [1.0, 2.0]


def test_one_figure_for_all_tiers_is_given_as_the_device() -> None:
    found = costs(Prompt(64, 16), seen(Overlap(device={A: 4.0})), loads((0, 1, 0, 0), (0, 0, 0, 0)), RequestSettings())
    assert found == [1, 4]


def test_lower_tiers_count_at_their_weight() -> None:
    overlap = Overlap(device={A: 2}, host={A: 3}, disk={A: 4}, external={A: 5})
    settings = RequestSettings(host_cache_hit_weight=0.5, disk_cache_hit_weight=0.25)
    assert overlap.effective_blocks(A, settings) == 5.75
    assert overlap.cached_tokens(A, settings, 16) == 92
    assert overlap.tiers(A).disk == 9


def test_credit_adds_all_tiers_and_the_shared_cache() -> None:
    overlap = Overlap(device={A: 2}, host={A: 1}, external={A: 2}, shared=[range(4)])
    settings = RequestSettings(
        overlap_score_credit=0.5, host_cache_hit_weight=0.25, disk_cache_hit_weight=0.1, shared_cache_multiplier=0.5
    )
    assert overlap.shared_blocks_beyond(2) == 2
    assert cache_credits(Prompt(64, 16), seen(overlap, {A: 0}), [0], settings) == pytest.approx([2.45])


def test_shared_positions_are_counted_from_the_rounded_device_blocks() -> None:
    overlap = Overlap(shared=[range(1, 3), range(5, 7)])
    assert [overlap.shared_blocks_beyond(device) for device in (0, 1.5, 2.4, 2.5, 6, 9)] == [4, 3, 3, 2, 1, 0]


def test_the_most_cached_anywhere_is_that_of_the_candidates() -> None:
    overlap = Overlap(device={A: 2, B: 9}, host={A: 4})
    assert seen(overlap, {A: 0}).best_cached_tokens(RequestSettings(), 16) == 5 * 16
    assert seen(overlap).best_cached_tokens(RequestSettings(), 16) == 9 * 16
    assert seen(overlap, {WorkerRank(5): 0}).best_cached_tokens(RequestSettings(), 16) == 0


def test_the_candidates_see_an_overlap_in_their_order_and_without_strangers() -> None:
    stranger = WorkerRank(9)
    overlap = Overlap(device={stranger: 7, B: 2, A: 1}, host={stranger: 5, B: 4})
    both, empty = seen(overlap), seen(overlap, {})
    assert (list(both.device), both.best_device) == ([1, 2], 2)
    assert both.with_lower_tiers(both.device, RequestSettings(host_cache_hit_weight=0.5)) == [1, 4]
    assert (list(empty.device), empty.best_device, empty.best_cached_tokens(RequestSettings(), 16)) == ([], 0, 0)


def test_ranks_that_are_no_candidates_change_nothing() -> None:
    stranger = WorkerRank(9)
    overlap = Overlap(device={stranger: 4}, host={stranger: 9}, disk={stranger: 99}, shared=[range(2)])
    settings = RequestSettings(overlap_score_credit_decay=0.5, shared_cache_multiplier=0.0)
    assert costs(Prompt(64, 16), seen(overlap, {A: 0}), RankLoads.idle(1), settings) == [4]


Row = tuple[int, int, int, int, int, int, int, int]


def slow_cost(
    prompt: Prompt, row: Row, least: int, shared: list[int], settings: RequestSettings, worker_type: str
) -> float:
    """The formula as it is written, one rank at a time."""
    active, held, added, requests, device, host, disk, external = row
    size, track = prompt.block_size_tokens, settings.track_prefill_tokens
    effective = device + settings.host_cache_hit_weight * host + settings.disk_cache_hit_weight * (disk + external)
    cached = math.floor(effective * size + 0.5)
    raw = (active + max(0, prompt.isl_tokens - cached) + cached) / size if track else 0.0
    decay = 1.0
    if track and settings.overlap_score_credit_decay:
        excess = (active - least) / size / math.ceil(prompt.isl_tokens / size)
        decay = 1 / (1 + settings.overlap_score_credit_decay * excess)
    credit = (
        settings.overlap_score_credit * decay * device
        + settings.host_cache_hit_weight * host
        + settings.disk_cache_hit_weight * (disk + external)
        + settings.shared_cache_multiplier * sum(position >= device for position in shared)
    )
    by_requests = settings.decode_active_request_weight * requests
    if worker_type == "decode" and not track and settings.overlap_score_credit > 0:
        return max(0.0, held + added - credit) + by_requests
    return settings.prefill_load_scale * max(0.0, raw - credit) + held + added + by_requests


weights = st.sampled_from([0.0, 0.1, 0.75, 1.0, 2.5])
shares = st.sampled_from([0.0, 0.1, 0.25, 0.75, 1.0])
counts = st.integers(0, 60)


@given(
    st.builds(
        RequestSettings,
        overlap_score_credit=weights,
        overlap_score_credit_decay=weights,
        prefill_load_scale=weights,
        decode_active_request_weight=weights,
        host_cache_hit_weight=shares,
        disk_cache_hit_weight=shares,
        shared_cache_multiplier=shares,
        track_prefill_tokens=st.booleans(),
    ),
    st.lists(st.tuples(*[counts] * 8), min_size=1, max_size=6),
    st.integers(1, 500),
    st.sampled_from([1, 4, 16]),
    st.tuples(counts, counts),
    st.sampled_from(["aggregated", "prefill", "decode"]),
)
def test_the_columns_agree_with_the_formula_rank_by_rank(
    settings: RequestSettings,
    rows: list[Row],
    isl: int,
    size: int,
    shared: tuple[int, int],
    worker_type: WorkerType,
) -> None:
    ranks = [WorkerRank(worker) for worker in range(len(rows))]
    tiers = [{rank: float(row[4 + n]) for rank, row in zip(ranks, rows, strict=True) if row[4 + n]} for n in range(4)]
    hits = range(min(shared), max(shared))
    overlap = Overlap(tiers[0], tiers[1], tiers[2], tiers[3], [hits])
    prompt, columns = Prompt(isl, size), loads(*((a, h, n, r) for a, h, n, r, *_ in rows))
    least = min(row[0] for row in rows)
    expected = [slow_cost(prompt, row, least, list(hits), settings, worker_type) for row in rows]
    assert costs(prompt, seen(overlap, dict.fromkeys(ranks, 0)), columns, settings, worker_type) == pytest.approx(
        expected
    )


@given(st.integers(1, 1000), st.integers(0, 1000))
def test_more_overlap_never_costs_more(isl: int, blocks: int) -> None:
    settings = evolve(RequestSettings(), prefill_load_scale=0.5)
    more, less = (
        costs(Prompt(isl, 16), seen(Overlap(device={A: n}), {A: 0}), RankLoads.idle(1), settings)[0]
        for n in (blocks + 1, blocks)
    )
    assert more <= less or blocks * 16 >= isl
