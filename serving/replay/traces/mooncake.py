"""TraceRow: what one line of a Mooncake trace says, in our names and units.

    {"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

Source: dynamo lib/data-gen/src/mooncake.rs, MooncakeRow and AgenticMooncakeRow. Other than there, all that is wrong
with a line is said at once, hash ids above 32 bits are refused instead of cut, and a plain row that says what only
agentic ones may is refused instead of replayed without it.

Names of turns and sessions: one of a kind, and the same that recorded outputs are found by.

SessionRows: rows of plain Mooncake traces to sessions.

AgenticRows: rows that wait for each other, each a session of one turn.

Source: dynamo lib/mocker/src/loadgen/trace.rs, AgenticTrace::from_agentic_mooncake. Other than there, a prompt longer
than its hash ids cover is cut as in every other format, and all rows that wait in a circle are named.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from attrs import define, field, frozen

from .fields import Fields, shown
from .trace import BadLine, Prompt, Session, Turn

AGENTIC_FIELDS = ("wait_for", "branches", "tool_wait_ms", "prefix_reset")
"""What only rows of the format agentic_mooncake say."""


@frozen
class TraceRow:
    """One request of a trace. Times are in milliseconds; None is what the line does not say.

    `branches` and `prefix_reset` describe what the hash ids show as well; a replay does not look at them.
    """

    hash_ids: array[int]
    output_tokens: int
    input_tokens: int | None = None
    timestamp_ms: float | None = None
    request_id: str | None = None
    session_id: str | None = None
    delay_ms: float | None = None
    priority: int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    output_token_ids: array[int] | None = None
    wait_for: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    tool_wait_ms: float | None = None
    prefix_reset: bool = False


def read_row(value: Any, *, agentic: bool = False) -> TraceRow:
    """The row a JSON value stands for. Raises InvalidArgument that says all that is wrong with it."""
    fields = Fields(value if isinstance(value, dict) else {})
    if not isinstance(value, dict):
        fields.problem(f"it is {shown(value)}, not an object")
        fields.check()
    hash_ids, output_tokens = _required(fields)
    row = TraceRow(
        hash_ids=hash_ids,
        output_tokens=output_tokens or 0,
        input_tokens=fields.whole("input_length", "input_tokens", low=1),
        timestamp_ms=fields.number("timestamp", "created_time"),
        request_id=fields.text("request_id"),
        session_id=fields.text("session_id"),
        delay_ms=fields.number("delay", "delay_ms"),
        priority=fields.whole("priority", low=-(2**31), high=2**31 - 1),
        strict_priority=fields.whole("strict_priority"),
        policy_class=fields.text("policy_class"),
        output_token_ids=_recorded(fields, output_tokens),
        wait_for=fields.texts("wait_for") if agentic else (),
        branches=fields.texts("branches") if agentic else (),
        tool_wait_ms=fields.number("tool_wait_ms") if agentic else None,
        prefix_reset=bool(fields.flag("prefix_reset")) if agentic else False,
    )
    _check_kind(fields, row, agentic)
    fields.check()
    return row


def _required(fields: Fields) -> tuple[array[int], int | None]:
    """What every row says: its hash ids and the length of its answer."""
    hash_ids = fields.ids("hash_ids")
    if fields.raw("hash_ids") is None:
        fields.problem("hash_ids is missing")
    elif hash_ids is not None and not hash_ids:
        fields.problem("hash_ids is empty")
    output_tokens = fields.whole("output_length", "output_tokens")
    if fields.values.get("output_length") is None and fields.values.get("output_tokens") is None:
        fields.problem("output_length is missing")
    return hash_ids or array("I"), output_tokens


def _recorded(fields: Fields, output_tokens: int | None) -> array[int] | None:
    """The recorded output, which has as many tokens as the line says and at least one."""
    tokens = fields.ids("output_token_ids")
    if tokens is None:
        return None
    if not tokens:
        fields.problem("output_token_ids is empty, a recorded output has at least one token")
    elif output_tokens is not None and output_tokens != len(tokens):
        fields.problem(f"output_length is {output_tokens}, there are {len(tokens)} output_token_ids")
    return tokens


def _check_kind(fields: Fields, row: TraceRow, agentic: bool) -> None:
    """What a row of one format must say and one of the other must not."""
    if not agentic:
        for name in AGENTIC_FIELDS:
            if fields.is_given(name):
                fields.problem(f"{name} is of the format agentic_mooncake")
        return
    if row.request_id is None:
        fields.problem("request_id is missing")
    elif row.request_id in row.wait_for:
        fields.problem("it waits for itself")
    if not row.wait_for and (row.delay_ms or row.tool_wait_ms):
        fields.problem("delay and tool_wait_ms are of rows that wait for others")


@define
class Names:
    """Gives out the names of a trace's turns, line by line.

    Source: dynamo lib/mocker/src/loadgen/types.rs, effective_replay_key.
    """

    _turns: Counter[str] = field(factory=Counter)
    _lines: dict[str, int] = field(factory=dict)

    def count_turn(self, value: Any) -> int:
        """How many lines of this one's session came before it; bad lines count too, as long as they name one."""
        session = value.get("session_id") if isinstance(value, dict) else None
        if not isinstance(session, str) or not session.strip():
            return 0
        self._turns[session.strip()] += 1
        return self._turns[session.strip()] - 1

    def give(self, row: TraceRow, index: int, turn: int, problems: Fields) -> str:
        """The name of a row; one that is taken is a problem."""
        name = row.request_id or (f"{row.session_id}:{turn}" if row.session_id else f"line:{index}")
        if name in self._lines:
            problems.problem(f"{name!r} is the name of line {self._lines[name]} already")
        return name

    def take(self, name: str, index: int) -> None:
        """Nobody else gets this name."""
        self._lines[name] = index + 1


