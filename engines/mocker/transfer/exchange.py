"""TransferExchange: connects the prefill and the decode worker of a request, inside one process.

    prefill worker ── async with exchange.source(key, side) ───────┐
                                                                   ├─► TransferSession: one transfer
    decode worker ─── async with exchange.destination(key, side) ──┘

Source: dynamo lib/mocker/src/services/bootstrap.rs, BootstrapServer. Other than there, both sides are in one process,
so there is no socket and no frame; the limits and the rule about identities are the same. A side that comes after the
other gave up fails at once instead of waiting. Between two processes the prefill worker's exchange counts: `across`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import anyio
from attrs import frozen

from pipeline import Control, InvalidArgument, WorkerOverloaded

from .protocol import Transfer, TransferKey, TransferOrder
from .session import (
    DestinationEndpoint,
    DestinationSide,
    Ending,
    SessionEndpoint,
    SourceEndpoint,
    SourceSide,
    TransferRole,
    TransferSession,
)

Place = tuple[str, int, int] | UUID

RENDEZVOUS_TIMEOUT_S = 30.0
SESSION_TIMEOUT_S = 300.0
WAITING_MAX = 256


@frozen
class _Missed:
    """How a session ended before the other side came, and how long that is remembered."""

    ending: Ending
    absent: TransferRole
    until_s: float


class TransferExchange:
    """One for all workers of a deployment; they share an engine type, and with it the order.

    The side that comes first waits `rendezvous_timeout_s` for the other; the whole transfer, from then on, may take
    `session_timeout_s`. At most `waiting_max` sides wait at once. It owns no task and needs no close: a session is gone
    when both sides have released or transferred their blocks.
    """

    def __init__(
        self,
        order: TransferOrder = "source_first",
        *,
        rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.order: TransferOrder = Transfer(order).order  # which refuses an unknown one
        self._rendezvous_timeout_s = rendezvous_timeout_s
        self.session_timeout_s = session_timeout_s
        self.hosts: set[str] = set()
        """Addresses at which workers of other processes reach prefill workers of this exchange."""
        self._waiting_max = waiting_max
        self._sessions: dict[Place, TransferSession] = {}
        self._waiting: set[TransferSession] = set()
        self._missed: dict[TransferKey, _Missed] = {}

    @property
    def waiting(self) -> int:
        """Sides that wait for their other side."""
        return len(self._waiting)

    @property
    def sessions(self) -> int:
        """Transfers under way, waiting ones included."""
        return len(set(self._sessions.values()))

    @property
    def transfers(self) -> int:
        """Transfers with blocks on their way."""
        return sum(session.transfer.is_transferring for session in set(self._sessions.values()))

    def source(self, key: TransferKey, side: SourceSide, control: Control | None = None) -> SourceEndpoint:
        """Return the prefill worker's endpoint, entered with `async with`; `control` is that of its request.

        Entering it raises InvalidArgument if the session has a source already, or was opened by the other side with
        another identity, unless it is ending and only waits for its sides to leave; and WorkerOverloaded if too many
        wait. The sides already there are not affected.
        """
        return SourceEndpoint(side, lambda endpoint: self.join(key, endpoint), control)

    def destination(
        self, key: TransferKey, side: DestinationSide, control: Control | None = None
    ) -> DestinationEndpoint:
        """Return the decode worker's endpoint; the rest as `source`."""
        return DestinationEndpoint(side, lambda endpoint: self.join(key, endpoint), control)

    def join(self, key: TransferKey, endpoint: SessionEndpoint[Any]) -> TransferSession:
        """Return the session with the endpoint in it. Raise as `source`."""
        session = self._find(key, endpoint.role)
        if session is not None:
            self._waiting.discard(session)
        elif (missed := self._missed_by(key, endpoint.role)) is not None:
            session = self._session(key)
            session.give_up(missed.reason, missed.by, missed.cause)
        else:
            session = self._open(key)
        session.endpoint(endpoint)
        return session

    def _find(self, key: TransferKey, role: TransferRole) -> TransferSession | None:
        """Return the session under one of the key's names, if this side may join it."""
        for place in key.places:
            session = self._sessions.get(place)
            if session is None:
                continue
            changed = session.key.differs_in(key)
            if session.transfer.is_ending and (changed is not None or role in session.endpoints):
                continue  # over but for a side on its way out: a new session begins
            if changed is not None:
                raise InvalidArgument(f"{changed} differs from that of the side already there", field=changed)
            if role in session.endpoints:
                raise InvalidArgument(f"the transfer has a {role} already", field="bootstrap_room")
            return session
        return None

    def _missed_by(self, key: TransferKey, role: TransferRole) -> Ending | None:
        """Return why this side comes too late, if it does. The side that left may come again."""
        now_s = anyio.current_time()
        self._missed = {key: missed for key, missed in self._missed.items() if missed.until_s > now_s}
        missed = self._missed.pop(key, None)
        return missed.ending if missed is not None and missed.absent == role else None

    def _open(self, key: TransferKey) -> TransferSession:
        if len(self._waiting) >= self._waiting_max:
            raise WorkerOverloaded(f"{self._waiting_max} transfers are waiting for their other side already")
        session = self._session(key)
        self._sessions.update(dict.fromkeys(key.places, session))
        self._waiting.add(session)
        return session

    def _session(self, key: TransferKey) -> TransferSession:
        now_s = anyio.current_time()
        rendezvous_s, session_s = now_s + self._rendezvous_timeout_s, now_s + self.session_timeout_s
        return TransferSession(key, self.order, rendezvous_s=rendezvous_s, session_s=session_s, on_over=self._close)

    def _close(self, session: TransferSession) -> None:
        self._waiting.discard(session)
        held = [place for place in session.key.places if self._sessions.get(place) is session]
        for place in held:
            del self._sessions[place]
        if not held or session.ending is None or len(session.endpoints) != 1:
            return
        if len(self._missed) < self._waiting_max:
            absent: TransferRole = "destination" if "source" in session.endpoints else "source"
            self._missed[session.key] = _Missed(session.ending.for_absent_side(), absent, session.deadline_s)
