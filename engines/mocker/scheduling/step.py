"""One forward pass: what of it takes time (Role), its budget (StepPlan), its outcome (StepResult), and the sequences
before it (Queue)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from itertools import chain

from attrs import define, field, frozen

from pipeline import ContractViolation

from ...block_pool import BlockPool
from .policies import Load, Policy
from .sequence import Sequence, SequenceState


@frozen
class Role:
    """What takes time on a worker, by its type."""

    charges_prompts: bool = True
    """Whether computing a prompt takes time; if not, only of requests submitted with `pays_prompt`."""
    charges_tokens: bool = True
    """Whether generating tokens takes time, several of them at once included."""


ROLES = {"aggregated": Role(), "prefill": Role(charges_tokens=False), "decode": Role(charges_prompts=False)}
"""By worker type. The prompts of a decode worker are computed by a prefill worker."""


@define(eq=False)
class StepResult:
    """The outcome of one step (a forward pass).

    Over its life a sequence is listed once in one of `finished`, `rejected` and `completed_empty`.
    """

    duration_ms: float = 0.0
    """Simulated time of the step."""
    emitted: list[Sequence] = field(factory=list)
    """Sequences with output, `new_tokens` tokens each."""
    finished: list[Sequence] = field(factory=list)
    """Sequences whose last token this step generated."""
    rejected: list[Sequence] = field(factory=list)
    """Sequences that can never be served. Without chunked prefill this may come after some tokens: a sequence was
    admitted by a cached prefix, preempted, and is too long without it."""
    completed_empty: list[Sequence] = field(factory=list)
    """Sequences without a token to generate."""
    admitted: list[Sequence] = field(factory=list)
    """Sequences that began, once in their lives."""
    preempted: list[Sequence] = field(factory=list)
    """Sequences that went back to the queue."""
    scheduled_tokens: int = 0
    """Tokens computed."""
    paid_tokens: int = 0
    """Prompt tokens computed that took time."""
    read_blocks: int | None = None
    """The blocks in use, where generating tokens took time."""

    @property
    def did_nothing(self) -> bool:
        """Whether the next step would do nothing either, unless the scheduler is called in between."""
        has_ended = self.rejected or self.finished or self.completed_empty
        return not (self.scheduled_tokens or self.emitted or self.admitted or self.preempted or has_ended)


class StepPlan:
    """The tokens that a step may still compute, and the prompts it computes already."""

    __slots__ = ("batch", "budget", "cached_tokens", "parts", "paying", "prefill_left", "prompt_tokens")

    def __init__(self, budget: int, prefill_tokens: int) -> None:
        self.budget = budget
        self.prefill_left = prefill_tokens
        self.batch = 0
        """Sequences with prompt tokens in this step."""
        self.paying = 0
        """Those of them whose prompts take time; the next two fields are sums over them."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.parts: dict[Sequence, tuple[int, int, int]] = {}
        """Tokens, prompt tokens, and prompt tokens computed before, where it is more than one token of output."""

    def add(self, sequence: Sequence, before: int, tokens: int) -> None:
        """Give the sequence that many tokens, after `before` computed ones."""
        prompt_before = min(before, sequence.prompt_tokens)
        prompt_now = min(before + tokens, sequence.prompt_tokens) - prompt_before
        self.parts[sequence] = tokens, prompt_now, prompt_before
        self._count(1, sequence, tokens, prompt_now, prompt_before)

    def take_back(self, sequence: Sequence) -> None:
        """Take back what the sequence was given."""
        part = self.parts.pop(sequence, None)
        if part is not None:
            self._count(-1, sequence, *part)
        elif sequence.computed == sequence.length:
            # Single tokens of output are not recorded; a sequence that has been given one is computed to its length.
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
    """Sequences that do not run yet, in three groups, and the lookups of their admission.

    `waiting` need blocks and tokens, `reserved` have blocks for prompts that a prefill worker computes, and the prompts
    of `ready` have arrived.
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
        self._last_lookup: tuple[Sequence | None, int, int] = (None, 0, 0)
        """Whose prefix, of how many blocks, in which state of the pool."""
        self._found: tuple[list[int], int] = ([], 0)
        """The result of the last lookup."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready) + len(self.reserved)

    def begin(self, sequence: Sequence, stage: SequenceState) -> None:
        """Accept a new sequence, its output cut to the limits here. Raises ContractViolation for any other."""
        if sequence.stage is not SequenceState.NEW:
            raise ContractViolation(f"a sequence that is {sequence.stage.name.lower()} cannot begin")
        if sequence.block_size != self._block_size:
            raise ContractViolation(f"blocks are of {self._block_size} tokens here, not {sequence.block_size}")
        end = self.end_of(sequence)
        if end is not None:
            sequence.end = end
        sequence.stage = stage

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence of this queue."""
        if sequence in self.reserved:
            del self.reserved[sequence]
        else:
            (self.ready if sequence in self.ready else self.waiting).remove(sequence)

    def end_of(self, sequence: Sequence) -> int | None:
        """Return the length at which the sequence ends here, or None if it cannot begin."""
        if sequence.prompt_tokens >= self._max_model_len:
            return None
        end = self._policy.output_end(sequence, self._pool.capacity * self._block_size)
        return None if end is None else min(end, self._max_model_len)

    def match(self, sequence: Sequence, blocks: int) -> tuple[list[int], int]:
        """Return the cached prefix of a sequence, of at most that many blocks, and how many of them are held.

        The head of the queue is looked up in every step, so the last result is kept while it holds.
        """
        if not self._caching:
            return [], 0
        lookup = sequence, blocks, self._pool.changes
        if lookup != self._last_lookup:
            found = self._pool.match(sequence.names(blocks))
            self._last_lookup, self._found = lookup, (found, self._pool.count_active(found))
        return self._found

    def fits(self, sequence: Sequence, shared_blocks: int, running: Items[Sequence]) -> bool:
        """Return whether the policy gives the sequence its blocks now."""
        return self._policy.fits(sequence, shared_blocks, Load(self._pool, running, chain(self.reserved, self.ready)))

    def order(self) -> None:
        """Order the waiting sequences by the policy."""
        self._policy.order(self.waiting, self._pool)
