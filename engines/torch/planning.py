"""What a step computes, decided from counts alone.

    running choices ──► one token each, then parts of prompts, up to the step's tokens ──► chunks ──► groups

Chunks of the same length and adapter are computed together, in one pass through the model, without padding.

Source: vllm/v1/core/sched/scheduler.py, Scheduler.schedule: a choice is tokens to compute, whether prompt or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from .slots import Choice, KvBytes


@frozen
class Chunk:
    """Tokens of one choice that a step computes: `count` from `start` on."""

    choice: Choice
    start: int
    count: int
    block_ids: Sequence[int]
    """The choice's blocks; they stay as they are, although the choice may be removed during the step."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def draws(self) -> bool:
        """Whether a token is drawn behind it: it ends with the last token there is."""
        return self.end == len(self.choice.tokens)


@frozen
class Load:
    """KV from elsewhere to write before the step: of the tokens from `start` on, into the choice's blocks."""

    block_ids: Sequence[int]
    start: int
    kv: KvBytes


@frozen
class StepPlan:
    """One step of the model."""

    chunks: tuple[Chunk, ...]
    loads: tuple[Load, ...] = ()


def share_budget(pending: Sequence[int], budget: int) -> list[int]:
    """Return how many of its pending tokens each choice computes, in the order of their age.

    First those that need one token only, so that running answers go on beside a long prompt; the rest goes to the
    others, the oldest first, which may get a part, or nothing.
    """
    shares = [0] * len(pending)
    for only_single in (True, False):
        for place, tokens in enumerate(pending):
            if (tokens == 1) is only_single:
                shares[place] = min(tokens, budget)
                budget -= shares[place]
    return shares


def groups(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Return the chunks by length and adapter, each group in their order: what is computed in one pass."""
    found: dict[tuple[int, str | None], list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault((chunk.count, chunk.choice.order.adapter), []).append(chunk)
    return list(found.values())


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """Return the blocks that so many tokens need."""
    return -(-tokens // block_size_tokens)
