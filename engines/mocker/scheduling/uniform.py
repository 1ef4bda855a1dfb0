"""Uniform steps: those that only give each running sequence a new token, and the block it needs.

    for each sequence     length ─┬─ ─ ─ ─┬─ takes a block, ─ ─ ─ ─┬─ ...      until one finishes, or lacks a block
                                  token   token     fills the one before

No sequence begins, ends or is preempted in them: their times are known beforehand, and many of them are one addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import chain

from pipeline import ContractViolation

from ...block_pool import BlockPool
from ..timing import StepTime
from .sequence import NEVER, Sequence

MOST_STEPS = 512
"""So many are planned ahead at most: what cuts them off wastes the rest."""


def steps_until_end(running: Items[Sequence]) -> int:
    """Return how many steps come before the one in which the first sequence finishes.

    0 unless each sequence misses one token that it has not emitted before.
    """
    least = MOST_STEPS if running else 0
    for sequence in running:
        length = sequence.length
        if sequence.computed != length - 1 or length <= sequence.prompt_tokens or length != sequence.emitted_length:
            return 0
        if (ends := sequence.end - 1 - length) < least:
            least = ends
    return max(0, least)


def times_ms(
    running: Items[Sequence], pool: BlockPool, block_size: int, time: StepTime, steps: int
) -> Iterable[float] | None:
    """Return the time of each of that many steps, or of fewer, as far as there are blocks; None as `decodes_ms`."""
    batch, context_tokens = len(running), sum(sequence.length for sequence in running)
    takes = [at for sequence in running for at in range(sequence.room + 1 - sequence.length, steps, block_size)]
    active, done, parts = pool.active, 0, list[Iterable[float]]()
    for at in (*sorted(takes), steps):
        if at > done:
            tokens = context_tokens + done * batch
            part = time.decodes_ms(batch, active * block_size, pool.capacity * block_size, tokens, at - done)
            if part is None:
                return None
            parts.append(part)
            done = at
        if active == pool.capacity:
            break
        active += 1
    return chain.from_iterable(parts)


def steps_to_border(running: Items[Sequence]) -> int:
    """Return how many steps come before the next one in which a sequence takes or fills a block."""
    least = NEVER
    for sequence in running:
        room, full = sequence.room + 1, sequence.next_full
        if (steps := (full if full < room else room) - sequence.length) < least:
            least = steps
    return max(0, least)


def advance(
    running: Items[Sequence],
    pool: BlockPool,
    steps: int,
    publish: Callable[[Sequence], object],
    done: Callable[[int], object] | None = None,
) -> None:
    """Do that many steps. `publish` is called with each sequence that has filled blocks, `done` as in `advance`."""
    left = steps
    while left > 0:
        plain = min(steps_to_border(running), left)
        for sequence in running:
            sequence.length += plain
            sequence.computed += plain
            sequence.emitted_length += plain
        if plain and done is not None:
            done(plain)
        left -= plain
        if left:
            _cross_border(running, pool, publish)
            if done is not None:
                done(1)
            left -= 1
    for sequence in running:
        sequence.new_tokens = 1


def _cross_border(running: Items[Sequence], pool: BlockPool, publish: Callable[[Sequence], object]) -> None:
    """Do a step in which sequences take or fill blocks."""
    for sequence in running:
        length = sequence.length
        if length > sequence.room and not sequence.allocate(pool, length):
            raise ContractViolation("there are fewer blocks than uniform steps were promised")
        sequence.computed = length
        if length >= sequence.next_full:
            publish(sequence)
        sequence.length = sequence.emitted_length = length + 1
