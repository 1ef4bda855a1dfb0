"""ActiveSequences: life of a booking, projections over all ranks, expiry, workers that come and go."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import KvRouterConfig
from operators.kv.errors import BookingError, DuplicateRequest, RequestNotFound, WorkerNotFound
from operators.kv.load import ActiveRequest, ActiveSequences, MissingDuration, SequenceLoad, tracking_hashes
from operators.kv.load.columns import LATELY_S
from operators.kv.types import WorkerRank
from pipeline.llm import block_hashes, sequence_hashes
from pipeline.protocols import RouterConfigOverride

A, B = WorkerRank(1), WorkerRank(2)


def load(hashes: list[int], tokens: int = 0, duration_s: float | None = None) -> SequenceLoad:
    return SequenceLoad(hashes, tokens, duration_s)


def totals(sequences: ActiveSequences, rank: WorkerRank = A, now_s: float = 0.0) -> tuple[int, int, int]:
    """Blocks, prompt tokens and requests of a rank."""
    loads = sequences.project([], [rank], now_s)
    return loads.decode_blocks[0], loads.prefill_tokens[0], loads.requests[0]


def test_the_blocks_held_lately_follow_those_held_now_and_show_where_they_count() -> None:
    sequences = ActiveSequences()
    sequences.set_workers({A.worker_id: range(1), B.worker_id: range(1)})

    def lately(at_s: float, *, shown: bool = True) -> list[int]:
        sequences.note_blocks_lately(at_s, shown=shown)
        return list(sequences.project([], [B, A], at_s).blocks_lately)

    booked = sequences.book("r", A, load(list(range(1000))), 5.0)
    assert list(sequences.project([], [A], 5.0).blocks_lately) == [0]
    assert lately(LATELY_S) == [0, round(1000 * (1 - math.exp(-1)))]
    assert lately(LATELY_S) == [0, 632]
    sequences.release(booked, LATELY_S)
    assert lately(2 * LATELY_S, shown=False) == [0, 0]
    assert lately(3 * LATELY_S) == [0, round(1000 * (1 - math.exp(-1)) * math.exp(-2))]
    sequences.remove_worker(A.worker_id)
    sequences.set_workers({A.worker_id: range(1), B.worker_id: range(1)})
    assert lately(3.1 * LATELY_S) == [0, 0], "another worker may have come under the id"


def test_shared_blocks_count_once_and_hints_add_up() -> None:
    sequences, seen = ActiveSequences(), []
    booked = {}
    for name, hashes, hint in [("r1", [1, 2, 3], 12), ("r2", [5], 4), ("r3", [1, 2, 3, 4], 0)]:
        booked[name] = sequences.book(name, A, load(hashes, hint), 0.0)
        seen.append(totals(sequences)[:2])
    for name in ("r2", "r3", "r1"):
        assert sequences.release(booked[name], 0.0)
        seen.append(totals(sequences)[:2])
    assert seen == [(3, 12), (4, 16), (5, 16), (4, 12), (3, 12), (0, 0)]


def test_the_first_token_ends_the_prompt_once() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1], 12), 0.0)
    sequences.mark_prefill_completed("r1", 0.0)
    sequences.mark_prefill_completed("r1", 0.0)
    assert totals(sequences) == (1, 0, 1)


def test_freeing_ends_the_prompt_too_and_twice_is_once() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1], 12), 0.0)
    assert [sequences.free("r1", 0.0), sequences.free("r1", 0.0)] == [True, False]
    assert totals(sequences) == (0, 0, 0)


def test_a_projection_counts_the_blocks_the_prompt_would_add() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1, 2, 4, 5]), 0.0)
    loads = sequences.project([1, 2, 3, 5], [A, B], 0.0)
    assert (list(loads.decode_blocks), list(loads.additional_blocks)) == ([4, 0], [2, 4])
    first, second = sequences.potential_loads([1, 2, 3, 5], [7, 16], [A, B], 0.0)
    assert (first.potential_decode_blocks, first.potential_prefill_tokens, first.active_requests) == (6, 7, 1)
    assert (second.worker_id, second.potential_decode_blocks, second.active_requests) == (2, 4, 0)


def test_a_request_id_is_booked_once_whatever_the_worker() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1]), 0.0)
    with pytest.raises(DuplicateRequest):
        sequences.book("r1", B, load([1]), 0.0)
    assert (totals(sequences, A)[2], totals(sequences, B)[2]) == (1, 0)


def test_requests_expire_when_they_are_older_than_the_limit() -> None:
    sequences = ActiveSequences()
    for name in ("r1", "r2"):
        sequences.book(name, A, load([1, 2], 8), 0.0)
    assert [sequences.expire(t) for t in (20.0, 31.0, 300.0)] == [[], [], []]
    assert sequences.expire(301.0) == ["r1", "r2"]
    assert totals(sequences) == (0, 0, 0)


def test_booking_looks_for_expired_requests_now_and_then() -> None:
    sequences = ActiveSequences(expiry_s=10.0)
    sequences.book("old", A, load([]), 0.0)
    sequences.book("young", A, load([]), 20.0)
    assert len(sequences) == 2, "looked less than 30 s ago"
    sequences.book("old", A, load([]), 30.0)
    assert sequences.expire(31.0) == ["young"]


def test_a_booking_releases_itself_and_no_later_one_of_its_id() -> None:
    sequences = ActiveSequences()
    first = sequences.book("r1", A, load([1], 4), 0.0)
    assert sequences.release(first, 1.0)
    second = sequences.book("r1", B, load([2], 5), 2.0)
    assert not sequences.is_live(first)
    steps = [sequences.release(first, 3.0), sequences.finish_prefill(first, 3.0), sequences.grow(first, 0.5, 3.0)]
    assert steps == [False, False, False]
    assert (sequences.is_live(second), totals(sequences, B)) == (True, (1, 5, 1))


def test_freeing_with_a_rank_frees_only_there() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1]), 0.0)
    assert not sequences.free_if_worker("r1", WorkerRank(1, 1), 0.0)
    assert sequences.free_if_worker("r1", A, 0.0)
    assert not sequences.free_if_worker("r1", A, 0.0)


def test_steps_of_a_request_that_is_not_booked_are_errors() -> None:
    sequences = ActiveSequences()
    with pytest.raises(RequestNotFound):
        sequences.mark_prefill_completed("r1", 0.0)
    with pytest.raises(RequestNotFound):
        sequences.add_output_block("r1", None, 0.0)


def test_output_blocks_count_for_their_rank() -> None:
    sequences = ActiveSequences()
    booking = sequences.book("r1", A, load([1, 2, 3]), 0.0)
    assert sequences.grow(booking, 0.5, 0.0)
    assert totals(sequences)[0] == 2
    sequences.add_output_block("r1", None, 0.0)
    assert totals(sequences)[0] == 3


def test_a_request_without_tracked_prompt_is_still_a_request() -> None:
    sequences = ActiveSequences()
    sequences.book("r1", A, load([1, 2], 0), 0.0)
    assert totals(sequences) == (2, 0, 1)


def test_a_worker_that_returns_starts_empty() -> None:
    sequences = ActiveSequences()
    sequences.set_workers({1: range(2), 2: range(1)})
    booking = sequences.book("r1", A, load([1, 2], 8), 0.0)
    sequences.book("r2", WorkerRank(1, 1), load([1, 2]), 0.0)
    sequences.book("r3", B, load([1, 2]), 0.0)
    assert sequences.remove_worker(1) == ["r1", "r2"]
    assert not sequences.release(booking, 1.0)
    sequences.set_workers({1: range(2), 2: range(1)})
    assert (totals(sequences), totals(sequences, B)) == ((0, 0, 0), (2, 0, 1))
    assert list(sequences.project([1, 2], [A, B], 1.0).additional_blocks) == [2, 0]


def test_booking_on_registered_workers_only_fails_when_the_worker_is_gone() -> None:
    sequences = ActiveSequences()
    sequences.set_workers({1: range(1)})
    sequences.remove_worker(1)
    with pytest.raises(WorkerNotFound):
        sequences.book("r1", A, load([1]), 0.0, registered_only=True)
    assert (sequences.ranks(), len(sequences)) == ([], 0)


def test_a_rank_a_booking_brought_goes_with_its_last_request() -> None:
    sequences = ActiveSequences()
    booking = sequences.book("r1", A, load([1]), 0.0)
    sequences.set_workers({2: range(1)})
    assert sequences.ranks() == [A, B]
    sequences.release(booking, 0.0)
    assert sequences.ranks() == [B]


def test_a_rank_that_was_registered_later_stays() -> None:
    sequences = ActiveSequences()
    booking = sequences.book("r1", A, load([1]), 0.0)
    sequences.set_workers({1: range(1)})
    sequences.release(booking, 0.0)
    assert sequences.ranks() == [A]


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    sequences = ActiveSequences()
    sequences.set_workers({1: range(1), 2: range(1)})
    for n in range(6):
        sequences.book(f"r{n}", A if n % 2 else B, load([1, 2, n + 10], 5, 1.0), 0.0)
    for n in range(3):
        sequences.free(f"r{n}", 0.0)
    sequences.remove_worker(1)
    sequences.free("r4", 0.0)
    assert (len(sequences), sequences._tree.root.below) == (0, None)
    (slot,) = sequences._slots.values()
    assert (slot.request_ids, slot.blocks._blocks, slot.prompts._prompts) == ({}, 0, {})


def test_ranks_a_worker_gave_up_lose_their_requests() -> None:
    sequences = ActiveSequences()
    sequences.set_workers({1: range(3)})
    sequences.book("r1", WorkerRank(1, 2), load([1]), 0.0)
    assert sequences.set_workers({1: range(1, 2)}) == ["r1"]
    assert sequences.ranks() == [WorkerRank(1, 1)]


def test_modelled_prompts_shrink_between_bookings() -> None:
    sequences = ActiveSequences()
    sequences.book("p1", A, load([], 100, 10.0), 0.0)
    assert [totals(sequences, A, t)[1] for t in (0.0, 5.0, 20.0)] == [100, 50, 0]
    assert (sequences.remaining_prefill_ms(A, 4.0), sequences.remaining_prefill_ms(B, 4.0)) == (6_000, 0)
    sequences.book("p2", A, load([], 10), 5.0)
    with pytest.raises(MissingDuration):
        sequences.remaining_prefill_ms(A, 5.0)


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -1.0])
def test_a_duration_that_is_none_is_refused_and_nothing_is_booked(duration_s: float) -> None:
    sequences = ActiveSequences()
    with pytest.raises(BookingError, match="prefill_duration_s"):
        sequences.book("r1", A, load([1, 2], 8, duration_s), 0.0)
    assert (len(sequences), sequences.ranks(), sequences._tree.root.below) == (0, [], None)
    sequences.book("r1", A, load([1, 2], 8, 0.0), 0.0)


@pytest.mark.parametrize("hashes", [[1, -1], [2**64]])
def test_a_hash_that_is_none_is_refused_and_nothing_is_booked(hashes: list[int]) -> None:
    sequences = ActiveSequences()
    with pytest.raises(BookingError, match="hash"):
        sequences.book("r1", A, load(hashes, 8), 0.0)
    assert (len(sequences), sequences.ranks()) == (0, [])


def test_columns_are_of_their_moment() -> None:
    sequences = ActiveSequences()
    loads = sequences.project([1], (A, B), 0.0)
    sequences.book("r1", A, load([1], 4), 0.0)
    assert (list(loads.requests), list(loads.additional_blocks)) == ([0, 0], [1, 1])


def test_the_same_tuple_of_ranks_is_read_anew_when_ranks_change() -> None:
    sequences, ranks = ActiveSequences(), (A, B)
    assert list(sequences.project([], ranks, 0.0).requests) == [0, 0]
    booking = sequences.book("r1", B, load([]), 0.0)
    assert list(sequences.project([], ranks, 0.0).requests) == [0, 1]
    sequences.release(booking, 0.0)
    sequences.book("r2", A, load([]), 0.0)
    assert list(sequences.project([], ranks, 0.0).requests) == [1, 0]


Step = tuple[int, int, int, str]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(0, 3), st.integers(0, 6), st.sampled_from(["book", "mark", "free", "worker"])
        ),
        max_size=50,
    )
)
def test_projections_agree_with_counting_the_requests_one_by_one(steps: list[Step]) -> None:
    sequences = ActiveSequences()
    booked: dict[str, tuple[WorkerRank, list[int], int]] = {}
    handles: dict[str, ActiveRequest] = {}
    ranks = tuple(WorkerRank(worker, rank) for worker in range(2) for rank in range(2))
    chain = sequence_hashes([1, 2, 3, 4, 5, 6])
    for name, at, length, kind in steps:
        request_id = f"r{name}"
        if kind == "book" and request_id not in booked:
            hashes = chain[:length] if name % 2 else sequence_hashes([name, *range(length)])
            handles[request_id] = sequences.book(request_id, ranks[at], load(hashes, length), 0.0)
            booked[request_id] = (ranks[at], hashes, length)
        elif kind == "mark" and request_id in booked:
            sequences.finish_prefill(handles[request_id], 0.0)
            booked[request_id] = (*booked[request_id][:2], 0)
        elif kind == "free" and request_id in handles:
            assert sequences.release(handles[request_id], 0.0) == (booked.pop(request_id, None) is not None)
        elif kind == "worker" and length == 0:
            lost = sequences.remove_worker(at % 2)
            assert set(lost) == {r for r, (rank, _, _) in booked.items() if rank.worker_id == at % 2}
            booked = {r: one for r, one in booked.items() if r not in lost}
        on = {rank: [one for one in booked.values() if one[0] == rank] for rank in ranks}
        loads = sequences.project(chain, ranks, 0.0)
        assert list(loads.requests) == [len(on[rank]) for rank in ranks]
        assert list(loads.prefill_tokens) == [sum(one[2] for one in on[rank]) for rank in ranks]
        assert list(loads.decode_blocks) == [len({h for one in on[rank] for h in one[1]}) for rank in ranks]
        shared = [max((sum(h in chain for h in one[1]) for one in on[rank]), default=0) for rank in ranks]
        assert list(loads.additional_blocks) == [len(chain) - depth for depth in shared]


def test_tracked_blocks_are_chained_from_the_given_local_hashes() -> None:
    settings = KvRouterConfig().settings()
    assert tracking_hashes([11, 29], settings, Random(0)) == sequence_hashes([11, 29])
    assert sequence_hashes([11, 29]) != sequence_hashes(block_hashes(range(8), 4))


def test_untracked_blocks_have_no_names_and_unshared_ones_new_names() -> None:
    rng, local = Random(0), [1, 2, 3]
    untracked = KvRouterConfig(router_track_active_blocks=False).settings()
    unshared = KvRouterConfig().settings(RouterConfigOverride(assume_kv_reuse=False))
    assert tracking_hashes(local, untracked, rng) == []
    first, second = tracking_hashes(local, unshared, rng), tracking_hashes(local, unshared, rng)
    assert len({*first, *second}) == 6
    assert max(first) < 2**64
