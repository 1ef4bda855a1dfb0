"""The decisions in which the simulated engines differ, made for the scheduler: a `Policy` for each engine.

`Burst` decides how many tokens a decode step with speculative decoding yields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from math import isfinite
from random import Random
from sys import maxsize
from typing import Literal

from attrs import frozen

from pipeline import InvalidArgument

from ...block_pool import BlockPool
from .sequence import Sequence

UNBOUNDED = maxsize
"""Stands for no limit."""


@frozen
class Load:
    """The state that a decision may depend on."""

    pool: BlockPool
    running: Items[Sequence]
    promised: Iterable[Sequence]
    """Not running, yet with blocks for a prompt of a prefill worker: in transfer or about to run."""


class Policy(ABC):
    """The decisions of one flavour of engine. They change nothing but the order of the queue."""

    prefill_first: bool = False
    """Whether a step that computes prompts makes the sequences in their output wait."""
    prefill_tokens: int = UNBOUNDED
    """Most prompt tokens of a step, besides its limit of all tokens."""

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        """Return the length at which the sequence ends for lack of room; None if its prompt does not fit."""
        if sequence.prompt_tokens > capacity_tokens:
            return None
        return min(sequence.end, capacity_tokens + 1)  # the last token is never computed, so it needs no room

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        """Return how much of a prompt this step may compute, with `left_tokens` left of `prefill_tokens`."""
        return remaining_tokens

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:  # noqa: B027  (optional)
        """Order the queue by admission."""

    @abstractmethod
    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        """Return whether it may be admitted now; other sequences hold `shared_blocks` of its prefix already."""

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        """Return the sequence to preempt when no blocks are left; None if this policy never preempts."""
        return None

    def after_step(self, preempted: bool) -> None:  # noqa: B027  (optional)
        """Called after each step."""


INITIAL_RATIO = 0.7
"""Part of the outputs of running sequences that is kept free at first, and again after a preemption."""
LEAST_RATIO = 0.14
"""How far that part falls, as a part of its first value."""
PASSES_TO_LEAST = 600
LONGEST_PREFIX_WAITING = 128
"""With more waiting than this, looking up all their prefixes costs more than it gains."""


class SglangPolicy(Policy):
    """A step computes prompts, if there are any to compute; else each running sequence gets its next token.

    A prompt is split only if it is longer than a chunk, at page boundaries. It is admitted if what is left of the cache
    holds it, its output (at most `clip_max_new_tokens` of it) and a part of the outputs of the running; where nothing
    runs, if the cache holds it, with its tokens from before a preemption. `lpm` admits the longest cached prefix first.
    The sequence with the fewest generated tokens is preempted.

    Source: dynamo lib/mocker/src/scheduler/sglang/{prefill,decode,policy,config}.rs. Other than there, a preempted
    sequence goes back to its prompt, a long prompt is charged as a whole and not by the chunk, what counts against the
    cap of a step is tokens and not pages, and equal prompts that wait together are not spread over steps.
    """

    prefill_first = True

    def __init__(
        self,
        *,
        page_size: int,
        schedule_policy: Literal["fifo", "fcfs", "lpm"] = "fifo",
        max_prefill_tokens: int = 16384,
        chunked_prefill_size: int = 8192,
        clip_max_new_tokens: int = 4096,
        schedule_conservativeness: float = 1.0,
    ) -> None:
        self.prefill_tokens = min(max_prefill_tokens, chunked_prefill_size)
        self._page = page_size
        self._longest_prefix = schedule_policy == "lpm"
        self._clip_tokens = clip_max_new_tokens
        self._first_ratio = INITIAL_RATIO * schedule_conservativeness
        self.ratio = self._first_ratio
        """Part of the outputs of running sequences that is kept free now."""

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        if remaining_tokens > self.prefill_tokens:
            return left_tokens // self._page * self._page
        return remaining_tokens if remaining_tokens <= left_tokens else 0

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:
        if not self._longest_prefix or not 1 < len(waiting) <= LONGEST_PREFIX_WAITING:
            return
        ordered = sorted(waiting, key=lambda sequence: -len(pool.match(sequence.names(sequence.reusable_blocks()))))
        waiting.clear()
        waiting.extend(ordered)

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        if not load.running:
            # The rest of the cache is promised; a sequence preempted for that would only be preempted again.
            return sequence.missing_blocks(sequence.emitted_length) - shared_blocks <= load.pool.available
        missing = sequence.missing_blocks(sequence.length) - shared_blocks
        kept = sum(self._output_left(other) for other in load.running) * self.ratio
        return missing * self._page + self._output_left(sequence) < load.pool.available * self._page - kept

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        return min(running, key=lambda sequence: sequence.generated, default=None)

    def after_step(self, preempted: bool) -> None:
        least = self._first_ratio * LEAST_RATIO
        before = self._first_ratio if preempted else self.ratio
        self.ratio = max(least, before - (self._first_ratio - least) / PASSES_TO_LEAST)

    def _output_left(self, sequence: Sequence) -> int:
        return min(sequence.end - sequence.length, self._clip_tokens)


class NoEvictPolicy(Policy):
    """TensorRT-LLM's guaranteed_no_evict: admits what fits to its end, beside all others to their ends.

    So nothing is ever preempted. Prompt and output are cut to the cache; a prompt that fills it is rejected.
    Source: dynamo lib/mocker/src/scheduler/vllm/policy.rs, TrtllmGuaranteedNoEvict.
    """

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        return None if sequence.prompt_tokens >= capacity_tokens else min(sequence.end, capacity_tokens)

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        spoken_for = sum(other.missing_blocks(other.end) for other in load.running)
        spoken_for += sum(other.missing_blocks(other.end) for other in load.promised)
        return sequence.missing_blocks(sequence.end) - shared_blocks <= load.pool.available - spoken_for


class VllmPolicy(Policy):
    """Admits what fits now, and preempts when outputs outgrow the cache.

    `lifo` preempts the sequence admitted last, `fifo` the first. A sequence whose whole output exceeds the cache ends
    where the cache does.

    Source: dynamo lib/mocker/src/scheduler/vllm/policy.rs. Other than there, an output that can never be held is cut
    (there it is preempted forever); with `fifo` a preempted request comes back only when all of it fits (there, two
    that restart from their prompts can preempt each other forever); and where no other runs, only when its tokens so
    far fit (there it starts over and over, as long as others have reserved the missing blocks).
    """

    def __init__(self, preemption_mode: Literal["lifo", "fifo"] = "lifo") -> None:
        self._newest = preemption_mode == "lifo"

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        if sequence.preemptions and not self._newest:
            tokens = max(sequence.end - 1, sequence.length)
        else:
            # Where no other runs the rest of the cache is promised: preempted for that, it would be so again.
            tokens = sequence.length if load.running else sequence.emitted_length
        return sequence.missing_blocks(tokens) - shared_blocks <= load.pool.available

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        return running[-1 if self._newest else 0] if running else None


DRAFTS_MAX = 5
DEFAULT_ACCEPT_RATES = (0.85, 0.3)
"""Chance of each draft token, given that the ones before it were accepted; further ones are never."""


def accept_rates(drafts: int, text: str | None) -> tuple[float, ...]:
    """Return the rates of that many drafts from a comma-separated text; missing ones are 0, further ones left out.

    Raises InvalidArgument for a number of drafts outside 1 to 5, and for a rate that is not from 0 to 1.
    """
    if not 1 <= drafts <= DRAFTS_MAX:
        raise InvalidArgument(f"must be from 1 to {DRAFTS_MAX}, got {drafts}", field="aic_nextn")
    rates = DEFAULT_ACCEPT_RATES if text is None or not text.strip() else tuple(map(_rate, text.split(",")))
    return (rates + (0.0,) * drafts)[:drafts]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = float("nan")
    if not isfinite(rate) or not 0 <= rate <= 1:
        raise InvalidArgument(
            f"each rate is a number from 0 to 1, got {text.strip()!r}", field="aic_nextn_accept_rates"
        )
    return rate


class Burst:
    """Draws how many tokens a step yields: one, and one more for each draft accepted in a row.

    Source: dynamo lib/mocker/src/common/speculative.rs; there the random numbers are others.
    """

    __slots__ = ("_rates", "_rng")

    def __init__(self, rates: tuple[float, ...], rng: Random) -> None:
        self._rates = rates
        self._rng = rng

    def draw(self, remaining_tokens: int) -> int:
        """Return the tokens of the next step, at most `remaining_tokens`."""
        count = 1
        for rate in self._rates:
            if self._rng.random() >= rate:
                break
            count += 1
        return min(count, remaining_tokens)
