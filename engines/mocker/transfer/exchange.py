"""HandoffExchange: where the prefill and the decode worker of a request meet, inside one process.

    prefill worker ── async with exchange.source(key, side) ───────┐
                                                                   ├─► Meeting: one hand-over
    decode worker ─── async with exchange.destination(key, side) ──┘

Source: dynamo lib/mocker/src/services/bootstrap.rs, BootstrapServer. Other than there, both sides are in one process,
so there is no socket and no frame; the limits and the rule about identities are the same. A side that comes after the
other gave up is told so at once, instead of waiting for nobody.
"""

from __future__ import annotations

from uuid import UUID

import anyio
from attrs import frozen

from pipeline import Control, InvalidArgument, WorkerOverloaded

from .protocol import Handoff, HandoffOrder
from .session import DestinationSeat, Ending, Meeting, Role, Seat, SourceSeat
from .sides import DestinationSide, HandoffKey, SourceSide

Place = tuple[str, int, int] | UUID

RENDEZVOUS_TIMEOUT_S = 30.0
SESSION_TIMEOUT_S = 300.0
WAITING_MAX = 256


@frozen
class _Missed:
    """How a meeting ended before the other side came, and until when that may still come."""

    ending: Ending
    absent: Role
    until_s: float


class HandoffExchange:
    """One for all workers of a deployment; they share an engine type, and with it the order.

    The side that comes first waits `rendezvous_timeout_s` for the other; the whole hand-over, from then on, may take
    `session_timeout_s`. At most `waiting_max` sides wait at once. It owns no task and needs no close: a meeting is gone
    when both sides have given back, or handed over, what they had.
    """

    def __init__(
        self,
        order: HandoffOrder = "source_first",
        *,
        rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.order: HandoffOrder = Handoff(order).order  # which refuses an unknown one
        self._rendezvous_timeout_s = rendezvous_timeout_s
        self._session_timeout_s = session_timeout_s
        self._waiting_max = waiting_max
        self._meetings: dict[Place, Meeting] = {}
        self._waiting: set[Meeting] = set()
        self._missed: dict[HandoffKey, _Missed] = {}

    @property
    def waiting(self) -> int:
        """Sides that wait for another one to come."""
        return len(self._waiting)

    @property
    def meetings(self) -> int:
        """Hand-overs that are not over."""
        return len(set(self._meetings.values()))

    @property
    def transfers(self) -> int:
        """Those of them whose blocks are on their way."""
        return sum(meeting.handoff.is_transferring for meeting in set(self._meetings.values()))

    def source(self, key: HandoffKey, side: SourceSide, control: Control | None = None) -> SourceSeat:
        """The prefill worker's seat, taken with `async with`; `control` is that of its request.

        Taking it raises InvalidArgument if that meeting has such a side already, or was arranged by the other side with
        another identity, unless that one was given up and only waits for its sides to go; and WorkerOverloaded if too
        many wait. Who sits there already notices nothing.
        """
        return SourceSeat(lambda seat: self._sit(key, seat), side, control)

    def destination(self, key: HandoffKey, side: DestinationSide, control: Control | None = None) -> DestinationSeat:
        """The decode worker's seat; the rest as `source`."""
        return DestinationSeat(lambda seat: self._sit(key, seat), side, control)

    def _sit(self, key: HandoffKey, seat: Seat) -> Meeting:
        meeting = self._find(key, seat.role)
        if meeting is not None:
            self._waiting.discard(meeting)
        elif (missed := self._missed_by(key, seat.role)) is not None:
            meeting = self._meeting(key)
            meeting.give_up(missed.reason, missed.by, missed.cause)
        else:
            meeting = self._open(key)
        meeting.seat(seat)
        return meeting

    def _find(self, key: HandoffKey, role: Role) -> Meeting | None:
        """The meeting under one of the key's names, if this side may join it."""
        for place in key.places:
            meeting = self._meetings.get(place)
            if meeting is None:
                continue
            changed = meeting.key.differs_in(key)
            if meeting.handoff.is_ending and (changed is not None or role in meeting.seats):
                continue  # it is over but for a side on its way out, and who comes now begins anew
            if changed is not None:
                raise InvalidArgument(f"{changed} differs from that of the side already there", field=changed)
            if role in meeting.seats:
                raise InvalidArgument(f"the hand-over has a {role} already", field="bootstrap_room")
            return meeting
        return None

    def _missed_by(self, key: HandoffKey, role: Role) -> Ending | None:
        """Why this side comes too late, if it does. The side that left may come again; then nothing was missed."""
        now_s = anyio.current_time()
        self._missed = {key: missed for key, missed in self._missed.items() if missed.until_s > now_s}
        missed = self._missed.pop(key, None)
        return missed.ending if missed is not None and missed.absent == role else None

    def _open(self, key: HandoffKey) -> Meeting:
        if len(self._waiting) >= self._waiting_max:
            raise WorkerOverloaded(f"{self._waiting_max} hand-overs are waiting for their other side already")
        meeting = self._meeting(key)
        self._meetings.update(dict.fromkeys(key.places, meeting))
        self._waiting.add(meeting)
        return meeting

    def _meeting(self, key: HandoffKey) -> Meeting:
        now_s = anyio.current_time()
        rendezvous_s, session_s = now_s + self._rendezvous_timeout_s, now_s + self._session_timeout_s
        return Meeting(key, self.order, rendezvous_s=rendezvous_s, session_s=session_s, on_over=self._close)

    def _close(self, meeting: Meeting) -> None:
        self._waiting.discard(meeting)
        held = [place for place in meeting.key.places if self._meetings.get(place) is meeting]
        for place in held:
            del self._meetings[place]
        if not held or meeting.ending is None or len(meeting.seats) != 1:
            return
        if len(self._missed) < self._waiting_max:
            absent: Role = "destination" if "source" in meeting.seats else "source"
            self._missed[meeting.key] = _Missed(meeting.ending, absent, meeting.deadline_s)
