"""What a pass is given to do, and what it did.

Queue: who is on an engine and does not run yet, and whether the next one may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from itertools import chain

from attrs import define, field

from pipeline import ContractViolation

from .blocks import BlockPool
from .policies import Load, Policy
from .sequence import Sequence, Stage


@define(eq=False)
class Pass:
    """What one pass did, and how long it takes.

    `emitted` handed on `new_tokens` tokens each. Each sequence comes once in its life in one of: `finished` (said its
    last token in this pass), `rejected` (could never be served; without chunks also, and even after some tokens, one
    that got in by a cached prefix, was pre-empted, and is too long now without it), `completed_empty` (has no token to
    say). `admitted` began, also once in their lives; `preempted` were sent back. `scheduled_tokens` were computed.
    """

    duration_ms: float = 0.0
    emitted: list[Sequence] = field(factory=list)
    finished: list[Sequence] = field(factory=list)
    rejected: list[Sequence] = field(factory=list)
    completed_empty: list[Sequence] = field(factory=list)
    admitted: list[Sequence] = field(factory=list)
    preempted: list[Sequence] = field(factory=list)
    scheduled_tokens: int = 0

    @property
    def did_nothing(self) -> bool:
        """Whether the next pass would do nothing either, unless the scheduler is asked for something in between."""
        return not (
            self.scheduled_tokens
            or self.emitted
            or self.admitted
            or self.preempted
            or self.rejected
            or self.finished
            or self.completed_empty
        )


class Plan:
    """The tokens a pass may still compute, and the prompts it computes already."""

    __slots__ = ("batch", "budget", "cached_tokens", "parts", "paying", "prefill_left", "prompt_tokens")

    def __init__(self, budget: int, prefill_tokens: int) -> None:
        self.budget = budget
        self.prefill_left = prefill_tokens
        self.batch = 0
        """Sequences with prompt tokens in this pass."""
        self.paying = 0
        """Those of them whose prompts take time, and sum up to the two figures below."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.parts: dict[Sequence, tuple[int, int, int]] = {}
        """Tokens, prompt tokens, and prompt tokens computed before, where it is more than one token of output."""

    def add(self, sequence: Sequence, before: int, tokens: int) -> None:
        """The sequence gets so many tokens, after so many computed before."""
        prompt_before = min(before, sequence.prompt_tokens)
        prompt_now = min(before + tokens, sequence.prompt_tokens) - prompt_before
        self.parts[sequence] = tokens, prompt_now, prompt_before
        self._count(1, sequence, tokens, prompt_now, prompt_before)

    def take_back(self, sequence: Sequence) -> None:
        """The sequence gets nothing after all."""
        part = self.parts.pop(sequence, None)
        if part is not None:
            self._count(-1, sequence, *part)
        elif sequence.computed == sequence.length:
            # Single tokens of output are not written down; a sequence that has got its own lacks nothing.
            self.budget += 1

    def _count(self, sign: int, sequence: Sequence, tokens: int, prompt_now: int, prompt_before: int) -> None:
        self.budget -= sign * tokens
        if not prompt_now:
            return
        self.prefill_left -= sign * prompt_now
        self.batch += sign
        if sequence.pays_prompt:
            self.paying += sign
            self.prompt_tokens += sign * (prompt_before + prompt_now)
            self.cached_tokens += sign * prompt_before


class Queue:
    """Three places to wait in, and the questions an admission asks.

    `waiting` want blocks and tokens, `reserved` have blocks for prompts that somebody else computes, `ready` those
    whose prompts have come.
    """

    def __init__(
        self, pool: BlockPool, policy: Policy, *, block_size: int, max_model_len: int, prefix_caching: bool
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.ready: deque[Sequence] = deque()
        self.reserved: dict[Sequence, None] = {}
        self._pool = pool
        self._policy = policy
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._caching = prefix_caching
        self._asked: tuple[Sequence | None, int, int] = (None, 0, 0)
        """The last lookup: whose prefix, of how many blocks, in which state of the pool."""
        self._found: tuple[list[int], int] = ([], 0)
        """The answer to it."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready) + len(self.reserved)

    def begin(self, sequence: Sequence, stage: Stage) -> None:
        """Takes a new sequence on, its output cut to what can be had here. Raises ContractViolation for any other."""
        if sequence.stage is not Stage.NEW:
            raise ContractViolation(f"a sequence that is {sequence.stage.name.lower()} cannot begin")
        if sequence.block_size != self._block_size:
            raise ContractViolation(f"blocks are of {self._block_size} tokens here, not {sequence.block_size}")
        end = self.end_of(sequence)
        if end is not None:
            sequence.end = end
        sequence.stage = stage

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out that is here."""
        if sequence in self.reserved:
            del self.reserved[sequence]
        else:
            (self.ready if sequence in self.ready else self.waiting).remove(sequence)

    def end_of(self, sequence: Sequence) -> int | None:
        """The length at which the sequence ends here; None if it cannot begin."""
        if sequence.prompt_tokens >= self._max_model_len:
            return None
        end = self._policy.output_end(sequence, self._pool.capacity * self._block_size)
        return None if end is None else min(end, self._max_model_len)

    def match(self, sequence: Sequence, blocks: int) -> tuple[list[int], int]:
        """The cached prefix of a sequence, of at most so many blocks, and how many of them others hold.

        Who waits at the head asks in every pass, so the last answer is kept while it holds.
        """
        if not self._caching:
            return [], 0
        asked = sequence, blocks, self._pool.changes
        if asked != self._asked:
            found = self._pool.match(sequence.names(blocks))
            self._asked, self._found = asked, (found, self._pool.count_active(found))
        return self._found

    def fits(self, sequence: Sequence, shared_blocks: int, running: Items[Sequence]) -> bool:
        """Whether the policy lets the sequence have its blocks now."""
        return self._policy.fits(sequence, shared_blocks, Load(self._pool, running, chain(self.reserved, self.ready)))

    def order(self) -> None:
        """Puts first who is next."""
        self._policy.order(self.waiting, self._pool)
