"""Scheduler: admission, sharing, limits and endings of the unified pass."""

from __future__ import annotations

from typing import Any

import pytest

from engines.mocker.scheduling import BlockPool, Scheduler, Sequence, SequenceState, VllmPolicy
from pipeline import ContractViolation
from pipeline.protocols.kv import KvEventData, KvRemoved, KvStored
from tests.engines.mocker.scheduling.worlds import BLOCK, MODEL, run, scheduler, sequence_of, submitted


def test_the_pass_that_computes_a_prompt_emits_the_first_token() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(6, 3))
    done = core.run_step()
    assert (done.admitted, done.emitted, done.finished) == ([sequence], [sequence], [])
    assert (sequence.new_tokens, sequence.emitted, done.scheduled_tokens) == (1, 1, 6)
    assert sequence.new_token_ids() == sequence.output_tokens(0, 1)


def test_each_pass_emits_one_token_until_the_limit() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(6, 3))
    passes = [core.run_step() for _ in range(3)]
    assert [len(done.emitted) for done in passes] == [1, 1, 1]
    assert [done.finished for done in passes] == [[], [], [sequence]]
    assert core.is_idle
    assert sequence.stage is SequenceState.ENDED


def test_a_finished_request_leaves_nothing_active() -> None:
    core = scheduler()
    submitted(core, sequence_of(6, 9))
    run(core)
    assert core.pool.active == 0
    assert core.running_count == 0


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_cancelled_request_gives_its_blocks_back(passes: int) -> None:
    core = scheduler()
    sequence, other = submitted(core, sequence_of(6, 9), sequence_of(6, 9, of=1))
    for _ in range(passes):
        core.run_step()
    core.cancel(sequence)
    core.cancel(sequence)
    assert core.pool.active == len(other.blocks)
    core.pool.check()
    assert len(run(core)) == 9 - passes, "the other one is unaffected"
    assert sequence.emitted == passes


def test_no_more_sequences_run_than_allowed() -> None:
    core = scheduler(max_seqs=2)
    sequences = submitted(core, *(sequence_of(6, 3, of=n) for n in range(5)))
    counts, finished = [], []
    while not core.is_idle:
        done = core.run_step()
        counts.append(len(done.emitted))
        finished += done.finished
    assert max(counts) == 2
    assert tuple(finished) == sequences


def test_a_long_prompt_is_computed_over_several_passes() -> None:
    core = scheduler(max_batched_tokens=16)
    (sequence,) = submitted(core, sequence_of(40))
    passes = [core.run_step() for _ in range(3)]
    assert [done.scheduled_tokens for done in passes] == [16, 16, 8]
    assert [done.emitted for done in passes] == [[], [], [sequence]]


def test_without_chunks_a_prompt_waits_for_a_pass_it_fits_in() -> None:
    core = scheduler(max_batched_tokens=16, chunked_prefill=False)
    submitted(core, sequence_of(10, of=1), sequence_of(10, of=2))
    assert [core.run_step().scheduled_tokens for _ in range(2)] == [10, 10]


def test_without_chunks_a_prompt_that_fits_no_pass_is_rejected() -> None:
    core = scheduler(max_batched_tokens=16, chunked_prefill=False)
    first, long, last = submitted(core, sequence_of(8, 2, of=1), sequence_of(17, of=2), sequence_of(8, of=3))
    assert core.run_step().rejected == []
    run_second = core.run_step()
    assert (run_second.finished, run_second.rejected) == ([first], [])
    done = core.run_step()
    assert (done.rejected, done.finished) == ([long], [last])


def test_no_request_overtakes_a_head_that_does_not_fit() -> None:
    core = scheduler(5)
    _, large, small = submitted(core, sequence_of(12, 9, of=1), sequence_of(12, of=2), sequence_of(4, of=3))
    done = core.run_step()
    assert large not in done.admitted
    assert small not in done.admitted
    assert core.waiting == (large, small)


def test_a_prompt_gets_the_tokens_that_outputs_leave() -> None:
    core = scheduler(max_batched_tokens=16)
    submitted(core, *(sequence_of(4, 9, of=n) for n in range(3)))
    core.run_step()
    submitted(core, sequence_of(40, of=9))
    done = core.run_step()
    assert done.scheduled_tokens == 16
    assert core.running[-1].computed == 13


def test_a_budget_spent_on_outputs_admits_no_request() -> None:
    core = scheduler(max_batched_tokens=4)
    first, second = submitted(core, sequence_of(4, 9, of=1), sequence_of(4, 9, of=2))
    core.run_step()
    assert list(core.running) == [first]
    core.run_step()
    assert list(core.running) == [first, second]
    assert second.computed == 3


def test_a_request_that_can_never_fit_is_rejected_though_the_budget_is_spent() -> None:
    core = scheduler(max_batched_tokens=1, max_model_len=32)
    (busy,) = submitted(core, sequence_of(1, 9, of=1))
    core.run_step()
    (hopeless,) = submitted(core, sequence_of(32))
    done = core.run_step()
    assert (done.emitted, done.rejected) == ([busy], [hopeless])


