"""VllmPolicy: optimistic admission, paid for by pre-emption."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import Literal

from .blocks import BlockPool
from .policy import UNBOUNDED, Load
from .sequence import Sequence


class VllmPolicy:
    """Admits what fits now, and pre-empts when outputs outgrow the cache.

    `lifo` pre-empts who was admitted last, `fifo` the first. Where the cache cannot hold a whole output, the sequence
    ends there.

    Source: dynamo lib/mocker/src/scheduler/vllm/policy.rs. Other than there, an output that can never be held is cut
    (there it is pre-empted forever); with `fifo` a pre-empted request comes back only when all of it fits (there, two
    that restart from their prompts can pre-empt each other forever); and where nobody else runs, only when what it has
    said fits (there it starts over and over, as long as others have reserved the blocks it lacks).
    """

    prefill_first = False
    prefill_tokens = UNBOUNDED

    def __init__(self, preemption_mode: Literal["lifo", "fifo"] = "lifo") -> None:
        self._newest = preemption_mode == "lifo"

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        if sequence.prompt_tokens > capacity_tokens:
            return None
        # The last token is never computed, so it needs no room.
        return min(sequence.end, capacity_tokens + 1)

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        return remaining_tokens

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:
        pass

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        if sequence.preemptions and not self._newest:
            tokens = max(sequence.end - 1, sequence.length)
        else:
            # Where nobody runs the rest of the cache is promised, and who gave way to that would only do so again.
            tokens = sequence.length if load.running else sequence.said
        return sequence.missing_blocks(tokens) - shared_blocks <= load.pool.available

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        return running[-1 if self._newest else 0] if running else None

    def after_pass(self, preempted: bool) -> None:
        pass
