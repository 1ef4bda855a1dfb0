"""Random submissions, cancellations, holds and releases: the core stays consistent and every request ends once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Items
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.mocker.scheduling import (
    BlockPool,
    Burst,
    NoEvictPolicy,
    Policy,
    Scheduler,
    Sequence,
    SequenceState,
    SglangPolicy,
    VllmPolicy,
)
from engines.mocker.scheduling.policies import UNBOUNDED
from pipeline.protocols.kv import KvEventData, KvRemoved, KvStored

BLOCK = 4
POLICIES = ("lifo", "fifo", "no_evict", "sglang", "lpm", "whim")


class Whim(VllmPolicy):
    """Makes every choice of a policy at random: the core may rely only on the protocol."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.prefill_first = rng.random() < 0.5
        self.prefill_tokens = rng.choice((9, 20, UNBOUNDED))

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        return min(remaining_tokens, left_tokens, self._rng.randrange(1, 9))

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:
        shuffled = self._rng.sample(waiting, len(waiting))
        waiting.clear()
        waiting.extend(shuffled)

    def victim(self, running: Items[Sequence]) -> Sequence:
        return self._rng.choice(running)


def make_policy(name: str, rng: Random) -> Policy:
    if name == "whim":
        return Whim(rng)
    if name == "no_evict":
        return NoEvictPolicy()
    if name in ("sglang", "lpm"):
        return SglangPolicy(
            page_size=BLOCK,
            schedule_policy="lpm" if name == "lpm" else "fifo",
            chunked_prefill_size=12,
            max_prefill_tokens=16,
            clip_max_new_tokens=6,
        )
    return VllmPolicy("fifo" if name == "fifo" else "lifo")


class Listener:
    """Follows the events as a router does: a block has a known name and is stored below a known one."""

    def __init__(self) -> None:
        self.cached: dict[int, int | None] = {}

    def apply(self, event: KvEventData) -> None:
        if isinstance(event, KvStored):
            parent = event.parent_hash
            for block in event.blocks:
                assert block.block_hash not in self.cached, "stored twice"
                assert parent is None or parent in self.cached, "stored below nothing"
                self.cached[block.block_hash] = parent
                parent = block.block_hash
        elif isinstance(event, KvRemoved):
            for name in event.block_hashes:
                del self.cached[name]
        else:
            self.cached.clear()


class Script:
    """A scheduler under random calls; checks every invariant after each."""

    def __init__(self, scheduler: Scheduler, listener: Listener, rng: Random, budget: int | None) -> None:
        self.scheduler = scheduler
        self.budget = UNBOUNDED if budget is None else budget
        self.listener = listener
        self.rng = rng
        self.sequences: list[Sequence] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.endings: Counter[Sequence] = Counter()

    def make(self) -> Sequence:
        rng = self.rng
        prompt = [*[rng.randrange(2)] * rng.randrange(9), *(rng.randrange(2) for _ in range(rng.randrange(1, 20)))]
        sequence = Sequence(prompt, rng.randrange(0, 14), block_size=BLOCK)
        self.outputs[sequence] = []
        self.sequences.append(sequence)
        return sequence

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        match rng.randrange(12):
            case 0 | 1 | 2:
                scheduler.submit(self.make(), holds_blocks=rng.random() < 0.15)
            case 3:
                sequence = self.make()
                if not scheduler.reserve(sequence):
                    self.end(sequence)
                elif rng.random() < 0.7:
                    scheduler.activate(sequence)
            case 4 if self.sequences:
                sequence = rng.choice(self.sequences)
                if self.endings[sequence] == 0:
                    self.end(sequence)
                scheduler.cancel(sequence)
            case 5 if self.sequences:
                scheduler.release(rng.choice(self.sequences))
            case _:
                self.run_step()
        self.check()

    def run_step(self) -> bool:
        done = self.scheduler.run_step()
        assert 0 <= done.scheduled_tokens <= self.budget
        assert done.duration_ms >= 0
        assert not set(done.preempted) & {*done.emitted, *done.finished, *done.completed_empty}
        for sequence in done.emitted:
            self.outputs[sequence] += sequence.new_token_ids()
        for sequence in (*done.finished, *done.rejected, *done.completed_empty):
            self.end(sequence)
        return done.did_nothing

    def end(self, sequence: Sequence) -> None:
        self.endings[sequence] += 1

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        pool.check()
        assert self.listener.cached.keys() == pool.names()
        held = Counter(block for sequence in self.sequences for block in sequence.blocks)
        assert len(held) == pool.active
        assert not any(sequence.blocks for sequence in scheduler.waiting if sequence.computed == 0)
        assert len(set(scheduler.running)) == scheduler.running_count
        assert not set(scheduler.running) & set(scheduler.waiting)
        for sequence in self.sequences:
            assert sequence.computed <= sequence.length <= sequence.end
            if sequence.stage is not SequenceState.RESERVED:
                assert sequence.computed <= sequence.room
            if sequence.stage in (SequenceState.NEW, SequenceState.ENDED):
                assert not sequence.blocks
            assert self.endings[sequence] <= 1

    def come_to_rest(self) -> None:
        """Held and reserved blocks may keep every request waiting, but not the scheduler busy."""
        for _ in range(3000):
            if self.scheduler.is_idle or self.run_step():
                return
            self.check()
        raise AssertionError("it goes round in circles")

    def finish(self) -> None:
        for sequence in self.sequences:
            if sequence.stage is SequenceState.RESERVED:
                self.scheduler.activate(sequence)
        for _ in range(3000):
            if self.scheduler.is_idle:
                break
            for sequence in self.sequences:
                self.scheduler.release(sequence)
            assert not self.run_step() or self.scheduler.is_idle, "it is stuck"
            self.check()
        for sequence in self.sequences:
            self.scheduler.release(sequence)
        assert self.scheduler.is_idle
        assert self.scheduler.pool.active == 0
        assert all(self.endings[sequence] == 1 for sequence in self.sequences)
        assert all(outputs == sequence.output_tokens() for sequence, outputs in self.outputs.items())


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(3, 14),
    budget=st.sampled_from([None, 5, 16]),
    max_seqs=st.sampled_from([None, 1, 3]),
    max_model_len=st.sampled_from([None, 12, 25]),
    caching=st.booleans(),
    chunked=st.booleans(),
    drafts=st.booleans(),
)
def test_every_script_keeps_the_core_sound_and_ends_everything_once(
    policy: str,
    seed: int,
    capacity: int,
    budget: int | None,
    max_seqs: int | None,
    max_model_len: int | None,
    caching: bool,
    chunked: bool,
    drafts: bool,
) -> None:
    listener, rng = Listener(), Random(seed)
    scheduler = Scheduler(
        BlockPool(capacity, listener.apply),
        block_size=BLOCK,
        policy=make_policy(policy, rng),
        max_seqs=max_seqs,
        max_batched_tokens=budget,
        max_model_len=max_model_len,
        prefix_caching=caching,
        chunked_prefill=chunked,
        burst=Burst((0.6, 0.5), rng) if drafts else None,
    )
    script = Script(scheduler, listener, rng, budget)
    for _ in range(60):
        script.step()
    script.come_to_rest()
    script.finish()
