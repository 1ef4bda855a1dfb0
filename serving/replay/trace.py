"""Trace: sessions of turns, which is what every source of load becomes before it is replayed."""

from __future__ import annotations

from array import array
from enum import StrEnum

from attrs import evolve, frozen

from pipeline import InvalidArgument

from .prompts import Prompt

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
