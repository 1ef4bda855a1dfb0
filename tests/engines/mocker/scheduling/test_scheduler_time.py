"""Scheduler: what a pass is charged, and bursts of several tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items
from random import Random
from typing import Any

import pytest

from engines.mocker import BlockPool, Burst, PassTime, PolynomialTiming, Scheduler, Sequence, VllmPolicy
from engines.mocker.scheduling import Plan

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


def test_a_token_within_a_block_is_given_back_as_well() -> None:
    core = scheduler(4, policy=VllmPolicy("fifo"))
    first, second = submitted(core, asked(5, 9, of=1), asked(7, 9, of=2))
    for _ in range(2):
        core.run_pass()
    done = core.run_pass()
    assert (done.preempted, done.emitted, done.scheduled_tokens) == ([first], [second], 1)


def test_what_a_plan_takes_back_it_has_never_given() -> None:
    plan = Plan(100, 50)
    kept, dropped = asked(20), asked(30, 5)
    plan.add(kept, 5, 10)
    plan.add(dropped, 8, 22)
    assert (plan.batch, plan.prompt_tokens, plan.cached_tokens) == (2, 45, 13)
    plan.take_back(dropped)
    assert (plan.budget, plan.prefill_left) == (90, 40)
    assert (plan.batch, plan.prompt_tokens, plan.cached_tokens) == (1, 15, 5)
    plan.take_back(dropped)
    assert plan.budget == 90, "it lacks tokens, so it has got none"


def test_tokens_of_output_are_no_part_of_a_prompt() -> None:
    plan = Plan(100, 50)
    plan.add(asked(20, 9), 20, 3)
    assert (plan.budget, plan.prefill_left, plan.batch) == (97, 50, 0)


def test_a_pass_takes_the_time_of_its_prompts_and_of_its_tokens() -> None:
    core = scheduler(100)
    submitted(core, asked(10, 5, of=1), asked(13, 5, of=2))
    prompts = MODEL.prefill_ms(2, 23 // 2, 0)
    tokens = MODEL.decode_ms(2, 7 * BLOCK, 100 * BLOCK, 11)
    assert core.run_pass().duration_ms == pytest.approx(prompts + tokens)
    assert core.run_pass().duration_ms == pytest.approx(MODEL.decode_ms(2, 7 * BLOCK, 100 * BLOCK, 12))


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


def test_the_model_is_asked_for_whole_prompts_so_far_and_what_was_computed_before() -> None:
    recorder = Recorder()
    core = scheduler(50, time=PassTime(recorder), max_batched_tokens=10)
    submitted(core, asked(16, of=1))
    run(core)
    submitted(core, asked(18, of=1))
    run(core)
    assert recorder.prefills == [(1, 10, 0), (1, 16, 10), (1, 18, 16)]
    assert recorder.decodes == [(1, 16, 200, 16), (1, 20, 200, 18)]


def test_both_phases_are_sped_up_and_decode_twice() -> None:
    core = scheduler(time=PassTime(Recorder(), 2, 4))
    submitted(core, asked(4, 2))
    assert [core.run_pass().duration_ms for _ in range(2)] == [10 / 2 + 4 / 8, 4 / 8]


def test_tokens_of_a_prefill_worker_take_no_time() -> None:
    """MOCK-61"""
    core = scheduler(time=PassTime(Recorder()), worker_type="prefill")
    submitted(core, asked(4, 1))
    done = core.run_pass()
    assert (done.duration_ms, len(done.emitted)) == (10, 1)


def test_prompts_of_a_decode_worker_take_no_time() -> None:
    """MOCK-62"""
    core = scheduler(time=PassTime(Recorder()), worker_type="decode")
    submitted(core, asked(4, 2))
    assert core.run_pass().duration_ms == 4


def test_a_decode_worker_pays_for_the_prompts_it_is_told_to_pay_for() -> None:
    """Those that were handed over count neither among them nor in their mean."""
    model = Recorder()
    core = scheduler(time=PassTime(model), worker_type="decode")
    free, paying, reserved = asked(40, 2, of=1), asked(12, 2, of=2), asked(8, 2, of=3)
    core.reserve(reserved)
    core.activate(reserved)
    core.submit(free)
    core.submit(paying, pays_prompt=True)
    assert core.run_pass().duration_ms == 14
    assert core.run_pass().duration_ms == 4
    assert model.prefills == [(1, 12, 0)]


@pytest.mark.parametrize("pays", [True, False])
def test_a_decode_worker_pays_again_for_a_preempted_prompt_it_paid_for(pays: bool) -> None:
    model = Recorder()
    core = scheduler(5, time=PassTime(model), worker_type="decode", prefix_caching=False)
    first, second = asked(8, 9, of=1), asked(8, 9, of=2)
    core.submit(first)
    core.submit(second, pays_prompt=pays)
    while not core.is_idle:
        core.run_pass()
    assert second.preemptions > 0
    assert model.prefills == [(1, 8, 0)] * (1 + second.preemptions) * pays


def test_an_error_of_the_model_comes_through_and_everything_can_be_cancelled() -> None:
    """MOCK-59"""

    class Broken(Recorder):
        def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
            raise LookupError("no such point")

    core = scheduler(time=PassTime(Broken()))
    (sequence,) = submitted(core, asked(4))
    with pytest.raises(LookupError):
        core.run_pass()
    core.cancel(sequence)
    assert core.is_idle
    assert core.pool.active == 0


def test_a_burst_says_several_tokens_and_never_too_many() -> None:
    core = scheduler(burst=Burst((1.0, 1.0), Random(1)))
    (sequence,) = submitted(core, asked(5, 8))
    counts = []
    while not core.is_idle:
        done = core.run_pass()
        core.pool.check()
        counts += [each.new_tokens for each in done.emitted]
    assert counts == [3, 3, 2]
    assert sequence.emitted == 8


def test_the_tokens_of_a_burst_are_computed_in_the_next_pass() -> None:
    core = scheduler(burst=Burst((1.0, 1.0), Random(1)))
    submitted(core, asked(5, 8))
    assert [core.run_pass().scheduled_tokens for _ in range(3)] == [5, 3, 3]


def test_a_prefill_worker_has_no_bursts() -> None:
    core = scheduler(worker_type="prefill", burst=Burst((1.0, 1.0), Random(1)))
    submitted(core, asked(5, 2))
    assert [each.new_tokens for each in core.run_pass().emitted] == [1]
