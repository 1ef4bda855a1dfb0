"""Sequence: one request's tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from enum import Enum, auto
from itertools import islice
from sys import maxsize
from typing import Any

from pipeline import ContractViolation, InvalidArgument
from pipeline.llm import SEED, block_hashes, sequence_hashes

from ..tokens import Output
from .blocks import BlockPool

NEVER = maxsize
"""A token count no sequence reaches."""
AT_ONCE_TOKENS = 65_536
"""Tokens of a prompt that are worked on in one piece, which takes some 3 ms."""


class Stage(Enum):
    """Where a sequence is in its life."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    RESERVED = auto()
    """It has blocks for its prompt, which somebody else computes."""
    HELD = auto()
    """It is finished, and keeps its blocks until they are released."""
    ENDED = auto()


class Sequence:
    """One request on one engine: its prompt, what it has said, and the blocks it holds.

    Counters are in tokens from the start of the prompt: `length` (known), `computed` (the cache holds them),
    `said` (handed on; after a pre-emption it is above `length`, and what lies between is not handed on again),
    `end` (the length at which it is finished), `room` (what its blocks hold). The last token of `length` is sampled
    but not computed yet, unless the sequence is in its prompt. `cached_tokens` is what the first admission found in
    the cache (None before it), `reused_tokens` the sum over all admissions. `new_tokens` is how many tokens the last
    pass that handed some on gave. Tokens and hashes are made when somebody needs them.

    `pays_prompt` says whether time is charged for its prompt where that is computed, `holds_blocks` whether it keeps
    its blocks when it is finished; the scheduler sets both. `owner` is the caller's; `begun_s` and `told_s` are of who
    measures how long it waits. `hash_seed` is the one of its local block hashes. Raises InvalidArgument for a negative
    output length, for planned tokens that are too few, for a prompt without tokens, and for tokens that are no u32.

    Source: dynamo lib/mocker/src/common/sequence.rs. Other than there, output tokens follow from the prompt, so they
    need not be kept over a pre-emption.
    """

    __slots__ = (
        "_hash_seed",
        "_names",
        "_prompt",
        "_speech",
        "_token_hashes",
        "_tokens_said",
        "begun_s",
        "block_size",
        "blocks",
        "cached_tokens",
        "computed",
        "dp_rank",
        "end",
        "holds_blocks",
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
        "said",
        "stage",
        "told_s",
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
        self.told_s: float | None = None
        self.dp_rank = dp_rank
        self.block_size = block_size
        self.prompt_tokens = len(prompt)
        self.length = self.said = self.prompt_tokens
        self.end = self.prompt_tokens + max_output_tokens
        self.new_tokens = self.preemptions = self.reused_tokens = 0
        self.cached_tokens: int | None = None
        self.holds_blocks, self.pays_prompt = False, True
        self.stage = Stage.NEW
        # Checked here, where an error meets its own request, and not in a pass, where it would meet them all.
        self._prompt = u32s(prompt, "token_ids")
        if output.planned is not None:
            u32s(output.planned, "output_token_ids")
        self._speech = output.speech(prompt_tokens=self.prompt_tokens, first=prompt[0], last=prompt[-1])
        self._tokens_said: array[int] = array("q")
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
        """Tokens handed on."""
        return self.said - self.prompt_tokens

    @property
    def max_output_tokens(self) -> int:
        """How many tokens it says, if it is neither rejected nor cancelled."""
        return self.end - self.prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens are generated."""
        return self.length == self.end

    def output_tokens(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The tokens at these output indexes, said already or not; up to what is said unless told otherwise."""
        stop = self.emitted if stop is None else stop
        self._say_through(stop)
        return self._tokens_said[start:stop].tolist()

    def new_token_ids(self) -> list[int]:
        """The tokens of the last pass that handed some on."""
        said = self._tokens_said
        if self.new_tokens == 1 and len(said) == self.said - self.prompt_tokens - 1:  # nearly always
            token = next(self._speech)
            said.append(token)
            return [token]
        return self.output_tokens(self.emitted - self.new_tokens)

    @property
    def last_token(self) -> int:
        """The last token handed on; of the prompt, if there is none yet."""
        return self.output_tokens(self.emitted - 1)[0] if self.emitted else self._prompt[-1]

    def names(self, blocks: int) -> list[int]:
        """The sequence hashes of its first so many blocks, which must be full."""
        if len(self._names) < blocks:
            self._hash_through(blocks)
        return self._names[:blocks]

    def token_hashes(self, blocks: int) -> list[int]:
        """The local hashes of the same."""
        if len(self._token_hashes) < blocks:
            self._hash_through(blocks)
        return self._token_hashes[:blocks]

    def block_tokens(self, first: int, last: int) -> list[int]:
        """The tokens of full blocks from `first` to below `last`."""
        return self._tokens(first * self.block_size, last * self.block_size)

    def reusable_blocks(self) -> int:
        """How many leading blocks may come from the cache: not the last token's, its output is needed.

        All full ones where no token is to be generated.
        """
        return (self.length if self.is_complete else self.length - 1) // self.block_size

    def missing_blocks(self, tokens: int) -> int:
        """Blocks it lacks to hold so many tokens."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def adopt(self, pool: BlockPool, blocks: list[int]) -> None:
        """Begins with blocks of the cache, which hold its first tokens."""
        pool.reuse(blocks)
        self.blocks = blocks.copy()
        self.published = len(blocks)
        self.room = len(blocks) * self.block_size
        self.next_full = self.room + self.block_size

    def allocate(self, pool: BlockPool, tokens: int) -> bool:
        """Gets the blocks it lacks for so many tokens; False, and nothing changed, if the pool has too few."""
        missing = self.missing_blocks(tokens)
        if missing:
            taken = pool.take(missing)
            if taken is None:
                return False
            self.blocks += taken
            self.room += missing * self.block_size
        return True

    def publish(self, pool: BlockPool) -> None:
        """Names the blocks its computed tokens fill, so that others find them."""
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
        """Samples so many tokens; returns how many of them were not handed on before.

        Raises ContractViolation beyond `max_output_tokens`.
        """
        if self.length + count > self.end:
            raise ContractViolation(f"a sequence of at most {self.max_output_tokens} output tokens was asked for more")
        self.length += count
        fresh = self.length - self.said
        if fresh <= 0:
            return 0
        self.said = self.length
        self.new_tokens = fresh
        return fresh

    def pop(self, pool: BlockPool) -> None:
        """Takes back the last generated token, and its block if that is empty then."""
        if not self.generated:
            raise ContractViolation("a prompt cannot be shortened")
        self.length -= 1
        self.said = min(self.said, self.length)
        self.computed = min(self.computed, self.length)
        if self.length <= self.room - self.block_size:
            pool.release([self.blocks.pop()])
            self.room -= self.block_size
            self.published = min(self.published, len(self.blocks))
            self.next_full = (self.published + 1) * self.block_size

    def free(self, pool: BlockPool) -> None:
        """Gives all blocks back, the last one first."""
        pool.release(self.blocks)
        self._forget_blocks()

    def reset(self, pool: BlockPool) -> None:
        """Gives all blocks back and goes back to the prompt; what was handed on stays so."""
        self.free(pool)
        self.length = self.prompt_tokens
        self.preemptions += 1

    def _forget_blocks(self) -> None:
        self.blocks = []
        self.computed = self.room = self.published = 0
        self.next_full = self.block_size

    def _tokens(self, start: int, stop: int) -> list[int]:
        if stop <= self.prompt_tokens:
            return list(self._prompt[start:stop])
        outputs = self.output_tokens(max(0, start - self.prompt_tokens), stop - self.prompt_tokens)
        return [*self._prompt[start:], *outputs]

    def _say_through(self, count: int) -> None:
        said = self._tokens_said
        if len(said) < count:
            said.extend(islice(self._speech, count - len(said)))

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
        """Hashes all full blocks of the prompt at once, later ones as they come."""
        known = len(self._names)
        last = max(blocks, self.prompt_tokens // self.block_size)
        tokens: Items[int]
        if not known and last * self.block_size <= self.prompt_tokens:
            tokens = self._prompt
        else:
            tokens = self.block_tokens(known, last)
        self._add_hashes(tokens)

    def _add_hashes(self, tokens: Items[int]) -> None:
        fresh = block_hashes(tokens, self.block_size, seed=self._hash_seed)
        self._token_hashes += fresh
        self._names += sequence_hashes(fresh, self._names[-1] if self._names else None)


def u32s(tokens: Items[int], field: str) -> array[int]:
    """The tokens as an array, itself if it is one already. Raises InvalidArgument for a token that is no u32."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument("a token id is an integer from 0 to 2^32 - 1", field=field, cause=error) from error
