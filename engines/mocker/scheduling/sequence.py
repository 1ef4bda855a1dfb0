"""Sequence: one request's tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from enum import Enum, auto
from itertools import islice
from sys import maxsize
from typing import Any

from pipeline import ContractViolation, InvalidArgument
from pipeline.llm import SEED, block_hash_array, sequence_hashes

from ...block_pool import BlockPool
from ..tokens import Output

NEVER = maxsize
"""A token count that no sequence reaches."""
AT_ONCE_TOKENS = 131_072
"""Tokens of a prompt that are hashed or copied in one piece, which takes some 6 ms.

A longer prompt is submitted after shorter ones that arrive at the same moment: up to here a replay keeps their order.
"""
_BLOCKS_AHEAD = 16
"""So many blocks of output are hashed at once, before their tokens are emitted."""


class SequenceState(Enum):
    """The state of a sequence in its scheduler."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    RESERVED = auto()
    """It has blocks for its prompt, which a prefill worker computes."""
    HELD = auto()
    """It is finished and keeps its blocks until they are released."""
    ENDED = auto()


class Sequence:
    """One request on one engine: its prompt, the tokens generated so far, and the blocks it holds.

    Counters are in tokens from the start of the prompt: `length` (known), `computed` (in the cache), `emitted_length`
    (handed on; after a preemption it is above `length`, and the tokens between are not handed on again), `end` (the
    length at which the sequence is finished), `room` (what its blocks hold). The last token of `length` is sampled but
    not computed yet, unless the sequence is in its prompt. `cached_tokens` is the prefix that the first admission found
    in the cache (None before it), `reused_tokens` the sum over all admissions. `new_tokens` is the number of tokens
    that the last step with output added. Tokens and hashes are made on first use.

    The scheduler sets `pays_prompt`, whether computing the prompt takes time, and `holds_blocks`, whether a finished
    sequence keeps its blocks. `owner` is the caller's; `begun_s` and `last_token_s` belong to the measurement of
    latencies. `hash_seed` is the seed of the local block hashes. Raises InvalidArgument for a negative output length,
    for too few planned tokens, for a prompt without tokens, and for a token that is not a u32.

    Source: dynamo lib/mocker/src/common/sequence.rs. Other than there, output tokens follow from the prompt, so they
    need not be kept over a pre-emption.
    """

    __slots__ = (
        "_hash_seed",
        "_names",
        "_output_source",
        "_outputs",
        "_prompt",
        "_token_hashes",
        "begun_s",
        "block_size",
        "blocks",
        "cached_tokens",
        "computed",
        "dp_rank",
        "emitted_length",
        "end",
        "holds_blocks",
        "last_token_s",
        "length",
        "new_tokens",
        "next_full",
        "owner",
        "pays_prompt",
        "preemptions",
        "prompt_tokens",
        "published",
        "reused_tokens",
        "room",
        "stage",
    )

    def __init__(
        self,
        prompt: Items[int],
        max_output_tokens: int,
        *,
        block_size: int,
        owner: Any = None,
        output: Output | None = None,
        dp_rank: int = 0,
        hash_seed: int = SEED,
    ) -> None:
        if not len(prompt):
            raise InvalidArgument("a prompt has at least one token", field="token_ids")
        if max_output_tokens < 0:
            raise InvalidArgument(f"must be at least 0, got {max_output_tokens}", field="max_tokens")
        output = Output() if output is None else output
        if output.planned is not None and len(output.planned) < max_output_tokens:
            raise InvalidArgument(
                f"{len(output.planned)} planned tokens are too few for {max_output_tokens}", field="output_token_ids"
            )
        self.owner = owner
        self.begun_s: float | None = None
        self.last_token_s: float | None = None
        self.dp_rank = dp_rank
        self.block_size = block_size
        self.prompt_tokens = len(prompt)
        self.length = self.emitted_length = self.prompt_tokens
        self.end = self.prompt_tokens + max_output_tokens
        self.new_tokens = self.preemptions = self.reused_tokens = 0
        self.cached_tokens: int | None = None
        self.holds_blocks, self.pays_prompt = False, True
        self.stage = SequenceState.NEW
        # Checked here, where an error meets its own request, and not in a pass, where it would meet them all.
        self._prompt = u32s(prompt, "token_ids")
        if output.planned is not None:
            u32s(output.planned, "output_token_ids")
        self._output_source = output.output_source(prompt_tokens=self.prompt_tokens, first=prompt[0], last=prompt[-1])
        self._outputs: array[int] = array("q")
        self._hash_seed = hash_seed
        self._names: list[int] = []
        self._token_hashes: list[int] = []
        self.blocks: list[int] = []
        self.computed = self.room = self.published = 0
        self.next_full = block_size

    @property
    def generated(self) -> int:
        """Tokens generated since the prompt was last computed."""
        return self.length - self.prompt_tokens

    @property
    def emitted(self) -> int:
        """Tokens emitted."""
        return self.emitted_length - self.prompt_tokens

    def output_tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the tokens at these output indexes, emitted or not; `stop` is the number emitted by default."""
        stop = self.emitted if stop is None else stop
        outputs = self._outputs
        if len(outputs) < stop:
            outputs.extend(islice(self._output_source, stop - len(outputs)))
        return outputs[start:stop].tolist()

    def new_token_ids(self) -> list[int]:
        """Return the tokens of the last step with output."""
        outputs = self._outputs
        if self.new_tokens == 1:  # nearly always
            at = self.emitted_length - self.prompt_tokens - 1
            if at < len(outputs):
                return [outputs[at]]
            if at == len(outputs):
                token = next(self._output_source)
                outputs.append(token)
                return [token]
        return self.output_tokens(self.emitted - self.new_tokens)

    def names(self, blocks: int) -> list[int]:
        """Return the sequence hashes of that many leading blocks, which must be full."""
        if len(self._names) < blocks:
            self._hash_through(blocks)
        return self._names[:blocks]

    def token_hashes(self, blocks: int) -> list[int]:
        """Return the local hashes of that many leading blocks, which must be full."""
        if len(self._token_hashes) < blocks:
            self._hash_through(blocks)
        return self._token_hashes[:blocks]

    def block_tokens(self, first: int, last: int) -> list[int]:
        """Return the tokens of the full blocks from `first` to below `last`."""
        return self._block_array(first, last).tolist()

    def _block_array(self, first: int, last: int) -> array[int]:
        start, stop, prompt = first * self.block_size, last * self.block_size, self.prompt_tokens
        if stop <= prompt:
            return self._prompt[start:stop]
        return self._prompt[start:] + array("I", self.output_tokens(max(0, start - prompt), stop - prompt))

    def reusable_blocks(self) -> int:
        """Return how many leading blocks may come from the cache: not the last token's, whose output is needed.

        Without a token left to generate, all full blocks may.
        """
        return (self.length if self.length == self.end else self.length - 1) // self.block_size

    def missing_blocks(self, tokens: int) -> int:
        """Return how many blocks are missing to hold that many tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def adopt(self, pool: BlockPool, blocks: list[int]) -> None:
        """Take over blocks of the cache that hold the first tokens."""
        pool.reuse(blocks)
        self.blocks = blocks.copy()
        self.published = len(blocks)
        self.room = len(blocks) * self.block_size
        self.next_full = self.room + self.block_size

    def allocate(self, pool: BlockPool, tokens: int) -> bool:
        """Take the missing blocks for that many tokens; return False, with nothing changed, if the pool has too few."""
        missing = self.missing_blocks(tokens)
        if missing:
            taken = pool.take(missing)
            if taken is None:
                return False
            self.blocks += taken
            self.room += missing * self.block_size
        return True

    def publish(self, pool: BlockPool) -> None:
        """Name the blocks filled with computed tokens, so that lookups find them."""
        full, first = self.computed // self.block_size, self.published
        if len(self._names) < full:
            self._hash_through(full)
        names = self._names
        parent = names[first - 1] if first else None
        tokens = () if pool.on_event_with_tokens is None else self.block_tokens(first, full)
        pool.store(self.blocks[first:full], names[first:full], self._token_hashes[first:full], parent, tokens)
        self.published = full
        self.next_full = (full + 1) * self.block_size

    def generate(self, count: int = 1) -> int:
        """Sample that many tokens; return how many of them were not emitted before.

        Raises ContractViolation beyond the end.
        """
        if self.length + count > self.end:
            most = self.end - self.prompt_tokens
            raise ContractViolation(f"a sequence of at most {most} output tokens cannot generate more")
        self.length += count
        fresh = self.length - self.emitted_length
        if fresh <= 0:
            return 0
        self.emitted_length = self.length
        self.new_tokens = fresh
        return fresh

    def pop(self, pool: BlockPool) -> None:
        """Take back the last generated token, and its block if that is empty then."""
        if not self.generated:
            raise ContractViolation("a prompt cannot be shortened")
        self.length -= 1
        self.emitted_length = min(self.emitted_length, self.length)
        self.computed = min(self.computed, self.length)
        if self.length <= self.room - self.block_size:
            pool.release([self.blocks.pop()])
            self.room -= self.block_size
            self.published = min(self.published, len(self.blocks))
            self.next_full = (self.published + 1) * self.block_size

    def free(self, pool: BlockPool) -> None:
        """Release all blocks, the last one first."""
        pool.release(self.blocks)
        self.blocks = []
        self.computed = self.room = self.published = 0
        self.next_full = self.block_size

    def reset(self, pool: BlockPool) -> None:
        """Release all blocks and go back to the prompt; emitted tokens stay emitted."""
        self.free(pool)
        self.length = self.prompt_tokens
        self.preemptions += 1

    def hash_some(self) -> bool:
        """Hash the next `AT_ONCE_TOKENS` of the prompt; return whether full blocks of it are left.

        For a long prompt, before the pass that admits it: there all of it would be hashed in one piece.
        """
        known, whole = len(self._names), self.prompt_tokens // self.block_size
        last = min(whole, known + max(1, AT_ONCE_TOKENS // self.block_size))
        if known < last:
            self._add_hashes(self._prompt[known * self.block_size : last * self.block_size])
        return last < whole

    def _hash_through(self, blocks: int) -> None:
        """Hash all full blocks of the prompt at once, later ones some ahead."""
        if not self._names:
            self._add_hashes(self._prompt)
        known, size = len(self._names), self.block_size
        if known < blocks:
            ahead = min(known + _BLOCKS_AHEAD, (self.end - 1) // size)
            self._add_hashes(self._block_array(known, max(blocks, ahead, self.prompt_tokens // size)))

    def _add_hashes(self, tokens: Items[int]) -> None:
        fresh = block_hash_array(tokens, self.block_size, seed=self._hash_seed)
        self._token_hashes.extend(fresh)
        self._names += sequence_hashes(fresh, self._names[-1] if self._names else None)


def u32s(tokens: Items[int], field: str) -> array[int]:
    """Return the tokens as an array, or the same array. Raises InvalidArgument for a token that is not a u32."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument("a token id is an integer from 0 to 2^32 - 1", field=field, cause=error) from error
