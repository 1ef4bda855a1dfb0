"""SessionRows: rows of plain Mooncake traces to sessions."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from .fields import Fields
from .names import Names, unnamed_session
from .prompts import Prompt
from .rows import TraceRow, read_row
from .trace import BadLine, Session, Turn


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
