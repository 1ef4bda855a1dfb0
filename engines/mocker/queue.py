"""Queue: who is on an engine and does not run yet, and whether the next one may."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from itertools import chain

from pipeline import ContractViolation

from .blocks import BlockPool
from .policy import Load, Policy
from .sequence import Sequence, Stage


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
