"""The policies of the simulated engines: which request is admitted, which is preempted, what a pass computes first."""

from __future__ import annotations

from typing import Any

import pytest

from engines.mocker import MockEngineArgs, SglangArgs
from engines.mocker.build import make_scheduler
from engines.mocker.scheduling import (
    BlockPool,
    NoEvictPolicy,
    Policy,
    Scheduler,
    Sequence,
    SglangPolicy,
    VllmPolicy,
)
from engines.mocker.scheduling.policies import LONGEST_PREFIX_WAITING, Load
from pipeline import ContractViolation
from tests.engines.mocker.scheduling.worlds import BLOCK, scheduler, sequence_of, submitted


def no_evict(capacity: int, **options: Any) -> Scheduler:
    return scheduler(capacity, policy=NoEvictPolicy(), **options)


def finish(core: Scheduler, passes: int = 500) -> list[Sequence]:
    finished: list[Sequence] = []
    for _ in range(passes):
        if core.is_idle:
            return finished
        finished += core.run_step().finished
        core.pool.check()
    raise AssertionError("it does not end")


def test_no_evict_admits_what_fits_to_its_end_only() -> None:
    core = no_evict(6)
    first, second = submitted(core, sequence_of(8, 8, of=1), sequence_of(8, 8, of=2))
    core.run_step()
    assert (core.running, core.waiting) == ((first,), (second,))


def test_vllm_admits_what_fits_now() -> None:
    core = scheduler(6)
    both = submitted(core, sequence_of(8, 8, of=1), sequence_of(8, 8, of=2))
    core.run_step()
    assert core.running == both


def test_no_evict_never_preempts() -> None:
    core = no_evict(4)
    sequences = submitted(core, sequence_of(4, 12, of=1), sequence_of(4, 12, of=2), sequence_of(2, 3, of=3))
    assert finish(core) == list(sequences)
    assert core.preemptions == 0


def test_no_evict_admits_as_many_as_the_hardware_does() -> None:
    """The figures are those of a run of the real engine: 7,319 blocks, 253 for each request to its end."""
    core = Scheduler(
        BlockPool(7319),
        block_size=32,
        policy=NoEvictPolicy(),
        max_seqs=256,
        max_batched_tokens=8192,
        prefix_caching=False,
    )
    for n in range(64):
        core.submit(Sequence(range(n * 2000, n * 2000 + 1096), 7000, block_size=32))
    for _ in range(40):
        core.run_step()
    assert (core.running_count, core.waiting_count, core.preemptions) == (28, 36, 0)


def test_no_evict_cuts_an_output_to_the_cache() -> None:
    core = no_evict(4)
    (sequence,) = submitted(core, sequence_of(4, 40))
    assert finish(core) == [sequence]
    assert sequence.emitted == 12


@pytest.mark.parametrize("tokens", [16, 17])
def test_no_evict_rejects_a_prompt_that_leaves_no_room_for_output(tokens: int) -> None:
    core = no_evict(4)
    (sequence,) = submitted(core, sequence_of(tokens))
    assert core.run_step().rejected == [sequence]


def test_no_evict_counts_only_cached_blocks_that_are_held() -> None:
    core = no_evict(8)
    holder, seeder, again = submitted(core, sequence_of(4, 12, of=1), sequence_of(8, 4, of=2), sequence_of(8, 12, of=2))
    while seeder.emitted < 4:
        core.run_step()
    core.run_step()
    assert (core.running, core.waiting) == ((holder,), (again,)), "it needs 5 blocks, of which 4 are not promised"
    finish(core)
    assert again.cached_tokens == 4


def test_no_evict_keeps_room_for_reserved_outputs_too() -> None:
    core = no_evict(6)
    assert core.reserve(sequence_of(4, 12, of=1))
    (other,) = submitted(core, sequence_of(4, 8, of=2))
    core.run_step()
    assert core.waiting == (other,)


def test_a_promise_that_is_broken_is_an_error_of_the_program() -> None:
    class Careless(NoEvictPolicy):
        def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
            return True

    core = scheduler(2, policy=Careless())
    submitted(core, sequence_of(4, 4, of=1), sequence_of(4, 4, of=2))
    with pytest.raises(ContractViolation):
        finish(core)


