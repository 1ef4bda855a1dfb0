"""NoEvictPolicy: admission that keeps room to the end of everything admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from .blocks import BlockPool
from .policy import UNBOUNDED, Load
from .sequence import Sequence


class NoEvictPolicy:
    """TensorRT-LLM's guaranteed_no_evict: admits what fits to its end, beside all others to their ends.

    So nothing is ever pre-empted. Prompt and output are cut to the cache; a prompt that fills it is rejected.
    Source: dynamo lib/mocker/src/scheduler/vllm/policy.rs, TrtllmGuaranteedNoEvict.
    """

    prefill_first = False
    prefill_tokens = UNBOUNDED

    def output_end(self, sequence: Sequence, capacity_tokens: int) -> int | None:
        return None if sequence.prompt_tokens >= capacity_tokens else min(sequence.end, capacity_tokens)

    def part(self, remaining_tokens: int, left_tokens: int) -> int:
        return remaining_tokens

    def order(self, waiting: deque[Sequence], pool: BlockPool) -> None:
        pass

    def fits(self, sequence: Sequence, shared_blocks: int, load: Load) -> bool:
        spoken_for = sum(other.missing_blocks(other.end) for other in load.running)
        spoken_for += sum(other.missing_blocks(other.end) for other in load.promised)
        return sequence.missing_blocks(sequence.end) - shared_blocks <= load.pool.available - spoken_for

    def victim(self, running: Items[Sequence]) -> Sequence | None:
        return None

    def after_pass(self, preempted: bool) -> None:
        pass
