"""Trace: sessions of turns, the form of every load before it is replayed; and the prompts of its turns.

Source: dynamo lib/mocker/src/loadgen/trace.rs, synthesize_tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import chain, count, repeat
from math import floor
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument
from pipeline.llm import HashedTokens, LocalHashes, block_hash_array

from .hashes import KeptHashes

BLOCK_TOKENS = 512
"""Tokens of a hash id, by default."""
_TOKEN_IDS_MAX = 2**32
_SPREAD = 2_654_435_761
"""A multiplier that is coprime to any vocabulary: consecutive ids begin at distant parts of the tape."""


def hash_tokens(hash_id: int, tokens: int, vocabulary: range) -> list[int]:
    """Return the block of a hash id: that many tokens of a vocabulary, the same in any process.

    The first tokens are the digits of the id, the lowest first, so blocks of different ids differ if they are long
    enough for all digits: three in a vocabulary of 1,626 tokens or more. The rest is pseudo-random.
    """
    digits, rest = [], hash_id
    for _ in range(_digits(len(vocabulary))):
        rest, digit = divmod(rest, len(vocabulary))
        digits.append(vocabulary[digit])
    begin = hash_id * _SPREAD % len(vocabulary)
    return [*digits, *_tape(tokens, vocabulary)[begin : begin + tokens]][:tokens]


@lru_cache(maxsize=8)
def _digits(base: int) -> int:
    """Return how many digits a hash id of 32 bits needs."""
    needed = 1
    while base**needed < 2**32:
        needed += 1
    return needed


@lru_cache(maxsize=8)
def _tape(tokens: int, vocabulary: range) -> list[int]:
    """Return pseudo-random tokens; a block may begin at any index below the size of the vocabulary."""
    drawn = Random(len(vocabulary)).choices(vocabulary, k=len(vocabulary))
    return (drawn * (1 + -(-tokens // len(drawn))))[: len(drawn) + tokens]


@frozen
class Prompt:
    """A prompt by the hash ids of its blocks; its tokens are made on demand."""

    hash_ids: array[int]
    tokens: int
    """Its length; the last block may be longer."""
    block_size_tokens: int
    vocabulary: range | None = None
    """Token ids that a block is made of, see `hash_tokens`. None: copies of its hash id."""

    @classmethod
    def of(cls, hash_ids: array[int], block_size_tokens: int, input_tokens: int | None = None) -> Prompt:
        """Return a prompt of that length, default and at most the length that its hash ids cover."""
        covered = len(hash_ids) * block_size_tokens
        tokens = covered if input_tokens is None else min(input_tokens, covered)
        return cls(hash_ids[: -(-tokens // block_size_tokens)], tokens, block_size_tokens)

    def token_ids(self) -> list[int]:
        """Return the tokens, a new list each time."""
        made: list[int] = []
        for hash_id in self.hash_ids:
            if self.vocabulary is None:
                made += [hash_id] * self.block_size_tokens
            else:
                made += hash_tokens(hash_id, self.block_size_tokens, self.vocabulary)
        del made[self.tokens :]
        return made

    def packed(self, kept: KeptHashes | None = None) -> array[int]:
        """Return the tokens as a new array of u32, which takes a hundredth of the time and half of the memory.

        It comes with its hashes, those `kept` and those that are made and kept there.
        """
        if self.vocabulary is not None:
            return array("I", self.token_ids())
        ids, width = array("I", self.hash_ids).tobytes(), array("I").itemsize
        size = self.block_size_tokens
        content = b"".join([ids[at : at + width] * size for at in range(0, len(ids), width)])
        return HashedTokens.of(content[: self.tokens * width], partial(self._hashes, kept or KeptHashes()))

    def _hashes(self, kept: KeptHashes, block_size_tokens: int, seed: int) -> LocalHashes:
        """Return the local hashes of the tokens in blocks of another size."""
        key = id(self), block_size_tokens, seed
        if (known := kept.find(key)) is not None:
            return known
        copies, rest = divmod(self.block_size_tokens, block_size_tokens)
        if rest or not copies:
            made = block_hash_array(array("I", self.packed()), block_size_tokens, seed=seed)
        else:  # the blocks of one hash id are equal
            of_ids = Prompt(self.hash_ids, len(self.hash_ids) * block_size_tokens, block_size_tokens).packed()
            found = block_hash_array(array("I", of_ids), block_size_tokens, seed=seed)
            made = array("Q", chain.from_iterable(map(repeat, found, repeat(copies))))
            del made[self.tokens // block_size_tokens :]
        return kept.keep(key, LocalHashes.of(made))


def check_block_size(block_size_tokens: int) -> None:
    """Raise InvalidArgument for a block without tokens."""
    if block_size_tokens < 1:
        raise InvalidArgument(f"a block has at least one token, not {block_size_tokens}", field="trace_block_size")


class TraceFormat(StrEnum):
    """The format of trace files."""

    MOONCAKE = "mooncake"
    """A request a line; lines of one session are its turns."""
    MOONCAKE_DELTA = "mooncake-delta"
    """The same, but a prompt has only the tokens that follow the turns and answers before it."""
    AGENTIC_MOONCAKE = "agentic_mooncake"
    """A request a line; it may wait for others."""
    APPLIED_COMPUTE_AGENTIC = "applied_compute_agentic"
    """A whole session a line, by the lengths of its parts; without arrivals."""
    DYNAMO = "dynamo"
    """Request traces of Dynamo's front end, in one file or several."""


