"""Scheduler: blocks that outlive their sequence, and blocks that wait for one."""

from __future__ import annotations

import pytest

from engines.mocker.scheduling import ROLES, SequenceState
from engines.mocker.timing import StepTime
from pipeline import ContractViolation
from tests.engines.mocker.scheduling.worlds import RecordingModel, run, scheduler, sequence_of, submitted


def test_a_held_sequence_keeps_its_blocks_until_it_is_released() -> None:
    core = scheduler(role=ROLES["prefill"])
    sequence = sequence_of(10)
    core.submit(sequence, holds_blocks=True)
    assert core.run_step().finished == [sequence]
    assert (sequence.stage, core.pool.active, core.is_idle) == (SequenceState.HELD, 3, True)
    core.release(sequence)
    core.release(sequence)
    assert (sequence.stage, core.pool.active, core.pool.inactive) == (SequenceState.ENDED, 0, 2)
    core.pool.check()


def test_releasing_a_sequence_that_still_runs_does_nothing() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(4, 3))
    core.run_step()
    core.release(sequence)
    assert sequence.stage is SequenceState.RUNNING


def test_a_held_sequence_can_be_cancelled() -> None:
    core = scheduler()
    sequence = sequence_of(10)
    core.submit(sequence, holds_blocks=True)
    core.run_step()
    core.cancel(sequence)
    core.release(sequence)
    assert core.pool.active == 0
    core.pool.check()


def test_a_request_that_waits_for_held_blocks_makes_empty_passes() -> None:
    core = scheduler(3)
    held, waiting = sequence_of(10, of=1), sequence_of(10, of=2)
    core.submit(held, holds_blocks=True)
    core.submit(waiting)
    core.run_step()
    assert core.run_step().did_nothing
    core.release(held)
    assert core.run_step().emitted == [waiting]


def test_a_reserved_prompt_has_its_blocks_and_no_pass() -> None:
    core = scheduler(role=ROLES["decode"], time=StepTime(RecordingModel()))
    sequence = sequence_of(10, 3)
    assert core.reserve(sequence)
    assert (core.pool.active, core.is_idle, sequence.cached_tokens) == (3, True, 0)
    assert core.pool.names() == set(), "nothing is there yet"
    core.activate(sequence)
    done = core.run_step()
    assert (done.admitted, done.emitted, done.scheduled_tokens, done.duration_ms) == ([sequence], [sequence], 0, 4)
    assert core.pool.names() == set(sequence.names(2))
    assert len(run(core)) == 2
    assert core.pool.active == 0


def test_a_reservation_is_refused_while_there_is_no_room() -> None:
    core = scheduler(4)
    first, second = sequence_of(8, 3, of=1), sequence_of(12, 3, of=2)
    assert core.reserve(first)
    assert not core.reserve(second)
    assert (second.stage, second.end - second.prompt_tokens, core.pool.active) == (SequenceState.NEW, 3, 2)
    core.cancel(first)
    assert core.pool.active == 0
    assert core.reserve(second)
    assert not core.reserve(sequence_of(17))
    assert core.rejects(sequence_of(17))


def test_a_reservation_shares_what_is_here_already() -> None:
    core = scheduler()
    submitted(core, sequence_of(12))
    run(core)
    sequence = sequence_of(12, 2)
    assert core.reserve(sequence)
    assert sequence.cached_tokens == 12, "all of it: nothing is computed here"
    core.activate(sequence)
    assert len(run(core)) == 2


def test_only_a_reserved_sequence_can_be_activated() -> None:
    core = scheduler()
    (sequence,) = submitted(core, sequence_of(4))
    with pytest.raises(ContractViolation):
        core.activate(sequence)


@pytest.mark.parametrize("activated", [False, True])
def test_a_reservation_can_be_cancelled(activated: bool) -> None:
    core = scheduler()
    sequence = sequence_of(10, 3)
    core.reserve(sequence)
    if activated:
        core.activate(sequence)
    core.cancel(sequence)
    assert (core.is_idle, core.pool.active, core.waiting_count) == (True, 0, 0)
    core.pool.check()


def test_a_request_with_blocks_does_not_queue_behind_one_that_waits_for_blocks() -> None:
    core = scheduler(4)
    ready, waiting = sequence_of(12, 2, of=1), sequence_of(12, 1, of=2)
    core.reserve(ready)
    core.submit(waiting)
    assert core.run_step().did_nothing
    core.activate(ready)
    assert len(run(core)) == 3


def test_a_preempted_reservation_is_computed_here() -> None:
    core = scheduler(5, role=ROLES["decode"])
    first, second = sequence_of(8, 9, of=1), sequence_of(8, 9, of=2)
    for sequence in (first, second):
        core.reserve(sequence)
        core.activate(sequence)
    assert len(run(core)) == 18
    assert second.preemptions >= 1
    assert core.pool.active == 0
