"""AgenticRows: rows that wait for each other, each a session of one turn.

Source: dynamo lib/mocker/src/loadgen/trace.rs, AgenticTrace::from_agentic_mooncake. Other than there, a prompt longer
than its hash ids cover is cut as in every other format, and all rows that wait in a circle are named.
"""

from __future__ import annotations

from typing import Any

from attrs import define, field

from .fields import Fields
from .names import Names, unnamed_session
from .rows import TraceRow, read_row
from .sessions import make_turn
from .trace import BadLine, Session, Turn


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
