"""Trace: sessions of turns, which is what every source of load becomes before it is replayed.

Spelling hash ids in the tokens of a model, for engines that know no others.

Prompt: the tokens of a traced request, made when somebody asks for them.

Source: dynamo lib/mocker/src/loadgen/trace.rs, synthesize_tokens.

SharedPrefixes: hash ids for made up prompts, of which groups share the first blocks.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from functools import lru_cache
from itertools import count
from math import floor
from random import Random

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument

_SPREAD = 2_654_435_761
"""Far from a divisor of any vocabulary: neighbouring ids take distant parts of the tape."""


def spell(hash_id: int, tokens: int, vocabulary: range) -> list[int]:
    """A block of so many tokens, the same for the same id in any process.

    It begins with the id as a number whose digits are tokens, the lowest first: blocks differ from their first tokens
    on, as soon as they are long enough for these digits, three in a vocabulary of 1,626 tokens or more. What follows
    looks like chance.
    """
    digits, rest = [], hash_id
    for _ in range(_digits(len(vocabulary))):
        rest, digit = divmod(rest, len(vocabulary))
        digits.append(vocabulary[digit])
    begin = hash_id * _SPREAD % len(vocabulary)
    return [*digits, *_tape(tokens, vocabulary)[begin : begin + tokens]][:tokens]


@lru_cache(maxsize=8)
def _digits(base: int) -> int:
    """How many digits any hash id needs, which has 32 bits."""
    needed = 1
    while base**needed < 2**32:
        needed += 1
    return needed


@lru_cache(maxsize=8)
def _tape(tokens: int, vocabulary: range) -> list[int]:
    """Tokens in an order of chance, from which a block may begin at any place within the vocabulary's length."""
    drawn = Random(len(vocabulary)).choices(vocabulary, k=len(vocabulary))
    return (drawn * (1 + -(-tokens // len(drawn))))[: len(drawn) + tokens]


BLOCK_TOKENS = 512
"""A block of a trace, unless somebody says otherwise."""


@frozen
class Prompt:
    """`tokens` tokens: each hash id stands for a block of `block_size_tokens` copies of itself, the last one cut.

    With a `vocabulary` a block is spelled in the token ids of that range instead.
    """

    hash_ids: array[int]
    tokens: int
    block_size_tokens: int
    vocabulary: range | None = None

    @classmethod
    def of(cls, hash_ids: array[int], block_size_tokens: int, input_tokens: int | None = None) -> Prompt:
        """A prompt of the length a trace says, but no longer than its hash ids cover; without a length all of it."""
        covered = len(hash_ids) * block_size_tokens
        tokens = covered if input_tokens is None else min(input_tokens, covered)
        return cls(hash_ids[: -(-tokens // block_size_tokens)], tokens, block_size_tokens)

    def token_ids(self) -> list[int]:
        """The tokens, new each time."""
        made: list[int] = []
        for hash_id in self.hash_ids:
            if self.vocabulary is None:
                made += [hash_id] * self.block_size_tokens
            else:
                made += spell(hash_id, self.block_size_tokens, self.vocabulary)
        del made[self.tokens :]
        return made


def check_block_size(block_size_tokens: int) -> None:
    """Raises InvalidArgument for blocks of no tokens."""
    if block_size_tokens < 1:
        raise InvalidArgument(f"a block has at least one token, not {block_size_tokens}", field="trace_block_size")


_TOKEN_IDS_MAX = 2**32


class TraceFormat(StrEnum):
    """What the lines of a trace file are."""

    MOONCAKE = "mooncake"
    """A request a line; lines of one session are its turns."""
    MOONCAKE_DELTA = "mooncake-delta"
    """The same, but a turn says only what is new after the turns and answers before it."""
    AGENTIC_MOONCAKE = "agentic_mooncake"
    """A request a line, which may wait for others."""
    APPLIED_COMPUTE_AGENTIC = "applied_compute_agentic"
    """A whole session a line, by its lengths; without arrivals."""
    DYNAMO = "dynamo"
    """Request traces of Dynamo's front end, in one file or several."""


@frozen
class Turn:
    """One request of a session.

    `name` is of this one turn in the whole trace: its request id, else `session:turn`, else `line:N` counted from 0;
    recorded outputs are found by it. `line` counts from 1 and through all files, 0 if it comes from none. `delay_ms` is
    the time after the turn before, or after the last of those it waits for.
    """

    name: str
    line: int
    prompt: Prompt
    output_tokens: int
    delay_ms: float = 0.0
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    recorded: array[int] | None = None
    """The tokens of the answer, where the trace has them."""
    wait_for: tuple[str, ...] = ()
    """Names of the turns that end before this one begins."""


@frozen
class Session:
    """Turns that follow each other. `arrival_ms` is of the first one, None if the trace does not say.

    A session the trace has no name for has one that was made up, and is not `is_named`.
    """

    session_id: str
    turns: tuple[Turn, ...]
    arrival_ms: float | None = None
    is_named: bool = True


@frozen
class BadLine:
    """A line that is no request, by its number from 1, and what is wrong with it; of several files with its `file`."""

    line: int
    problem: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.file} line {self.line}: {self.problem}".lstrip()


@frozen
class Trace:
    """All sessions in the order of their first lines. `skipped` are the lines that were left out."""

    sessions: tuple[Session, ...]
    format: TraceFormat = TraceFormat.MOONCAKE
    skipped: tuple[BadLine, ...] = ()

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def input_tokens(self) -> int:
        """Of all prompts as they are written: those of a delta trace grow while it is replayed."""
        return sum(turn.prompt.tokens for session in self.sessions for turn in session.turns)

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for session in self.sessions for turn in session.turns)

    def spelled(self, vocabulary: range) -> Trace:
        """The same trace in the token ids of that range, for an engine that knows no others: see `spell`.

        Equal blocks stay equal, different ones differ, prompts keep their lengths. Recorded answers stay as they are.
        Raises InvalidArgument for a range of less than two ids, and for one with ids that no token has.
        """
        if len(vocabulary) < 2 or vocabulary.step < 0 or not 0 <= vocabulary[0] <= vocabulary[-1] < _TOKEN_IDS_MAX:
            raise InvalidArgument("expected at least two token ids from 0 on, the lowest first", field="vocabulary")
        return evolve(self, sessions=tuple(_spelled(session, vocabulary) for session in self.sessions))


def _spelled(session: Session, vocabulary: range) -> Session:
    turns = (evolve(turn, prompt=evolve(turn.prompt, vocabulary=vocabulary)) for turn in session.turns)
    return evolve(session, turns=tuple(turns))


@define
class SharedPrefixes:
    """Gives out hash ids, each new but those of the first blocks of a group. Nothing is shared without groups."""

    ratio: float = 0.0
    groups: int = 0
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
        """How many of so many blocks are shared: the ratio of them, halves rounded up."""
        return floor(blocks * self.ratio + 0.5) if self.are_shared else 0

    def blocks(self, blocks: int, shared: int, group: int | None) -> array[int]:
        """The ids of a prompt's blocks; the first `shared` are those of the group."""
        ids = array("I")
        if group is not None:
            known = self._shared.setdefault(group, array("I"))
            while len(known) < shared:
                known.append(next(self._next_id))
            ids.extend(known[:shared])
        while len(ids) < blocks:
            ids.append(next(self._next_id))
        return ids
