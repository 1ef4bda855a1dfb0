"""Scheduler: blocks that outlive their sequence, and blocks that wait for one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import pytest

from engines.mocker import BlockPool, PassTime, PolynomialTiming, Scheduler, Sequence, Stage
from pipeline import ContractViolation

BLOCK = 4
MODEL = PolynomialTiming()


def scheduler(capacity: int = 100, **options: Any) -> Scheduler:
    return Scheduler(BlockPool(capacity), block_size=BLOCK, **options)


def asked(tokens: int | Items[int], max_output_tokens: int = 1, *, of: int = 0) -> Sequence:
    """A request; `of` makes prompts of numbers differ from the first token on."""
    prompt = range(of * 1000, of * 1000 + tokens) if isinstance(tokens, int) else tokens
    return Sequence(prompt, max_output_tokens, block_size=BLOCK)


def submitted(to: Scheduler, *sequences: Sequence) -> tuple[Sequence, ...]:
    for sequence in sequences:
        to.submit(sequence)
    return sequences


def run(core: Scheduler, passes: int = 1000) -> list[int]:
    """Runs until nothing is left to do; the tokens said in order."""
    said: list[int] = []
    for _ in range(passes):
        if core.is_idle:
            return said
        for sequence in core.run_pass().emitted:
            said += sequence.new_token_ids()
        core.pool.check()
    raise AssertionError("it does not end")


class Recorder:
    """A model of time that writes down what it is asked."""

    def __init__(self) -> None:
        self.prefills: list[tuple[int, int, int]] = []
        self.decodes: list[tuple[int, int, int, int]] = []

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        self.prefills.append((batch, mean_prompt_tokens, mean_cached_tokens))
        return 10.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        self.decodes.append((batch, active_kv_tokens, total_kv_tokens, mean_context_tokens))
        return 4.0


def test_a_held_sequence_keeps_its_blocks_until_it_is_released() -> None:
    core = scheduler(worker_type="prefill")
    sequence = asked(10)
    core.submit(sequence, holds_blocks=True)
    assert core.run_pass().finished == [sequence]
    assert (sequence.stage, core.pool.active, core.is_idle) == (Stage.HELD, 3, True)
    core.release(sequence)
    core.release(sequence)
    assert (sequence.stage, core.pool.active, core.pool.inactive) == (Stage.ENDED, 0, 2)
    core.pool.check()


def test_releasing_a_sequence_that_still_runs_does_nothing() -> None:
    core = scheduler()
    (sequence,) = submitted(core, asked(4, 3))
    core.run_pass()
    core.release(sequence)
    assert sequence.stage is Stage.RUNNING


def test_a_held_sequence_can_be_cancelled() -> None:
    core = scheduler()
    sequence = asked(10)
    core.submit(sequence, holds_blocks=True)
    core.run_pass()
    core.cancel(sequence)
    core.release(sequence)
    assert core.pool.active == 0
    core.pool.check()


def test_who_waits_for_held_blocks_makes_passes_that_do_nothing() -> None:
    core = scheduler(3)
    held, waiting = asked(10, of=1), asked(10, of=2)
    core.submit(held, holds_blocks=True)
    core.submit(waiting)
    core.run_pass()
    assert core.run_pass().did_nothing
    core.release(held)
    assert core.run_pass().emitted == [waiting]


def test_a_reserved_prompt_has_its_blocks_and_no_pass() -> None:
    core = scheduler(worker_type="decode", time=PassTime(Recorder()))
    sequence = asked(10, 3)
    assert core.reserve(sequence)
    assert (core.pool.active, core.is_idle, sequence.cached_tokens) == (3, True, 0)
    assert core.pool.names() == set(), "nothing is there yet"
    core.activate(sequence)
    done = core.run_pass()
    assert (done.admitted, done.emitted, done.scheduled_tokens, done.duration_ms) == ([sequence], [sequence], 0, 4)
    assert core.pool.names() == set(sequence.names(2))
    assert len(run(core)) == 2
    assert core.pool.active == 0


def test_a_reservation_is_refused_while_there_is_no_room() -> None:
    core = scheduler(4)
    first, second = asked(8, 3, of=1), asked(12, 3, of=2)
    assert core.reserve(first)
    assert not core.reserve(second)
    assert (second.stage, second.max_output_tokens, core.pool.active) == (Stage.NEW, 3, 2)
    core.cancel(first)
    assert core.pool.active == 0
    assert core.reserve(second)
    assert not core.reserve(asked(17))
    assert core.rejects(asked(17))


def test_a_reservation_shares_what_is_here_already() -> None:
    core = scheduler()
    submitted(core, asked(12))
    run(core)
    sequence = asked(12, 2)
    assert core.reserve(sequence)
    assert sequence.cached_tokens == 12, "all of it: nothing is computed here"
    core.activate(sequence)
    assert len(run(core)) == 2


def test_only_a_reserved_sequence_can_be_activated() -> None:
    core = scheduler()
    (sequence,) = submitted(core, asked(4))
    with pytest.raises(ContractViolation):
        core.activate(sequence)


@pytest.mark.parametrize("activated", [False, True])
def test_a_reservation_can_be_cancelled(activated: bool) -> None:
    core = scheduler()
    sequence = asked(10, 3)
    core.reserve(sequence)
    if activated:
        core.activate(sequence)
    core.cancel(sequence)
    assert (core.is_idle, core.pool.active, core.waiting_count) == (True, 0, 0)
    core.pool.check()


def test_who_has_its_blocks_does_not_queue_behind_who_waits_for_blocks() -> None:
    core = scheduler(4)
    ready, waiting = asked(12, 2, of=1), asked(12, 1, of=2)
    core.reserve(ready)
    core.submit(waiting)
    assert core.run_pass().did_nothing
    core.activate(ready)
    assert len(run(core)) == 3


def test_a_preempted_reservation_is_computed_here() -> None:
    core = scheduler(5, worker_type="decode")
    first, second = asked(8, 9, of=1), asked(8, 9, of=2)
    for sequence in (first, second):
        core.reserve(sequence)
        core.activate(sequence)
    assert len(run(core)) == 18
    assert second.preemptions >= 1
    assert core.pool.active == 0
