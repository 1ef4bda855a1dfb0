"""Scheduler against a slow model that follows the rules literally: both make the same passes under random input."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from random import Random
from typing import Any

import pytest
from attrs import define, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker.scheduling import ROLES, BlockPool, Burst, NoEvictPolicy, Scheduler, Sequence, VllmPolicy
from engines.mocker.tokens import Output

BLOCK = 4
RATES = (0.6, 0.5)
POLICIES: dict[str, Callable[[], Any]] = {
    "lifo": lambda: VllmPolicy("lifo"),
    "fifo": lambda: VllmPolicy("fifo"),
    "no_evict": NoEvictPolicy,
}


@frozen
class Rules:
    """The settings of a scheduler; None: no limit."""

    policy: str
    capacity: int
    max_tokens: int | None
    max_seqs: int | None
    max_model_len: int | None
    caching: bool
    chunked: bool
    drafts: bool
    worker_type: str

    @property
    def budget(self) -> int:
        return 10**9 if self.max_tokens is None else self.max_tokens


@define(eq=False)
class Block:
    """The name of a block is the tuple of all tokens up to its end."""

    name: tuple[int, ...] | None = None
    holders: int = 0


@define(eq=False)
class Cache:
    """Blocks in lists; each query walks through all of them."""

    capacity: int
    used: list[Block] = field(factory=list)
    """Blocks that are held or named, in the order of their names."""
    idle: list[Block] = field(factory=list)
    """Named blocks without a holder; the one released longest ago first."""

    @property
    def available(self) -> int:
        return self.capacity - len([block for block in self.used if block.holders])

    def find(self, names: list[tuple[int, ...]]) -> list[Block]:
        found: list[Block] = []
        for name in names:
            same = [block for block in self.used if block.name == name]
            if not same:
                break
            found.append(same[0])
        return found

    def hold(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.holders += 1
        self.idle = [block for block in self.idle if not block.holders]

    def take(self, count: int) -> list[Block] | None:
        if count > self.available:
            return None
        while len(self.used) + count > self.capacity:
            self.used.remove(self.idle.pop(0))
        taken = [Block(holders=1) for _ in range(count)]
        self.used += taken
        return taken

    def name(self, block: Block, name: tuple[int, ...]) -> None:
        block.name = name
        self.used.remove(block)
        self.used.append(block)

    def let_go(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.holders -= 1
            if block.holders:
                continue
            if block.name is None:
                self.used.remove(block)
            else:
                self.idle.append(block)


@define(eq=False)
class Request:
    number: int
    prompt: list[int]
    output: list[int]
    end: int
    length: int
    computed: int = 0
    sent: int = 0
    cached: int | None = None
    was_preempted: bool = False
    blocks: list[Block] = field(factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@define
class PassRecord:
    """A pass, for comparison: requests by number, `emitted` with their token counts."""

    duration_ms: float = 0.0
    scheduled_tokens: int = 0
    emitted: list[tuple[int, int]] = field(factory=list)
    finished: list[int] = field(factory=list)
    rejected: list[int] = field(factory=list)
    completed_empty: list[int] = field(factory=list)
    admitted: list[tuple[int, int | None]] = field(factory=list)
    """The number and the cached tokens of each admitted request."""
    preempted: list[int] = field(factory=list)


def blocks_of(tokens: int) -> int:
    return ceil(tokens / BLOCK)


class Slow:
    """The rules of the unified pass, one after the other."""

    def __init__(self, rules: Rules, rng: Random) -> None:
        self.rules = rules
        self.cache = Cache(rules.capacity)
        self.burst = Burst(RATES, rng) if rules.drafts and rules.worker_type != "prefill" else None
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def submit(self, number: int, prompt: list[int], output: list[int]) -> None:
        ends = [len(prompt) + len(output)]
        if self.rules.max_model_len is not None:
            ends.append(self.rules.max_model_len)
        ends.append(self.rules.capacity * BLOCK + (self.rules.policy != "no_evict"))
        self.waiting.append(Request(number, prompt, output, max(min(ends), len(prompt)), len(prompt)))

    def cancel(self, number: int) -> None:
        for place in (self.running, self.waiting):
            for request in [one for one in place if one.number == number]:
                place.remove(request)
                self.cache.let_go(request.blocks)

    def run_step(self) -> PassRecord:
        self.record, self.budget = PassRecord(), self.rules.budget
        self.parts: dict[int, tuple[int, int, int]] = {}
        """For each number: tokens, and prompt tokens before and after."""
        for request in self.running.copy():
            if request in self.running:
                self.advance(request)
        if not self.record.preempted:
            self.admit()
        self.record.scheduled_tokens = self.rules.budget - self.budget
        self.add_prefill_time()
        self.emit_tokens()
        return self.record

    def tokens_for(self, request: Request, before: int) -> int:
        lacking = request.length - before
        if before < len(request.prompt) and not self.rules.chunked and lacking > self.budget:
            return 0
        return min(lacking, self.budget)

    def advance(self, request: Request) -> None:
        tokens = self.tokens_for(request, request.computed)
        if not tokens:
            return
        while (taken := self.cache.take(self.missing(request, request.computed + tokens))) is None:
            victim = self.running[-1 if self.rules.policy == "lifo" else 0]
            self.preempt(victim)
            if victim is request:
                return
        request.blocks += taken
        self.compute(request, tokens)

    def missing(self, request: Request, tokens: int) -> int:
        return max(0, blocks_of(tokens) - len(request.blocks))

    def preempt(self, victim: Request) -> None:
        assert self.rules.policy != "no_evict"
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.budget += self.parts.pop(victim.number, (0, 0, 0))[0]
        self.cache.let_go(victim.blocks)
        victim.blocks, victim.computed, victim.length, victim.was_preempted = [], 0, len(victim.prompt), True
        self.record.preempted.append(victim.number)

    def compute(self, request: Request, tokens: int) -> None:
        before, after = request.computed, request.computed + tokens
        self.budget -= tokens
        prompt = len(request.prompt)
        self.parts[request.number] = tokens, min(before, prompt), min(after, prompt)
        request.computed = after
        if self.rules.caching:
            for index in range(before // BLOCK, after // BLOCK):
                self.cache.name(request.blocks[index], tuple(request.tokens[: (index + 1) * BLOCK]))

    def admit(self) -> None:
        most = 10**9 if self.rules.max_seqs is None else self.rules.max_seqs
        while self.waiting and len(self.running) < most:
            head = self.waiting[0]
            if self.never_fits(head):
                self.record.rejected.append(self.waiting.pop(0).number)
                continue
            # The last token is computed even if all are cached, unless no output follows it.
            reusable = (head.length if head.length == head.end else head.length - 1) // BLOCK
            names = [tuple(head.tokens[: (index + 1) * BLOCK]) for index in range(reusable)]
            found = self.cache.find(names) if self.rules.caching else []
            before = len(found) * BLOCK
            tokens = self.tokens_for(head, before)
            if self.fits(head, found) and (tokens or before == head.length):
                self.start(head, found, tokens)
            elif not self.running and not self.rules.chunked and head.length - before > self.rules.budget:
                self.record.rejected.append(self.waiting.pop(0).number)
            else:
                return

    def never_fits(self, request: Request) -> bool:
        prompt, model, room = len(request.prompt), self.rules.max_model_len, self.rules.capacity * BLOCK
        return (model is not None and prompt >= model) or prompt > room - (self.rules.policy == "no_evict")

    def fits(self, request: Request, found: list[Block]) -> bool:
        shared = len([block for block in found if block.holders])
        available, needed = self.cache.available, request.length
        if self.rules.policy == "no_evict":
            needed = request.end
            available -= sum(self.missing(other, other.end) for other in self.running)
        elif self.rules.policy == "fifo" and request.was_preempted:
            needed = max(request.end - 1, request.length)
        return blocks_of(needed) - shared <= available

    def start(self, request: Request, found: list[Block], tokens: int) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        self.cache.hold(found)
        request.computed = len(found) * BLOCK
        taken = self.cache.take(blocks_of(request.computed + tokens) - len(found))
        assert taken is not None
        request.blocks = found + taken
        if request.cached is None:
            request.cached = request.computed
            self.record.admitted.append((request.number, request.cached))
        self.compute(request, tokens)

    def add_prefill_time(self) -> None:
        prompts = [(before, after) for _, before, after in self.parts.values() if after > before]
        if not prompts or self.rules.worker_type == "decode":
            return
        batch = len(prompts)
        tokens = batch * (sum(after for _, after in prompts) // batch - sum(before for before, _ in prompts) // batch)
        if tokens > 0:
            self.record.duration_ms += 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142

    def emit_tokens(self) -> None:
        ready = [one for one in self.running if one.computed == one.length]
        speaking = [one for one in ready if one.length < one.end]
        if speaking and self.rules.worker_type != "prefill":
            share = (self.cache.capacity - self.cache.available) / self.cache.capacity
            self.record.duration_ms += max(1, -25.74 * share**2 + 54.01 * share + 5.74)
        self.record.completed_empty = [one.number for one in ready if one not in speaking]
        for request in speaking:
            left = request.end - request.length
            request.length += 1 if self.burst is None else self.burst.draw(left)
            fresh = request.length - len(request.prompt) - request.sent
            if fresh > 0:
                request.sent += fresh
                self.record.emitted.append((request.number, fresh))
            if request.length == request.end:
                self.record.finished.append(request.number)
        for number in (*self.record.completed_empty, *self.record.finished):
            self.cancel(number)


def make(rules: Rules, rng: Random) -> Scheduler:
    return Scheduler(
        BlockPool(rules.capacity),
        block_size=BLOCK,
        policy=POLICIES[rules.policy](),
        role=ROLES[rules.worker_type],
        max_seqs=rules.max_seqs,
        max_batched_tokens=rules.max_tokens,
        max_model_len=rules.max_model_len,
        prefix_caching=rules.caching,
        chunked_prefill=rules.chunked,
        burst=Burst(RATES, rng) if rules.drafts else None,
    )


def pass_of(scheduler: Scheduler) -> PassRecord:
    done = scheduler.run_step()
    return PassRecord(
        done.duration_ms,
        done.scheduled_tokens,
        [(one.owner, one.new_tokens) for one in done.emitted],
        [one.owner for one in done.finished],
        [one.owner for one in done.rejected],
        [one.owner for one in done.completed_empty],
        [(one.owner, one.cached_tokens) for one in done.admitted],
        [one.owner for one in done.preempted],
    )


class Both:
    """Both schedulers under the same input; the tokens of each request are kept."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.rng = Random(seed)
        self.fast, self.slow = make(rules, Random(seed)), Slow(rules, Random(seed))
        self.sequences: dict[int, Sequence] = {}
        self.sent: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}

    def submit(self) -> None:
        rng, number = self.rng, len(self.sequences)
        prompt = [*[rng.randrange(2)] * rng.randrange(9), *(rng.randrange(2) for _ in range(rng.randrange(1, 16)))]
        output = [rng.randrange(2) for _ in range(rng.randrange(14))]
        sequence = Sequence(prompt, len(output), block_size=BLOCK, owner=number, output=Output(planned=output))
        self.sequences[number], self.sent[number], self.outputs[number] = sequence, [], output
        self.fast.submit(sequence)
        self.slow.submit(number, prompt, output)

    def cancel(self) -> None:
        if self.sequences:
            number = self.rng.randrange(len(self.sequences))
            self.fast.cancel(self.sequences[number])
            self.slow.cancel(number)

    def run_step(self) -> None:
        got, expected = pass_of(self.fast), self.slow.run_step()
        assert got.duration_ms == pytest.approx(expected.duration_ms)
        got.duration_ms = expected.duration_ms
        assert got == expected
        for number, _ in got.emitted:
            self.sent[number] += self.sequences[number].new_token_ids()
            assert self.sent[number] == self.outputs[number][: len(self.sent[number])]
        for number in got.finished:
            assert len(self.sent[number]) == self.sequences[number].end - self.sequences[number].prompt_tokens
        pool, cache = self.fast.pool, self.slow.cache
        assert (pool.available, pool.inactive) == (cache.available, len(cache.idle))
        assert len(pool.names()) == len({block.name for block in cache.used if block.name is not None})


@pytest.mark.parametrize("policy", POLICIES)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(3, 9),
    max_tokens=st.sampled_from([None, 1, 5, 16]),
    max_seqs=st.sampled_from([None, 1, 3]),
    max_model_len=st.sampled_from([None, 12, 25]),
    caching=st.booleans(),
    chunked=st.booleans(),
    drafts=st.booleans(),
    worker_type=st.sampled_from(["aggregated", "prefill", "decode"]),
)
def test_every_pass_is_what_the_rules_make_of_it(policy: str, seed: int, **options: Any) -> None:
    """Compares admissions, cached tokens, preemptions, tokens, endings, time, and the final content of the cache."""
    both = Both(Rules(policy, **options), seed)
    for _ in range(40):
        both.rng.choices((both.submit, both.cancel, both.run_step), (6, 1, 15))[0]()
    for _ in range(3000):
        if both.fast.is_idle:
            break
        both.run_step()
    assert both.fast.is_idle
    assert not both.slow.running
    assert not both.slow.waiting
