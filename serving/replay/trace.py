"""Trace: sessions of turns, which is what every source of load becomes before it is replayed."""

from __future__ import annotations

from array import array
from enum import StrEnum

from attrs import frozen

from .prompts import Prompt


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
    """Request traces of Dynamo's front end. Not built: reading one is refused."""


@frozen
class Turn:
    """One request of a session.

    `name` is of this one turn in the whole trace: its request id, else `session:turn`, else `line:N` counted from 0;
    recorded outputs are found by it. `line` counts from 1, 0 if it comes from no file. `delay_ms` is the time after
    the turn before, or after the last of those it waits for.
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
    """A line that is no request, by its number from 1, and what is wrong with it."""

    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.problem}"


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

    @property
    def has_recorded_outputs(self) -> bool:
        return any(turn.recorded is not None for session in self.sessions for turn in session.turns)
