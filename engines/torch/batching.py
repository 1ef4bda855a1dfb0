"""Batcher: which choices run, with which blocks, step by step. It knows no model and no loop.

    add ──► waiting ──admission──► running ──plan──► step ──apply──► running ... over
               ▲                      │
               └──── preemption ──────┘     remove: out of any stage, its blocks free at once

A choice is admitted, in the order of arrival, when there are blocks for all tokens it has, and one more for each choice
that runs. A running one takes further blocks as it grows. If there is none, the choice admitted last goes back to the
head of the queue; it is computed again later, from what is still cached of it, and goes on with the same draws.

Source: vllm/v1/core/sched/scheduler.py, Scheduler, and vllm/v1/core/kv_cache_manager.py. Other than there, a waiting
choice gets the blocks of its whole prompt at once, and a found block is compared by its tokens, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeline import PenstockError
from pipeline.llm import block_hashes, sequence_hashes

from ..block_pool import BlockPool
from .planning import Chunk, Load, StepPlan, blocks_for, share_budget
from .settings import TorchSettings
from .slots import Choice, Drawn, HeldBlocks, News, Stage


class Batcher:
    """The choices of one engine and the blocks they hold.

    `salt` begins the chain of the blocks' names, so that texts made elsewhere cannot have the name of another text.
    """

    def __init__(self, settings: TorchSettings, capacity_blocks: int, *, salt: int) -> None:
        self.pool = BlockPool(capacity_blocks)
        self.waiting: deque[Choice] = deque()
        self.running: list[Choice] = []
        """In the order of their admission."""
        self.preemptions = 0
        self._settings = settings
        self._block_tokens = settings.block_size_tokens
        self._salt = salt
        self._contents: list[tuple[int, ...]] = [()] * capacity_blocks
        """The tokens of each block that has a name."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the blocks hold, if one choice has them all."""
        return self.pool.capacity * self._block_tokens

    def add(self, choice: Choice) -> None:
        """Queue a new choice."""
        self.waiting.append(choice)

    def remove(self, choice: Choice) -> None:
        """End a choice in any stage, also during a step, and release its blocks. Idempotent."""
        if choice.stage is Stage.WAITING:
            self.waiting.remove(choice)
        elif choice.stage is Stage.RUNNING:
            self.running.remove(choice)
        choice.stage = Stage.OVER
        self._release(choice)

    def take_held(self, choice: Choice) -> HeldBlocks:
        """Return the blocks of the prompt of an ended choice that keeps its blocks; they are the caller's now."""
        prompt = choice.order.prompt
        count = blocks_for(len(prompt), self._block_tokens)
        held, choice.blocks = HeldBlocks(tuple(choice.blocks[:count]), tuple(prompt)), choice.blocks[count:]
        self._release(choice)
        return held

    def release_held(self, held: HeldBlocks) -> None:
        """Release blocks that were taken."""
        self.pool.release(held.block_ids)

    def plan(self) -> StepPlan | None:
        """Return the next step, None if there is nothing to compute. `apply` or `fail` follows."""
        chunks, loads = self._planned(), list[Load]()
        if not chunks or self.preemptions == self._preemptions_before:
            self._admit(chunks, loads)
        return StepPlan(tuple(chunks), tuple(loads)) if chunks else None

    def apply(self, plan: StepPlan, drawn: Sequence[Drawn | None]) -> None:
        """Record a computed step: one draw, or None, for each chunk. Removed choices are left out."""
        for chunk, draw in zip(plan.chunks, drawn, strict=True):
            choice = chunk.choice
            if choice.stage is not Stage.RUNNING:
                continue
            choice.computed_tokens = chunk.end
            self._store(choice)
            if draw is not None:
                self._append(choice, draw)

    def fail(self, plan: StepPlan, error: PenstockError) -> None:
        """End the choices of a step that failed, with its error."""
        for chunk in plan.chunks:
            if chunk.choice.stage is Stage.RUNNING:
                self.remove(chunk.choice)
                chunk.choice.receive(News(chunk.choice, error=error))

    def _append(self, choice: Choice, draw: Drawn) -> None:
        choice.tokens.append(draw.token_id)
        ending = choice.order.limits.ending(choice.generated_tokens, draw.token_id)
        if ending is None:
            choice.receive(News(choice, draw))
            return
        self.running.remove(choice)
        choice.stage = Stage.OVER
        if not choice.keeps_blocks:
            self._release(choice)
        choice.receive(News(choice, draw, *ending))

    def _planned(self) -> list[Chunk]:
        """Return the chunks of the running choices, each with the blocks it needs; preempts the youngest for them."""
        self._preemptions_before = self.preemptions
        chunks: list[Chunk] = []
        running = list(self.running)
        shares = share_budget([choice.pending_tokens for choice in running], self._settings.max_num_batched_tokens)
        for choice, count in zip(running, shares, strict=True):
            if count and choice.stage is Stage.RUNNING and self._grow(choice, choice.computed_tokens + count):
                chunks.append(Chunk(choice, choice.computed_tokens, count, choice.blocks))
        return chunks

    def _grow(self, choice: Choice, tokens: int) -> bool:
        """Take the blocks that so many tokens need; return False if the choice itself had to be preempted."""
        missing = blocks_for(tokens, self._block_tokens) - len(choice.blocks)
        while missing > 0:
            if (taken := self.pool.take(missing)) is not None:
                choice.blocks = choice.blocks + taken  # a new list: the one before may be in use
                break
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is choice:
                return False
        return True

    def _preempt(self, choice: Choice) -> None:
        self.preemptions += 1
        self.running.remove(choice)
        self._release(choice)
        choice.computed_tokens = choice.stored_blocks = 0
        choice.stage = Stage.WAITING
        self.waiting.appendleft(choice)

    def _admit(self, chunks: list[Chunk], loads: list[Load]) -> None:
        """Admit waiting choices as long as there are room, blocks and tokens of the step."""
        budget = self._settings.max_num_batched_tokens - sum(chunk.count for chunk in chunks)
        while budget > 0 and len(self.running) < self._settings.max_num_seqs:
            choice = next((one for one in self.waiting if _is_ready(one)), None)
            if choice is None or not self._place(choice):
                return
            self.waiting.remove(choice)
            self.running.append(choice)
            choice.stage = Stage.RUNNING
            loads += self._import(choice)
            count = min(choice.pending_tokens, budget)
            budget -= count
            chunks.append(Chunk(choice, choice.computed_tokens, count, choice.blocks))

    def _place(self, choice: Choice) -> bool:
        """Give the choice blocks for all of its tokens, cached ones first; return False, and change nothing, if there
        are too few."""
        found = self._cached(choice)
        missing = blocks_for(len(choice.tokens), self._block_tokens) - len(found)
        inactive = len(found) - self.pool.count_active(found)
        if missing + inactive + len(self.running) > self.pool.available:
            return False
        self.pool.reuse(found)
        taken = self.pool.take(missing)
        assert taken is not None, "they were counted"
        choice.blocks = found + taken
        choice.stored_blocks = len(found)
        choice.computed_tokens = len(found) * self._block_tokens
        if choice.cached_tokens is None:
            choice.cached_tokens = choice.computed_tokens
        return True

    def _cached(self, choice: Choice) -> list[int]:
        """Return the cached blocks of the choice's beginning; at least one token is left to compute."""
        if not self._settings.caches_prefixes:
            return []
        size, tokens = self._block_tokens, choice.tokens
        whole = (len(tokens) - 1) // size
        self._name(choice, whole)
        found = self.pool.match(choice.names[:whole])
        for place, block in enumerate(found):
            if self._contents[block] != tuple(tokens[place * size : (place + 1) * size]):
                return found[:place]
        return found

    def _import(self, choice: Choice) -> list[Load]:
        """Return what has to be written of the KV that the choice brings, beyond what is cached, as computed."""
        kv, choice.imported = choice.imported, None
        start = choice.computed_tokens
        if kv is None or (end := min(kv.tokens, len(choice.order.prompt) - 1)) <= start:
            return []
        choice.computed_tokens = end
        return [Load(choice.blocks, start, kv)]

    def _name(self, choice: Choice, whole_blocks: int) -> None:
        """Hash the choice's first blocks, as far as they are not."""
        size, known = self._block_tokens, len(choice.names)
        if whole_blocks <= known:
            return
        hashes = block_hashes(choice.tokens[known * size : whole_blocks * size], size, seed=choice.order.hash_seed)
        choice.names += sequence_hashes(hashes, choice.names[-1] if known else self._salt)
        choice.token_hashes += hashes

    def _store(self, choice: Choice) -> None:
        """Put the blocks that are full now into the index of the cache."""
        size, first = self._block_tokens, choice.stored_blocks
        whole = choice.computed_tokens // size
        if whole <= first or not self._settings.caches_prefixes:
            return
        self._name(choice, whole)
        for place in range(first, whole):
            self._contents[choice.blocks[place]] = tuple(choice.tokens[place * size : (place + 1) * size])
        parent = choice.names[first - 1] if first else None
        self.pool.store(choice.blocks[first:whole], choice.names[first:whole], choice.token_hashes[first:whole], parent)
        choice.stored_blocks = whole

    def _release(self, choice: Choice) -> None:
        blocks, choice.blocks = choice.blocks, []
        self.pool.release(blocks)


def _is_ready(choice: Choice) -> bool:
    """Whether a waiting choice may begin: the one whose prompt it shares has computed that, or is over."""
    leader = choice.leader
    return leader is None or leader.is_prompt_computed or leader.stage is Stage.OVER
