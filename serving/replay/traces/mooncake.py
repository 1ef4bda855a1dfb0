"""Mooncake traces: a request a line, plain or agentic.

    {"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

In a plain trace the lines of a session are its turns. In an agentic trace a line names the requests it waits for, and
is a session of its own.

Source: dynamo lib/data-gen/src/mooncake.rs, MooncakeRow and AgenticMooncakeRow. Other than there, all problems of a
line are reported at once, hash ids above 32 bits are refused instead of cut, and a plain row with fields of agentic
ones is refused instead of replayed without them.
Source: dynamo lib/mocker/src/loadgen/trace.rs, AgenticTrace::from_agentic_mooncake. Other than there, a prompt longer
than its hash ids cover is cut as in every other format, and all rows that wait in a circle are named.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument

from .fields import Fields
from .trace import BLOCK_TOKENS, BadLine, Prompt, Session, Turn

AGENTIC_FIELDS = ("wait_for", "branches", "tool_wait_ms", "prefix_reset")
"""Fields of the format agentic_mooncake only."""


@frozen
class TraceRow:
    """One line of a trace, in our names and units. A field is None if the line lacks it."""

    turn: Turn
    """Without its name, its line and its delay, which depend on the other lines."""
    timestamp_ms: float | None
    """The arrival."""
    request_id: str | None
    session_id: str | None
    delay_ms: float | None
    """Time after the turn before."""
    tool_wait_ms: float | None
    """Time of tools after the last request it waits for."""


def read_row(value: Any, block_size_tokens: int = BLOCK_TOKENS, *, agentic: bool = False) -> TraceRow:
    """Return the row of a JSON value. Raise InvalidArgument with all problems."""
    fields = Fields.of(value)
    hash_ids = fields.ids("hash_ids", is_needed=True)
    if hash_ids is not None and not hash_ids:
        fields.problem("hash_ids is empty")
    output_tokens = fields.whole("output_length", "output_tokens", is_needed=True)
    input_tokens = fields.whole("input_length", "input_tokens", low=1)
    row = TraceRow(
        timestamp_ms=fields.number("timestamp", "created_time"),
        request_id=fields.text("request_id"),
        session_id=fields.text("session_id"),
        delay_ms=fields.number("delay", "delay_ms"),
        turn=Turn(
            "",
            0,
            Prompt.of(hash_ids or array("I"), block_size_tokens, input_tokens),
            output_tokens or 0,
            priority=fields.whole("priority", low=-(2**31), high=2**31 - 1),
            strict_priority=fields.whole("strict_priority"),
            policy_class=fields.text("policy_class"),
            recorded=_recorded(fields, output_tokens),
            wait_for=tuple(dict.fromkeys(fields.texts("wait_for"))) if agentic else (),
        ),
        tool_wait_ms=fields.number("tool_wait_ms") if agentic else None,
    )
    _check_kind(fields, row, agentic)
    fields.check()
    return row


def _recorded(fields: Fields, output_tokens: int | None) -> array[int] | None:
    """Return the recorded output: at least one token, and as many as `output_length`."""
    tokens = fields.ids("output_token_ids")
    if tokens is None:
        return None
    if not tokens:
        fields.problem("output_token_ids is empty, a recorded output has at least one token")
    elif output_tokens is not None and output_tokens != len(tokens):
        fields.problem(f"output_length is {output_tokens}, there are {len(tokens)} output_token_ids")
    return tokens


def _check_kind(fields: Fields, row: TraceRow, agentic: bool) -> None:
    """Note problems with fields that the format requires or forbids."""
    if not agentic:
        for name in filter(fields.is_given, AGENTIC_FIELDS):
            fields.problem(f"{name} is of the format agentic_mooncake")
        return
    fields.texts("branches")  # a replay does not use these two: the hash ids contain what they mean
    fields.flag("prefix_reset")
    if row.request_id is None:
        fields.problem("request_id is missing")
    elif row.request_id in row.turn.wait_for:
        fields.problem("it waits for itself")
    if not row.turn.wait_for and (row.delay_ms or row.tool_wait_ms):
        fields.problem("delay and tool_wait_ms are of rows that wait for others")


@define
class TurnNames:
    """Unique names for the turns of a trace, line by line; recorded outputs are found by them.

    Source: dynamo lib/mocker/src/loadgen/types.rs, effective_replay_key.
    """

    _turns: Counter[str] = field(factory=Counter)
    _lines: dict[str, int] = field(factory=dict)

    def count_turn(self, value: Any) -> int:
        """Return how many lines of the same session came before; invalid lines with a session count too."""
        session = value.get("session_id") if isinstance(value, dict) else None
        if not isinstance(session, str) or not session.strip():
            return 0
        self._turns[session.strip()] += 1
        return self._turns[session.strip()] - 1

    def take(self, row: TraceRow, index: int, turn: int = 0, problems: Sequence[str] = ()) -> str:
        """Return the name of a row, which is in use from here on.

        Raise InvalidArgument with the other problems of the row, and if an earlier line has that name.
        """
        name = row.request_id or (f"{row.session_id}:{turn}" if row.session_id else f"line:{index}")
        if name in self._lines:
            problems = [*problems, f"{name!r} is the name of line {self._lines[name]} already"]
        if problems:
            raise InvalidArgument("; ".join(problems))
        self._lines[name] = index + 1
        return name


def session_of(
    session_id: str | None, turns: Sequence[Turn], arrival_ms: float | None, taken: Collection[str] = ()
) -> Session:
    """Return a session; one without an id gets an id that is not in `taken`."""
    name = f"request_{turns[0].line}" if session_id is None else session_id
    while session_id is None and name in taken:
        name += "_"
    return Session(name, tuple(turns), arrival_ms, session_id is not None)


@define
class _SessionBuilder:
    """A session while its lines are read."""

    session_id: str | None
    arrival_ms: float | None
    last_timestamp_ms: float | None
    """Of its last line with a timestamp."""
    turns: list[Turn] = field(factory=list)

    def think_ms(self, row: TraceRow, problems: list[str]) -> float:
        """Return the time between the turn before and this row; add what is wrong with it to `problems`."""
        if not self.turns:
            if row.delay_ms:
                problems.append("delay is not allowed on the first turn of a session")
            return 0.0
        if row.delay_ms is not None:
            return row.delay_ms
        if row.timestamp_ms is None:
            return 0.0
        if self.last_timestamp_ms is None:
            problems.append("no turn before it has a timestamp, so its delay is not known")
            return 0.0
        if row.timestamp_ms < self.last_timestamp_ms:
            problems.append(f"timestamp {row.timestamp_ms:g} is before that of the turn before it")
        return row.timestamp_ms - self.last_timestamp_ms


@define
class SessionRows:
    """Sessions of a plain trace: a `session_id` names one, a line without it is a session of its own."""

    block_size_tokens: int
    _names: TurnNames = field(factory=TurnNames)
    _named: dict[str, _SessionBuilder] = field(factory=dict)
    _all: list[_SessionBuilder] = field(factory=list)

    def add(self, value: Any, index: int) -> None:
        """Add a line. Raise InvalidArgument if it is invalid; then it counts only for the numbers of later turns."""
        turn_index = self._names.count_turn(value)
        row = read_row(value, self.block_size_tokens)
        known = None if row.session_id is None else self._named.get(row.session_id)
        session = known or _SessionBuilder(row.session_id, row.timestamp_ms, row.timestamp_ms)
        problems: list[str] = []
        delay_ms = session.think_ms(row, problems)
        name = self._names.take(row, index, turn_index, problems)
        session.turns.append(evolve(row.turn, name=name, line=index + 1, delay_ms=delay_ms))
        if row.timestamp_ms is not None:
            session.last_timestamp_ms = row.timestamp_ms
        if known is None:
            self._all.append(session)
            if row.session_id is not None:
                self._named[row.session_id] = session

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        return [session_of(one.session_id, one.turns, one.arrival_ms, self._named) for one in self._all], []


@define
class AgenticRows:
    """Sessions of an agentic trace, of one turn each.

    A row begins at its timestamp, or `delay` and `tool_wait_ms` after the end of the last row it waits for, which may
    stand further below. A row with neither begins with the trace.
    """

    block_size_tokens: int
    _names: TurnNames = field(factory=TurnNames)
    _rows: list[tuple[TraceRow, Turn]] = field(factory=list)

    def add(self, value: Any, index: int) -> None:
        row = read_row(value, self.block_size_tokens, agentic=True)
        delay_ms = (row.delay_ms or 0.0) + (row.tool_wait_ms or 0.0)
        name = self._names.take(row, index)
        self._rows.append((row, evolve(row.turn, name=name, line=index + 1, delay_ms=delay_ms)))

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        """Return all sessions that can begin, and the lines of the others."""
        taken = {row.session_id for row, _ in self._rows if row.session_id is not None}
        bad = {one.line: one for one in never_begin([turn for _, turn in self._rows])}
        return [
            session_of(row.session_id, (turn,), None if turn.wait_for else row.timestamp_ms or 0.0, taken)
            for row, turn in self._rows
            if turn.line not in bad
        ], list(bad.values())


def never_begin(turns: Sequence[Turn]) -> list[BadLine]:
    """Return the turns that wait for an unknown turn, for each other, or for one that does."""
    by_name, ended = {turn.name: turn for turn in turns}, set[str]()
    order = TopologicalSorter({turn.name: turn.wait_for for turn in turns})
    with suppress(CycleError):  # those in no circle have an order still
        order.prepare()
    while ready := [name for name in order.get_ready() if name in by_name]:
        ended.update(ready)
        order.done(*ready)
    stuck = by_name.keys() - ended
    return [BadLine(turn.line, _why(turn, by_name, stuck)) for turn in turns if turn.name in stuck]


def _why(turn: Turn, by_name: dict[str, Turn], stuck: set[str]) -> str:
    unknown = [name for name in turn.wait_for if name not in by_name]
    if unknown:
        return f"it waits for {', '.join(map(repr, unknown))}, which is no request of this trace"
    name = next(name for name in turn.wait_for if name in stuck)
    return (
        f"it waits for {name!r} of line {by_name[name].line}, which never ends: it waits too, in a circle or for nobody"
    )
