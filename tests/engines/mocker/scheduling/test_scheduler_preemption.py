"""Scheduler: which request is preempted when the cache is full, and how it returns."""

from __future__ import annotations

from typing import Any

from engines.mocker.scheduling import Scheduler, Sequence, VllmPolicy
from tests.engines.mocker.scheduling.worlds import scheduler, sequence_of, submitted


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