@pytest.mark.parametrize("prompt_tokens", [32, 33])
def test_a_prompt_as_long_as_the_model_allows_is_rejected(prompt_tokens: int) -> None:
    core = scheduler(max_model_len=32)
    sequence, other = submitted(core, sequence_of(prompt_tokens, 3), sequence_of(4, of=1))
    done = core.run_step()
    assert (done.rejected, done.emitted) == ([sequence], [other])
    assert core.rejects(sequence_of(32))


def test_without_a_model_length_a_long_prompt_that_fits_is_accepted() -> None:
    core = scheduler(100)
    submitted(core, sequence_of(400))
    assert len(run(core)) == 1


def test_a_prompt_larger_than_the_cache_is_rejected() -> None:
    core = scheduler(3)
    fits, too_long = submitted(core, sequence_of(12), sequence_of(13))
    done = core.run_step()
    assert (done.finished, done.rejected) == ([fits], [too_long])


def test_an_output_ends_at_the_length_of_the_model() -> None:
    core = scheduler(max_model_len=10)
    (sequence,) = submitted(core, sequence_of(6, 99))
    assert len(run(core)) == 4
    assert sequence.end - sequence.prompt_tokens == 4


def test_an_output_ends_where_the_cache_could_not_hold_it() -> None:
    core = scheduler(3)
    (sequence,) = submitted(core, sequence_of(6, 99))
    assert len(run(core)) == sequence.end - sequence.prompt_tokens == 7, "the last token needs no room"
    assert core.preemptions == 0


def test_the_cached_tokens_are_known_from_the_first_admission_on() -> None:
    core = scheduler()
    first, second = sequence_of(12, 2), sequence_of(14, 2)
    assert [first.cached_tokens] == [None]
    submitted(core, first)
    assert core.run_step().admitted == [first]
    submitted(core, second)
    assert core.run_step().admitted == [second]
    assert [first.cached_tokens, second.cached_tokens] == [0, 12]


def test_a_request_for_no_output_completes_without_a_token() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(6, 0))
    done = core.run_step()
    assert (done.completed_empty, done.emitted, done.finished) == ([sequence], [], [])
    assert done.duration_ms == pytest.approx(MODEL.prefill_ms(1, 6, 0)), "no decode step"
    assert core.is_idle
    assert core.pool.active == 0


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    core = scheduler()
    submitted(core, sequence_of(12))
    run(core)
    (again,) = submitted(core, sequence_of(12))
    assert core.run_step().scheduled_tokens == 4
    assert again.cached_tokens == 8


def test_a_recomputed_block_is_a_second_copy_without_an_event() -> None:
    events: list[KvEventData] = []
    core = Scheduler(BlockPool(9, events.append), block_size=BLOCK)
    submitted(core, sequence_of(12))
    run(core)
    submitted(core, sequence_of(12))
    run(core)
    assert [len(event.blocks) for event in events if isinstance(event, KvStored)] == [3]
    assert core.pool.inactive == 4


def test_blocks_are_shared_with_requests_later_in_the_same_pass() -> None:
    core = scheduler()
    first, second = submitted(core, sequence_of(13, 9), sequence_of(13, 9))
    done = core.run_step()
    assert (second.cached_tokens, done.scheduled_tokens) == (12, 14)
    assert first.blocks[:3] == second.blocks[:3]
    assert core.pool.active == 5


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    core = scheduler(prefix_caching=False)
    first, second = submitted(core, sequence_of(13, 9), sequence_of(13, 9))
    core.run_step()
    assert not set(first.blocks) & set(second.blocks)
    assert second.cached_tokens == 0
    run(core)
    assert core.pool.names() == set()


def test_only_held_cached_blocks_count_as_room() -> None:
    core = scheduler(6)
    submitted(core, sequence_of(8, of=1))
    run(core)
    (holder,) = submitted(core, sequence_of(12, 9, of=2))
    core.run_step()
    (again,) = submitted(core, sequence_of(16, of=1))
    core.run_step()
    assert core.waiting == (again,), "two of its four blocks are cached, but within the room it needs"
    (sharer,) = submitted(core, sequence_of(16, of=2))
    core.cancel(again)
    core.run_step()
    assert sharer.cached_tokens == 12
    assert holder.stage is SequenceState.RUNNING


def test_the_block_of_a_token_is_taken_when_it_is_computed() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(4, 3))
    core.run_step()
    assert (sequence.length, core.pool.active) == (5, 1)
    core.run_step()
    assert (sequence.length, core.pool.active) == (6, 2)


def test_the_last_token_of_an_output_never_takes_a_block() -> None:
    core = scheduler(2)
    submitted(core, sequence_of(4, 5))
    assert len(run(core)) == 5
    assert core.preemptions == 0


