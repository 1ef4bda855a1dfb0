"""Policy: what differs between the engines we imitate, as choices the scheduler asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from sys import maxsize
from typing import Protocol

from attrs import frozen

from .blocks import BlockPool
from .sequence import Sequence

UNBOUNDED = maxsize
"""Stands for no limit."""


@frozen
class Load:
    """What a choice may look at."""

    pool: BlockPool
    running: Items[Sequence]
    promised: Iterable[Sequence]
    """Not running, yet with blocks for a prompt somebody else computes, in transfer or about to run."""


class Policy(Protocol):
    """The choices of one flavour of engine. They change nothing but the order of the waiting."""

    prefill_first: bool
    """Whether a pass that computes prompts makes the sequences in their output wait."""
    prefill_tokens: int
    """Prompt tokens a pass computes at most, besides the limit of all tokens."""

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        """The length at which the sequence ends for lack of room; None if there is none for it at all."""
        ...

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        """How much of a prompt this pass may compute, with so much left of `prefill_tokens`."""
        ...

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:
        """Puts first who is to be admitted first."""
        ...

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        """Whether it may be admitted now; `shared_blocks` of its prefix are held by others already."""
        ...

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        """Who gives up its blocks when there are none; None if nobody ever should have to."""
        ...

    def after_pass(self, preempted: bool) -> None:
        """A pass is over."""
        ...
