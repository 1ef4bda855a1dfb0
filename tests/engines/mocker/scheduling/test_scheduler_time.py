"""Scheduler: the time of a pass, and bursts of several tokens."""

from __future__ import annotations

from random import Random

import pytest

from engines.mocker.scheduling import ROLES, Burst, VllmPolicy
from engines.mocker.scheduling.step import StepPlan
from engines.mocker.timing import StepTime
from tests.engines.mocker.scheduling.worlds import BLOCK, MODEL, RecordingModel, run, scheduler, sequence_of, submitted


def test_a_token_within_a_block_is_given_back_as_well() -> None:
    core = scheduler(4, policy=VllmPolicy("fifo"))
    first, second = submitted(core, sequence_of(5, 9, of=1), sequence_of(7, 9, of=2))
    for _ in range(2):
        core.run_step()
    done = core.run_step()
    assert (done.preempted, done.emitted, done.scheduled_tokens) == ([first], [second], 1)


def test_what_a_plan_takes_back_it_has_never_given() -> None:
    plan = StepPlan(100, 50)
    kept, dropped = sequence_of(20), sequence_of(30, 5)
    plan.add(kept, 5, 10)
    plan.add(dropped, 8, 22)
    assert (plan.batch, plan.prompt_tokens, plan.cached_tokens) == (2, 45, 13)
    plan.take_back(dropped)
    assert (plan.budget, plan.prefill_left) == (90, 40)
    assert (plan.batch, plan.prompt_tokens, plan.cached_tokens) == (1, 15, 5)
    plan.take_back(dropped)
    assert plan.budget == 90, "it lacks tokens, so it has got none"


def test_tokens_of_output_are_no_part_of_a_prompt() -> None:
    plan = StepPlan(100, 50)
    plan.add(sequence_of(20, 9), 20, 3)
    assert (plan.budget, plan.prefill_left, plan.batch) == (97, 50, 0)


def test_a_pass_takes_the_time_of_its_prompts_and_of_its_tokens() -> None:
    core = scheduler(100)
    submitted(core, sequence_of(10, 5, of=1), sequence_of(13, 5, of=2))
    prompts = MODEL.prefill_ms(2, 23 // 2, 0)
    tokens = MODEL.decode_ms(2, 7 * BLOCK, 100 * BLOCK, 11)
    assert core.run_step().duration_ms == pytest.approx(prompts + tokens)
    assert core.run_step().duration_ms == pytest.approx(MODEL.decode_ms(2, 7 * BLOCK, 100 * BLOCK, 12))


def test_the_timing_model_gets_the_prompts_so_far_and_their_computed_part() -> None:
    recorder = RecordingModel()
    core = scheduler(50, time=StepTime(recorder), max_batched_tokens=10)
    submitted(core, sequence_of(16, of=1))
    run(core)
    submitted(core, sequence_of(18, of=1))
    run(core)
    assert recorder.prefills == [(1, 10, 0), (1, 16, 10), (1, 18, 16)]
    assert recorder.decodes == [(1, 16, 200, 16), (1, 20, 200, 18)]


def test_both_phases_are_sped_up_and_decode_twice() -> None:
    core = scheduler(time=StepTime(RecordingModel(), 2, 4))
    submitted(core, sequence_of(4, 2))
    assert [core.run_step().duration_ms for _ in range(2)] == [10 / 2 + 4 / 8, 4 / 8]


def test_tokens_of_a_prefill_worker_take_no_time() -> None:
    core = scheduler(time=StepTime(RecordingModel()), role=ROLES["prefill"])
    submitted(core, sequence_of(4, 1))
    done = core.run_step()
    assert (done.duration_ms, len(done.emitted)) == (10, 1)


def test_prompts_of_a_decode_worker_take_no_time() -> None:
    core = scheduler(time=StepTime(RecordingModel()), role=ROLES["decode"])
    submitted(core, sequence_of(4, 2))
    assert core.run_step().duration_ms == 4


def test_a_decode_worker_pays_for_the_prompts_marked_for_payment() -> None:
    """Prompts that were handed over count neither in the batch nor in its mean."""
    model = RecordingModel()
    core = scheduler(time=StepTime(model), role=ROLES["decode"])
    free, paying, reserved = sequence_of(40, 2, of=1), sequence_of(12, 2, of=2), sequence_of(8, 2, of=3)
    core.reserve(reserved)
    core.activate(reserved)
    core.submit(free)
    core.submit(paying, pays_prompt=True)
    assert core.run_step().duration_ms == 14
    assert core.run_step().duration_ms == 4
    assert model.prefills == [(1, 12, 0)]


@pytest.mark.parametrize("pays", [True, False])
def test_a_decode_worker_pays_again_for_a_preempted_prompt_it_paid_for(pays: bool) -> None:
    model = RecordingModel()
    core = scheduler(5, time=StepTime(model), role=ROLES["decode"], prefix_caching=False)
    first, second = sequence_of(8, 9, of=1), sequence_of(8, 9, of=2)
    core.submit(first)
    core.submit(second, pays_prompt=pays)
    while not core.is_idle:
        core.run_step()
    assert second.preemptions > 0
    assert model.prefills == [(1, 8, 0)] * (1 + second.preemptions) * pays


def test_an_error_of_the_model_comes_through_and_everything_can_be_cancelled() -> None:

    class Broken(RecordingModel):
        def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
            raise LookupError("no such point")

    core = scheduler(time=StepTime(Broken()))
    (sequence,) = submitted(core, sequence_of(4))
    with pytest.raises(LookupError):
        core.run_step()
    core.cancel(sequence)
    assert core.is_idle
    assert core.pool.active == 0


def test_a_burst_emits_several_tokens_and_never_too_many() -> None:
    core = scheduler(burst=Burst((1.0, 1.0), Random(1)))
    (sequence,) = submitted(core, sequence_of(5, 8))
    counts = []
    while not core.is_idle:
        done = core.run_step()
        core.pool.check()
        counts += [each.new_tokens for each in done.emitted]
    assert counts == [3, 3, 2]
    assert sequence.emitted == 8


def test_the_tokens_of_a_burst_are_computed_in_the_next_pass() -> None:
    core = scheduler(burst=Burst((1.0, 1.0), Random(1)))
    submitted(core, sequence_of(5, 8))
    assert [core.run_step().scheduled_tokens for _ in range(3)] == [5, 3, 3]


def test_a_prefill_worker_has_no_bursts() -> None:
    core = scheduler(role=ROLES["prefill"], burst=Burst((1.0, 1.0), Random(1)))
    submitted(core, sequence_of(5, 2))
    assert [each.new_tokens for each in core.run_step().emitted] == [1]