def test_full_blocks_of_output_are_stored_below_those_of_the_prompt() -> None:
    events: list[KvEventData] = []
    core = Scheduler(BlockPool(9, events.append), block_size=BLOCK)
    (sequence,) = submitted(core, sequence_of(6, 4))
    run(core)
    names = sequence.names(2)
    stored = [(event.parent_hash, event.blocks[0].block_hash) for event in events if isinstance(event, KvStored)]
    assert stored == [(None, names[0]), (names[0], names[1])]
    (longer,) = submitted(core, sequence_of([*range(6), *sequence.output_tokens()], 1))
    core.run_step()
    assert longer.cached_tokens == 8


def test_a_pass_over_nothing_does_nothing() -> None:
    done = scheduler().run_step()
    assert done.did_nothing
    assert done.duration_ms == 0


def test_a_sequence_is_submitted_once_and_to_blocks_of_its_size() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(4))
    with pytest.raises(ContractViolation):
        core.submit(sequence)
    with pytest.raises(ContractViolation):
        core.submit(Sequence([1], 1, block_size=8))


def test_metrics_count_running_and_waiting_requests() -> None:
    core = scheduler(max_seqs=1)
    submitted(core, sequence_of(4, 3, of=1), sequence_of(4, 3, of=2))
    assert core.reserve(sequence_of(4, 3, of=3))
    core.run_step()
    assert (core.running_count, core.waiting_count, core.pool.active, core.pool.capacity) == (1, 2, 2, 100)


def test_removals_are_published_before_the_blocks_that_replace_them() -> None:
    events: list[KvEventData] = []
    core = Scheduler(BlockPool(3, events.append), block_size=BLOCK)
    first, second = sequence_of(12, of=1), sequence_of(12, of=2)
    submitted(core, first)
    run(core)
    submitted(core, second)
    run(core)
    assert events[1:] == [KvRemoved(first.names(3)[::-1]), events[2]]
    assert isinstance(events[2], KvStored)
    assert core.pool.names() == set(second.names(3))


# -- which request is preempted, and how it returns


def crowded(preemption_mode: Any = "lifo") -> tuple[Scheduler, tuple[Sequence, ...]]:
    """Return three sequences of two blocks each, in a cache of seven, about to need their third blocks."""
    core = scheduler(7, policy=VllmPolicy(preemption_mode))
    sequences = submitted(core, *(sequence_of(7, 5, of=n) for n in range(1, 4)))
    for _ in range(2):
        core.run_step()
    assert core.pool.active == 6
    return core, sequences


def test_lifo_preempts_the_latest_request() -> None:
    core, (_, _, third) = crowded("lifo")
    assert core.run_step().preempted == [third]


def test_fifo_preempts_the_earliest_request() -> None:
    core, (first, second, third) = crowded("fifo")
    done = core.run_step()
    assert done.preempted == [first]
    assert core.running == (second, third)


def test_a_preempted_request_waits_at_the_front() -> None:
    core, (_, _, third) = crowded()
    (newcomer,) = submitted(core, sequence_of(4, of=9))
    core.run_step()
    assert core.waiting == (third, newcomer)
    assert third.computed == 0
    assert third.blocks == []
    assert core.preemptions == 1


def test_a_pass_that_preempts_admits_no_request() -> None:
    core = scheduler(6)
    first, second = submitted(core, sequence_of(4, 12, of=1), sequence_of(1, 12, of=2))
    while not (done := core.run_step()).preempted:
        pass
    assert (done.preempted, done.admitted) == ([second], [])
    assert (core.running, core.waiting) == ((first,), (second,))
    assert core.pool.available >= 1, "there would have been room for its prompt"
    core.run_step()
    assert core.running == (first, second)


def test_a_preempted_request_repeats_no_token() -> None:
    core, sequences = crowded()
    counts = {sequence: sequence.emitted for sequence in sequences}
    while not core.is_idle:
        for sequence in core.run_step().emitted:
            counts[sequence] += sequence.new_tokens
    assert list(counts.values()) == [5, 5, 5]
    assert core.preemptions >= 1
    assert core.pool.active == 0


def test_a_request_computed_before_its_preemption_gives_its_tokens_back() -> None:
    core, (first, second, third) = crowded("fifo")
    done = core.run_step()
    # The second one needed the block: the first one's token is refunded and its time not charged.
    assert done.preempted == [first]
    assert done.scheduled_tokens == 2
    assert done.emitted == [second, third]


def test_a_second_admission_is_not_reported_and_adds_to_the_reused_tokens() -> None:
    core, (_, _, third) = crowded()
    admitted: list[Sequence] = []
    while not core.is_idle:
        admitted += core.run_step().admitted
    assert admitted == []
    assert third.preemptions >= 1
    assert third.cached_tokens == 0
    assert third.reused_tokens == 4 * third.preemptions, "its own full block of the prompt is still there"
