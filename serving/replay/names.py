"""Names of turns and sessions: one of a kind, and the same that recorded outputs are found by."""

from __future__ import annotations

from collections import Counter
from typing import Any

from attrs import define, field

from .fields import Fields
from .rows import TraceRow


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