@frozen
class Turn:
    """One request of a session."""

    name: str
    """Unique: its request id, else `session:turn`, else `line:N` from 0. Recorded outputs are found by it."""
    line: int
    """From 1, through all files; 0 if it does not come from a file."""
    prompt: Prompt
    output_tokens: int
    delay_ms: float = 0.0
    """Time after the turn before, or after the last turn it waits for."""
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    recorded: array[int] | None = None
    """The tokens of the answer, if the trace has them."""
    wait_for: tuple[str, ...] = ()
    """Names of the turns that end before this one begins."""


@frozen
class Session:
    """Turns that follow each other."""

    session_id: str
    turns: tuple[Turn, ...]
    arrival_ms: float | None = None
    """Of the first turn; None if the trace lacks it."""
    is_named: bool = True
    """Whether the trace contains its id; else the id is generated."""


@frozen
class BadLine:
    """An invalid line of a trace."""

    line: int
    """From 1."""
    problem: str
    file: str = ""
    """Its name, if the trace has several files."""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}: {self.problem}".lstrip()


@frozen
class Trace:
    """The sessions of a load."""

    sessions: tuple[Session, ...]
    """In the order of their first lines."""
    format: TraceFormat = TraceFormat.MOONCAKE
    skipped: tuple[BadLine, ...] = ()
    """Invalid lines that were left out."""

    @cached_property
    def digest(self) -> str:
        """Equal for equal requests and different for others, wherever they were read from."""
        digest = blake2b(digest_size=8)
        for session in self.sessions:
            for part in _parts(session):
                digest.update(part)
        return digest.hexdigest()

    @cached_property
    def kept_hashes(self) -> KeptHashes:
        """The block hashes of its prompts, as far as they were made in this process."""
        return KeptHashes()

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def input_tokens(self) -> int:
        """Of all prompts as recorded: those of a delta trace grow while it is replayed."""
        return sum(turn.prompt.tokens for session in self.sessions for turn in session.turns)

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for session in self.sessions for turn in session.turns)

    def with_vocabulary(self, vocabulary: range) -> Trace:
        """Return the trace with prompts in the token ids of that range, for an engine with a real vocabulary.

        Equal blocks stay equal, different ones differ, prompts keep their lengths: see `hash_tokens`. Recorded answers
        stay as they are. Raise InvalidArgument for fewer than two ids, and for ids outside of 32 bits.
        """
        if len(vocabulary) < 2 or vocabulary.step < 0 or not 0 <= vocabulary[0] <= vocabulary[-1] < _TOKEN_IDS_MAX:
            raise InvalidArgument("expected at least two token ids from 0 on, the lowest first", field="vocabulary")
        return evolve(self, sessions=tuple(_with_vocabulary(session, vocabulary) for session in self.sessions))


def _with_vocabulary(session: Session, vocabulary: range) -> Session:
    turns = (evolve(turn, prompt=evolve(turn.prompt, vocabulary=vocabulary)) for turn in session.turns)
    return evolve(session, turns=tuple(turns))


def _parts(session: Session) -> Iterator[bytes]:
    """Yield what identifies a session."""
    yield repr((session.session_id, session.arrival_ms, session.is_named, len(session.turns))).encode()
    for turn in session.turns:
        yield repr(_plain(turn)).encode()
        yield turn.prompt.hash_ids.tobytes()
        if turn.recorded is not None:
            yield turn.recorded.tobytes()


def _plain(turn: Turn) -> tuple[Any, ...]:
    """Return the fields that identify a turn: without its line, and with the lengths of its arrays."""
    prompt, recorded = turn.prompt, None if turn.recorded is None else len(turn.recorded)
    return (
        *(turn.name, len(prompt.hash_ids), prompt.tokens, prompt.block_size_tokens, prompt.vocabulary, recorded),
        *(turn.output_tokens, turn.delay_ms, turn.priority, turn.strict_priority, turn.policy_class, turn.wait_for),
    )


@define
class SharedPrefixes:
    """Hash ids for synthetic prompts: all new, but for the first blocks that the prompts of a group share."""

    ratio: float = 0.0
    """Part of the blocks that are shared, 0 to 1."""
    groups: int = 0
    """0: nothing is shared."""
    _next_id: count[int] = field(factory=lambda: count(1), init=False)
    _shared: dict[int, array[int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidArgument(f"must be between 0 and 1, got {self.ratio}", field="shared_prefix_ratio")
        if self.groups < 0:
            raise InvalidArgument(f"cannot be negative, got {self.groups}", field="num_prefix_groups")

    @property
    def are_shared(self) -> bool:
        return self.ratio > 0 and self.groups > 0

    def shared_blocks(self, blocks: int) -> int:
        """Return how many of that many blocks are shared: the ratio of them, a half rounded up."""
        return floor(blocks * self.ratio + 0.5) if self.are_shared else 0

    def blocks(self, blocks: int, shared: int, group: int | None) -> array[int]:
        """Return the ids of a prompt's blocks; the first `shared` are those of the group."""
        ids = array("I")
        if group is not None:
            known = self._shared.setdefault(group, array("I"))
            while len(known) < shared:
                known.append(next(self._next_id))
            ids.extend(known[:shared])
        while len(ids) < blocks:
            ids.append(next(self._next_id))
        return ids
