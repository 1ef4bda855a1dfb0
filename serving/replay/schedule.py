"""Schedule: when each request is due, and which ones become due at the end of another. It never waits itself.

    due = schedule.take_due(now_ms)        the requests to send now, in order
    schedule.ended(one, now_ms)            its session continues, or another one begins
    schedule.next_due_ms()                 sleep until then; None: until another request ends

Source: dynamo lib/mocker/src/loadgen/driver.rs, WorkloadDriver. Other than there, requests that can never be sent
because one before them failed are counted, and times differ by the rounding of a clock in seconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from attrs import define, field, frozen

from pipeline import InvalidArgument

from .traces import KeptHashes, Session, Trace, TraceFormat, Turn

SAME_MOMENT_MS = 1e-6
"""Times this close are equal: a clock in seconds does not represent each millisecond exactly."""

_Place: TypeAlias = tuple[int, int]
"""Index of a session, index of a turn in it."""


@frozen(eq=False)
class DueRequest:
    """A request to send."""

    due_ms: float
    """Its arrival; latencies count from here."""
    session_index: int
    """In the trace."""
    turn_index: int
    """In its session."""
    session: Session
    turn: Turn
    history: array[int] | None = None
    """The tokens before its own ones, in a delta trace."""
    kept_hashes: KeptHashes | None = None
    """Those of the trace."""

    @property
    def name(self) -> str:
        """Its name, unique in the trace."""
        return self.turn.name

    @property
    def input_tokens(self) -> int:
        return self.turn.prompt.tokens + (0 if self.history is None else len(self.history))

    def token_ids(self) -> list[int]:
        """Return the whole prompt, a new list each time."""
        own = self.turn.prompt.token_ids()
        return [*self.history, *own] if self.history else own

    def packed(self) -> array[int]:
        """Return the whole prompt as a new array of u32, with its hashes where it has no history."""
        own = self.turn.prompt.packed(self.kept_hashes)
        return self.history + own if self.history else own


@define(eq=False)
class Schedule:
    """The load of a trace: open loop (recorded arrivals) or closed loop (a number of sessions at a time).

    Times are milliseconds since the start and never decrease. Requests due at the same time are ordered by session,
    then by turn.
    """

    trace: Trace
    speed_up: float
    _sessions_at_a_time: int | None
    _heap: list[tuple[float, int, int]] = field(factory=list)
    _open: dict[int, array[int] | None] = field(factory=dict)
    """The sessions that have begun and not ended, with their history in a delta trace."""
    _in_flight: set[_Place] = field(factory=set)
    _next_session: int = 0
    _left_to_wait_for: dict[int, int] = field(factory=dict)
    _waiting: dict[str, list[int]] = field(factory=dict)
    unsent_requests: int = 0
    """Requests that can never be sent, because one before them failed."""
    sent_requests: int = 0

    @classmethod
    def of(cls, trace: Trace, *, speed_up: float = 1.0, sessions_at_a_time: int | None = None) -> Schedule:
        """Return the closed loop of that many sessions, else the open loop."""
        if sessions_at_a_time is None:
            return cls.open_loop(trace, speed_up=speed_up)
        return cls.closed_loop(trace, sessions_at_a_time, speed_up=speed_up)

    @classmethod
    def open_loop(cls, trace: Trace, *, speed_up: float = 1.0) -> Schedule:
        """Return a schedule in which sessions arrive as recorded, the first at 0.

        `speed_up` divides times between arrivals, and think times. Raise InvalidArgument for a session without arrival,
        and unless the speed-up is finite and above 0.
        """
        schedule = cls(trace, _checked(speed_up), None)
        arrivals = {}
        for index, session in enumerate(trace.sessions):
            if session.turns[0].wait_for:
                schedule._wait(index, session.turns[0])
            elif session.arrival_ms is None:
                line = f"line {session.turns[0].line}: " if session.turns[0].line else ""
                raise InvalidArgument(
                    f"{line}session {session.session_id!r} has no timestamp to begin at; "
                    "without one a trace needs a number of sessions at a time",
                    field="trace",
                )
            else:
                arrivals[index] = session.arrival_ms
        first_ms = min(arrivals.values(), default=0.0)
        for index, arrival_ms in arrivals.items():
            schedule._begin(index, (arrival_ms - first_ms) / speed_up)
        schedule._next_session = len(trace.sessions)
        return schedule

    @classmethod
    def closed_loop(cls, trace: Trace, sessions_at_a_time: int, *, speed_up: float = 1.0) -> Schedule:
        """Return a schedule with that many sessions at a time, without arrivals and with think times.

        Raise InvalidArgument for fewer than one, and for a trace whose requests wait for those of other sessions.
        """
        if sessions_at_a_time < 1:
            raise InvalidArgument(f"must be at least 1, got {sessions_at_a_time}", field="replay_concurrency")
        if trace.format is TraceFormat.AGENTIC_MOONCAKE or any(one.turns[0].wait_for for one in trace.sessions):
            raise InvalidArgument("requests that wait for each other have an order already", field="replay_concurrency")
        schedule = cls(trace, _checked(speed_up), sessions_at_a_time)
        schedule._fill(0.0)
        return schedule

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self._in_flight)

    @property
    def finished(self) -> bool:
        """Whether no request is in flight and none will be due."""
        return not self._in_flight and not self._heap

    def next_due_ms(self) -> float | None:
        """Return when the next request is due; None if that depends on a request in flight."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: float) -> list[DueRequest]:
        """Return the requests that are due by now; they are in flight from here on."""
        due = []
        while self._heap and self._heap[0][0] <= now_ms + SAME_MOMENT_MS:
            due_ms, session_index, turn_index = heappop(self._heap)
            session, history = self.trace.sessions[session_index], self._open[session_index]
            turn, kept = session.turns[turn_index], self.trace.kept_hashes
            self._in_flight.add((session_index, turn_index))
            due.append(DueRequest(due_ms, session_index, turn_index, session, turn, history, kept))
        self.sent_requests += len(due)
        return due

    def ended(
        self, due: DueRequest, now_ms: float, *, output_token_ids: Sequence[int] = (), goes_on: bool = True
    ) -> None:
        """Record that a request has ended.

        `output_token_ids` are its answer, which precedes the next prompt in a delta trace. Unless the session
        `goes_on`, as after an answer or a refusal, the turns after it and the sessions that wait for it are never sent.
        Raise InvalidArgument if the request is not in flight.
        """
        place = due.session_index, due.turn_index
        if place not in self._in_flight:
            raise InvalidArgument(f"request {due.name!r} is not in flight", field="due")
        self._in_flight.remove(place)
        turns, next_turn = due.session.turns, due.turn_index + 1
        if goes_on and next_turn < len(turns):
            if due.history is not None:
                self._open[due.session_index] = due.packed() + array("I", output_token_ids)
            delay_ms = turns[next_turn].delay_ms / self.speed_up
            heappush(self._heap, (now_ms + delay_ms, due.session_index, next_turn))
            return
        self.unsent_requests += len(turns) - next_turn
        del self._open[due.session_index]
        self._fill(now_ms)
        if goes_on:
            self._release(due.name, now_ms)
        else:
            self._abandon(due.name)

    def _begin(self, index: int, at_ms: float) -> None:
        self._open[index] = array("I") if self.trace.format is TraceFormat.MOONCAKE_DELTA else None
        heappush(self._heap, (at_ms, index, 0))

    def _fill(self, now_ms: float) -> None:
        """Begin the next sessions of a closed loop while there are free places."""
        if self._sessions_at_a_time is None:
            return
        while len(self._open) < self._sessions_at_a_time and self._next_session < len(self.trace.sessions):
            self._begin(self._next_session, now_ms)
            self._next_session += 1

    def _wait(self, index: int, turn: Turn) -> None:
        self._left_to_wait_for[index] = len(turn.wait_for)
        for name in turn.wait_for:
            self._waiting.setdefault(name, []).append(index)

    def _release(self, name: str, now_ms: float) -> None:
        """Begin the sessions that waited for this request last, each after its delay."""
        for index in self._waiting.pop(name, ()):
            left = self._left_to_wait_for.get(index)
            if left is None:
                continue
            self._left_to_wait_for[index] = left - 1
            if left == 1:
                del self._left_to_wait_for[index]
                self._begin(index, now_ms + self.trace.sessions[index].turns[0].delay_ms / self.speed_up)

    def _abandon(self, name: str) -> None:
        """Drop the sessions that wait for this request, and those that wait for them."""
        names = [name]
        while names:
            for index in self._waiting.pop(names.pop(), ()):
                if self._left_to_wait_for.pop(index, None) is not None:
                    turns = self.trace.sessions[index].turns
                    self.unsent_requests += len(turns)
                    names += [turn.name for turn in turns]


def _checked(speed_up: float) -> float:
    if not 0 < speed_up < math.inf:
        raise InvalidArgument(f"must be finite and above 0, got {speed_up}", field="arrival_speedup_ratio")
    return speed_up