def test_two_that_preempt_each_other_by_turns_both_end() -> None:
    """With fifo, each request restarts from its prompt; admitting it as soon as the prompt fits would never end."""
    core = scheduler(10, policy=VllmPolicy("fifo"))
    both = submitted(core, sequence_of(16, 17, of=1), sequence_of(16, 17, of=2))
    assert set(finish(core)) == set(both)
    assert core.preemptions >= 1


def sglang(capacity: int = 100, max_seqs: int | None = None, **options: Any) -> Scheduler:
    policy = SglangPolicy(page_size=BLOCK, **options)
    return scheduler(capacity, policy=policy, max_seqs=max_seqs)


def test_sglang_computes_prompts_before_outputs() -> None:
    core = sglang()
    (first,) = submitted(core, sequence_of(8, 5, of=1))
    core.run_step()
    (second,) = submitted(core, sequence_of(8, 5, of=2))
    assert core.run_step().emitted == [second]
    assert core.run_step().emitted == [first, second]


def test_sglang_lets_a_long_prompt_starve_outputs() -> None:
    core = sglang(chunked_prefill_size=8)
    (first,) = submitted(core, sequence_of(8, 9, of=1))
    core.run_step()
    (long,) = submitted(core, sequence_of(20, 5, of=2))
    passes = [core.run_step() for _ in range(4)]
    assert [done.scheduled_tokens for done in passes] == [8, 8, 4, 2]
    assert [done.emitted for done in passes] == [[], [], [long], [first, long]]


def test_sglang_has_a_cap_of_its_own_on_prompt_tokens() -> None:
    core = sglang(max_prefill_tokens=12)
    submitted(core, sequence_of(8, of=1), sequence_of(8, of=2))
    assert [core.run_step().scheduled_tokens for _ in range(2)] == [8, 8], "a prompt that fits a chunk is not split"


def test_sglang_splits_at_page_boundaries() -> None:
    core = sglang(max_prefill_tokens=10)
    submitted(core, sequence_of(25))
    assert [core.run_step().scheduled_tokens for _ in range(3)] == [8, 8, 9]


def test_sglang_reuses_whole_pages() -> None:
    core = sglang()
    submitted(core, sequence_of(9))
    finish(core)
    (longer,) = submitted(core, sequence_of(12))
    finish(core)
    assert longer.cached_tokens == 8


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    core = sglang(schedule_policy="lpm", max_seqs=1)
    submitted(core, sequence_of(20, of=1))
    submitted(core, sequence_of(10, of=2))
    finish(core)
    none, some, most = submitted(core, sequence_of(8, of=3), sequence_of(10, of=2), sequence_of(20, of=1))
    assert finish(core) == [most, some, none]


def test_fifo_and_a_long_queue_keep_their_order() -> None:
    fifo = sglang(schedule_policy="fcfs", max_seqs=1)
    submitted(fifo, sequence_of(20, of=1))
    finish(fifo)
    none, most = submitted(fifo, sequence_of(8, of=3), sequence_of(20, of=1))
    assert finish(fifo) == [none, most]
    crowded = sglang(schedule_policy="lpm", max_seqs=1)
    submitted(crowded, sequence_of(20, of=1))
    finish(crowded)
    queue = [sequence_of(4, of=n) for n in range(2, 2 + LONGEST_PREFIX_WAITING)]
    submitted(crowded, *queue, sequence_of(20, of=1))
    assert crowded.run_step().finished == [queue[0]]


@pytest.mark.parametrize(("clip", "admitted"), [(4096, 1), (8, 2)])
def test_sglang_keeps_room_for_outputs_up_to_a_length(clip: int, admitted: int) -> None:
    core = sglang(20, clip_max_new_tokens=clip)
    submitted(core, sequence_of(8, 60, of=1))
    core.run_step()
    submitted(core, sequence_of(8, 60, of=2))
    core.run_step()
    assert core.running_count == admitted


def test_sglang_alone_admits_what_its_cache_can_hold() -> None:
    core = sglang(4)
    (sequence,) = submitted(core, sequence_of(12, 5))
    assert finish(core) == [sequence]
    assert sequence.emitted == 5