def unnamed_session(line: int, taken: set[str]) -> str:
    """The name of a session that has none, of the line that is all of it; `taken` are given by the trace itself."""
    name = f"request_{line}"
    while name in taken:
        name += "_"
    return name


@define
class _Growing:
    """A session while its lines come. `last_timestamp_ms` is the newest one that was given."""

    session_id: str | None
    line: int
    arrival_ms: float | None
    last_timestamp_ms: float | None
    turns: list[Turn] = field(factory=list)

    def think_ms(self, row: TraceRow, problems: Fields) -> float:
        """The time between the turn before and this row."""
        if not self.turns:
            if row.delay_ms:
                problems.problem("delay is not allowed on the first turn of a session")
            return 0.0
        if row.delay_ms is not None:
            return row.delay_ms
        if row.timestamp_ms is None:
            return 0.0
        if self.last_timestamp_ms is None:
            problems.problem("no turn before it has a timestamp, so its delay is not known")
            return 0.0
        if row.timestamp_ms < self.last_timestamp_ms:
            problems.problem(f"timestamp {row.timestamp_ms:g} is before that of the turn before it")
        return row.timestamp_ms - self.last_timestamp_ms


@define
class SessionRows:
    """Lines with the same `session_id` are turns of one session; a line without one is a session of its own."""

    block_size_tokens: int
    _names: Names = field(factory=Names)
    _named: dict[str, _Growing] = field(factory=dict)
    _all: list[_Growing] = field(factory=list)

    def add(self, value: Any, index: int) -> None:
        """Takes a line. Raises InvalidArgument for a bad one, which then leaves no trace but its turn's number."""
        turn_index = self._names.count_turn(value)
        row = read_row(value)
        known = None if row.session_id is None else self._named.get(row.session_id)
        session = known or _Growing(row.session_id, index + 1, row.timestamp_ms, row.timestamp_ms)
        problems = Fields({})
        delay_ms = session.think_ms(row, problems)
        name = self._names.give(row, index, turn_index, problems)
        problems.check()
        self._names.take(name, index)
        session.turns.append(make_turn(row, name, index, self.block_size_tokens, delay_ms))
        if row.timestamp_ms is not None:
            session.last_timestamp_ms = row.timestamp_ms
        if known is None:
            self._all.append(session)
            if row.session_id is not None:
                self._named[row.session_id] = session

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        taken = set(self._named)
        return [
            Session(
                unnamed_session(one.line, taken) if one.session_id is None else one.session_id,
                tuple(one.turns),
                one.arrival_ms,
                one.session_id is not None,
            )
            for one in self._all
        ], []


