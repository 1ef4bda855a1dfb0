"""SglangPolicy: prompts before outputs, admission by an estimate of what outputs will need."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import Literal

from .blocks import BlockPool
from .policy import Load
from .sequence import Sequence

INITIAL_RATIO = 0.7
"""Part of the outputs of running sequences that is kept free at first, and again after a pre-emption."""
LEAST_RATIO = 0.14
"""How far that part falls, as a part of its first value."""
PASSES_TO_LEAST = 600
LONGEST_PREFIX_WAITING = 128
"""With more waiting than this, looking up all their prefixes costs more than it gains."""


class SglangPolicy:
    """A pass computes prompts, if there are any to compute; else each running sequence gets its next token.

    A prompt is split only if it is longer than a chunk, at page boundaries. It is admitted if what is left of the cache
    holds it, its output (at most `clip_max_new_tokens` of it) and a part of the outputs of the running; where nothing
    runs, if the cache holds it, with what it said before a pre-emption. `lpm` admits the longest cached prefix first.
    Who has generated least is pre-empted.

    Source: dynamo lib/mocker/src/scheduler/sglang/{prefill,decode,policy,config}.rs. Other than there, a pre-empted
    sequence goes back to its prompt, a long prompt is charged as a whole and not by the chunk, what counts against the
    cap of a pass is tokens and not pages, and equal prompts that wait together are not spread over passes.
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

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        if sequence.prompt_tokens > capacity_tokens:
            return None
        return min(sequence.end, capacity_tokens + 1)

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
            # The rest of the cache is promised; who gave way to that would only do so again.
            return sequence.missing_blocks(sequence.said) - shared_blocks <= load.pool.available
        missing = sequence.missing_blocks(sequence.length) - shared_blocks
        kept = sum(self._output_left(other) for other in load.running) * self.ratio
        return missing * self._page + self._output_left(sequence) < load.pool.available * self._page - kept

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        return min(running, key=lambda sequence: sequence.generated, default=None)

    def after_pass(self, preempted: bool) -> None:
        least = self._first_ratio * LEAST_RATIO
        before = self._first_ratio if preempted else self.ratio
        self.ratio = max(least, before - (self._first_ratio - least) / PASSES_TO_LEAST)

    def _output_left(self, sequence: Sequence) -> int:
        return min(sequence.end - sequence.length, self._clip_tokens)
