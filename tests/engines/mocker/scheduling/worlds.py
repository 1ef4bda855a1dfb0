"""A scheduler over a small pool, the requests submitted to it, and a model of time that records its calls."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from engines.mocker import PolynomialTiming
from engines.mocker.scheduling import BlockPool, Scheduler, Sequence

BLOCK = 4
"""Tokens of a block."""
MODEL = PolynomialTiming()


def scheduler(capacity: int = 100, **options: Any) -> Scheduler:
    """Return a scheduler over so many blocks; `options` are keyword arguments of `Scheduler`."""
    return Scheduler(BlockPool(capacity), block_size=BLOCK, **options)


def sequence_of(tokens: int | Items[int], max_output_tokens: int = 1, *, of: int = 0) -> Sequence:
    """Return a request with that prompt, or one of that length; `of` makes such prompts differ from the first token."""
    prompt = range(of * 1000, of * 1000 + tokens) if isinstance(tokens, int) else tokens
    return Sequence(prompt, max_output_tokens, block_size=BLOCK)


def submitted(to: Scheduler, *sequences: Sequence) -> tuple[Sequence, ...]:
    """Submit the sequences in order and return them."""
    for sequence in sequences:
        to.submit(sequence)
    return sequences


def run(core: Scheduler, passes: int = 1000) -> list[int]:
    """Run passes until the scheduler is idle, checking the pool after each; return all tokens in order."""
    tokens: list[int] = []
    for _ in range(passes):
        if core.is_idle:
            return tokens
        for sequence in core.run_step().emitted:
            tokens += sequence.new_token_ids()
        core.pool.check()
    raise AssertionError("it does not end")


class RecordingModel:
    """Takes 10 ms for prompts and 4 ms for outputs, and records the arguments of its calls."""

    def __init__(self) -> None:
        self.prefills: list[tuple[int, int, int]] = []
        """Batch, mean prompt tokens, mean cached tokens."""
        self.decodes: list[tuple[int, int, int, int]] = []
        """Batch, active and total tokens of the cache, mean context tokens."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        self.prefills.append((batch, mean_prompt_tokens, mean_cached_tokens))
        return 10.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        self.decodes.append((batch, active_kv_tokens, total_kv_tokens, mean_context_tokens))
        return 4.0