def make_turn(row: TraceRow, name: str, index: int, block_size_tokens: int, delay_ms: float) -> Turn:
    """The turn of a row."""
    return Turn(
        name=name,
        line=index + 1,
        prompt=Prompt.of(row.hash_ids, block_size_tokens, row.input_tokens),
        output_tokens=row.output_tokens,
        delay_ms=delay_ms,
        priority=row.priority,
        strict_priority=row.strict_priority,
        policy_class=row.policy_class,
        recorded=row.output_token_ids,
        wait_for=tuple(dict.fromkeys(row.wait_for)),
    )


@define
class AgenticRows:
    """A row begins at its timestamp, or `delay` and `tool_wait_ms` after the last of those it waits for has ended.

    Rows may wait for later ones. A row without either begins with the trace.
    """

    block_size_tokens: int
    _names: Names = field(factory=Names)
    _rows: list[tuple[TraceRow, Turn]] = field(factory=list)

    def add(self, value: Any, index: int) -> None:
        row = read_row(value, agentic=True)
        delay_ms = (row.delay_ms or 0.0) + (row.tool_wait_ms or 0.0)
        problems = Fields({})
        name = self._names.give(row, index, 0, problems)
        problems.check()
        self._names.take(name, index)
        self._rows.append((row, make_turn(row, name, index, self.block_size_tokens, delay_ms)))

    def finish(self) -> tuple[list[Session], list[BadLine]]:
        """All sessions that can ever begin; the others are bad lines."""
        taken = {row.session_id for row, _ in self._rows if row.session_id is not None}
        bad = {one.line: one for one in never_begin([turn for _, turn in self._rows])}
        return [
            Session(
                row.session_id or unnamed_session(turn.line, taken),
                (turn,),
                None if turn.wait_for else row.timestamp_ms or 0.0,
                row.session_id is not None,
            )
            for row, turn in self._rows
            if turn.line not in bad
        ], list(bad.values())


def never_begin(turns: list[Turn]) -> list[BadLine]:
    """The turns that wait for one that is not there, for each other, or for one of these."""
    by_name = {turn.name: turn for turn in turns}
    left = {turn.name: len(turn.wait_for) for turn in turns}
    waiting: dict[str, list[str]] = {}
    for turn in turns:
        for name in turn.wait_for:
            waiting.setdefault(name, []).append(turn.name)
    ended = [name for name, count in left.items() if count == 0]
    for name in ended:  # which grows while it is gone through
        for other in waiting.get(name, ()):
            left[other] -= 1
            if left[other] == 0:
                ended.append(other)
    stuck = left.keys() - set(ended)
    return [BadLine(turn.line, _why(turn, by_name, stuck)) for turn in turns if turn.name in stuck]


def _why(turn: Turn, by_name: dict[str, Turn], stuck: set[str]) -> str:
    unknown = [name for name in turn.wait_for if name not in by_name]
    if unknown:
        return f"it waits for {', '.join(map(repr, unknown))}, which is no request of this trace"
    name = next(name for name in turn.wait_for if name in stuck)
    return (
        f"it waits for {name!r} of line {by_name[name].line}, which never ends: it waits too, in a circle or for nobody"
    )