def test_sglang_preempts_the_request_with_the_fewest_output_tokens() -> None:
    core = sglang(6, clip_max_new_tokens=1)
    first, second = submitted(core, sequence_of(8, 9, of=1), sequence_of(8, 9, of=2))
    core.run_step()
    core.run_step()
    assert core.pool.active == 6
    first.length -= 1  # it has emitted one token less
    first.computed -= 1
    while not (done := core.run_step()).preempted:
        pass
    assert done.preempted == [first]
    assert second.stage.name == "RUNNING"


def test_a_request_activated_and_preempted_in_one_pass_gives_no_token_back() -> None:
    core = sglang(6, clip_max_new_tokens=1)
    (running,) = submitted(core, sequence_of(7, 9, of=1))
    core.run_step()
    reserved = sequence_of(12, 5, of=2)
    assert core.reserve(reserved)
    while running.length < 13:
        core.run_step()
    core.activate(reserved)
    done = core.run_step()
    assert (done.preempted, done.emitted, done.scheduled_tokens) == ([reserved], [running], 1)


@pytest.mark.parametrize("policy", [VllmPolicy("lifo"), VllmPolicy("fifo"), SglangPolicy(page_size=BLOCK)])
def test_a_request_preempted_for_reserved_blocks_waits_for_room_for_its_whole_output(policy: Policy) -> None:
    """With room for its prompt only, it would start over in every pass, without end where time stands still."""
    core = scheduler(4, policy=policy)
    (running,) = submitted(core, sequence_of(4, 12, of=1))
    reserved = sequence_of(4, 1, of=2)
    assert core.reserve(reserved)
    while not core.run_step().preempted:
        pass
    assert running.emitted_length == 13
    assert core.pool.available == 3
    assert core.run_step().did_nothing
    core.cancel(reserved)
    assert finish(core) == [running]


def test_a_request_preempted_for_a_prompt_gets_no_part_of_that_pass() -> None:
    class PromptsFirst(VllmPolicy):
        prefill_first = True

        def part(self, remaining_tokens: int, left_tokens: int) -> int:
            return min(remaining_tokens, BLOCK)

    core = scheduler(5, policy=PromptsFirst())
    first, second = submitted(core, sequence_of(16, of=1), sequence_of(8, of=2))
    core.run_step()
    assert core.running_count == 2
    assert core.reserve(sequence_of(12, of=3))
    done = core.run_step()
    assert (done.preempted, core.running, core.waiting) == ([second], (first,), (second,))
    assert (second.blocks, second.computed, done.scheduled_tokens) == ([], 0, BLOCK)


def test_sglang_admits_no_request_in_a_pass_that_preempted_a_prompt() -> None:
    core = sglang(14, schedule_policy="lpm", chunked_prefill_size=8, clip_max_new_tokens=1)
    submitted(core, sequence_of(13, 50, of=1))
    for _ in range(2):
        core.run_step()
    (long,) = submitted(core, sequence_of(20, of=2))
    core.run_step()
    assert core.reserve(sequence_of(28, of=3))
    (cached,) = submitted(core, sequence_of(13, of=1))
    done = core.run_step()
    assert (done.preempted, done.admitted) == ([long], [])
    assert core.run_step().admitted == [cached]


def test_sglang_keeps_less_room_from_pass_to_pass_and_all_of_it_after_a_preemption() -> None:
    policy = SglangPolicy(page_size=BLOCK, schedule_conservativeness=0.5)
    assert policy.ratio == pytest.approx(0.35)
    for _ in range(300):
        policy.after_step(preempted=False)
    assert policy.ratio == pytest.approx((0.35 + 0.35 * 0.14) / 2)
    for _ in range(400):
        policy.after_step(preempted=False)
    assert policy.ratio == pytest.approx(0.35 * 0.14)
    policy.after_step(preempted=True)
    assert policy.ratio == pytest.approx(0.35, abs=0.001)


def test_the_arguments_of_sglang_reach_its_policy() -> None:
    args = MockEngineArgs(
        engine_type="sglang", sglang=SglangArgs(page_size=4, chunked_prefill_size=8), max_num_batched_tokens=1
    )
    core = make_scheduler(args)
    submitted(core, sequence_of(20))
    assert [core.run_step().scheduled_tokens for _ in range(3)] == [8, 8, 4]
