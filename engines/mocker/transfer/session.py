"""TransferSession: the two sides of one transfer and what happens between them.

    source       submit ─ hold ─┐                            release
    session                     ├─► facts ─► Transfer ─► actions
    destination       reserve ──┘         transfer ─ activate

Each side waits in its own task only (`hold`; `reserve` and the time on the way), so no task belongs to the session.
Calls that do not wait run at once, in the task of their cause. A side that has to be cancelled while it waits is
interrupted and cancels itself on its way out.

The session decides; a `SessionEndpoint` waits for its own side, in its own task, and reports the outcome.

One call releases the blocks of a side: the source's `release` or `cancel`, the destination's `cancel`, unless
`activate` made them the request's own. `cancel` follows one of these only where it, or the source's `release`, raised.
None of the three waits or needs the loop: they may run in the other side's task, or in a plain callback when a request
is stopped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import anyio
from anyio import CancelScope
from attrs import evolve, frozen

from pipeline import Cancelled, Control
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected, BackendResponseTimeout, BackendUnknown

from .protocol import (
    ActionKind,
    ActionOutcome,
    EndReason,
    Transfer,
    TransferAction,
    TransferFact,
    TransferKey,
    TransferOrder,
    TransferTiming,
)

_log = logging.getLogger(__name__)

TransferRole = Literal["source", "destination"]

_SIDE: dict[ActionKind, TransferRole] = {
    **dict.fromkeys((ActionKind.SUBMIT_PREFILL, ActionKind.RELEASE_SOURCE, ActionKind.CANCEL_SOURCE), "source"),
    **dict.fromkeys((ActionKind.RESERVE_DESTINATION, ActionKind.START_TRANSFER), "destination"),
    **dict.fromkeys((ActionKind.ACTIVATE_DESTINATION, ActionKind.CANCEL_DESTINATION), "destination"),
}
"""The side that takes each action."""
_WAITING = (ActionKind.SUBMIT_PREFILL, ActionKind.RESERVE_DESTINATION, ActionKind.START_TRANSFER)
"""The actions that run in the task of their side; all others at once, in the task of their cause."""
_CANCELS = (ActionKind.CANCEL_SOURCE, ActionKind.CANCEL_DESTINATION)
_FIRST: dict[TransferOrder, TransferRole] = {"source_first": "source", "destination_first": "destination"}
_OTHER: dict[TransferRole, TransferRole] = {"source": "destination", "destination": "source"}


class SourceSide(Protocol):
    """The prefill worker's part, for one request. `cancel` comes only after `submit`, and never while `hold` waits."""

    def submit(self) -> None:
        """Queue the prefill, whose blocks are kept when it is done. What it raises ends the transfer."""

    async def hold(self) -> TransferTiming:
        """Return when the prompt is computed and its blocks are held. May be cancelled; an error ends the transfer."""
        ...

    def release(self) -> None:
        """Release the blocks, which have arrived at the decode worker."""

    def cancel(self) -> None:
        """Release everything: a queued, running or held prefill, or nothing."""


class DestinationSide(Protocol):
    """The decode worker's part, for one request. `cancel` comes only after `reserve` was called and has ended."""

    async def reserve(self) -> int:
        """Wait for room for the prompt; return the number of its tokens that have to be transferred.

        May be cancelled; what it raises ends the transfer.
        """
        ...

    def activate(self) -> None:
        """Let the request decode: its blocks have arrived."""

    def cancel(self) -> None:
        """Release everything, an activated request included."""


@frozen
class Ending:
    """Why a session ended before the transfer was complete."""

    reason: EndReason
    by: TransferRole | None = None
    """The side that ended it; None for a timeout."""
    cause: Exception | None = None
    had_met: bool = False
    """Whether both sides were there."""

    def for_absent_side(self) -> Ending:
        """Return it with the cause as text. An exception holds its frames, and they hold the request."""
        return self if self.cause is None else evolve(self, cause=BackendUnknown(str(self.cause)))

    def error_for(self, role: TransferRole, request_id: str) -> Exception:
        """Return the error for that side."""
        of = f"of the transfer of request {request_id!r}"
        if self.by == role:
            return self.cause or Cancelled(f"the {role} {of} was stopped")
        if self.by is not None:
            if self.reason != "failed":
                return BackendDisconnected(f"the {self.by} {of} left")
            # As text: the cause is a fault of that worker, and this error belongs to the other one.
            return BackendDisconnected(f"the {self.by} {of} failed: {self.cause}")
        if self.had_met:
            return BackendResponseTimeout(f"the session {of} took too long")
        return BackendConnectionTimeout(f"the {_OTHER[role]} {of} did not come in time")


class TransferSession:
    """One `Transfer` and its two endpoints. `deadline_s` is for the other side to come, then for all the rest."""

    def __init__(
        self,
        key: TransferKey,
        order: TransferOrder,
        *,
        rendezvous_s: float,
        session_s: float,
        on_over: Callable[[TransferSession], None],
    ) -> None:
        self.key = key
        self.transfer = Transfer(order)
        self.endpoints: dict[TransferRole, SessionEndpoint[Any]] = {}
        self.ending: Ending | None = None
        self.deadline_s = min(rendezvous_s, session_s)
        self._session_s = session_s
        self._on_over = on_over
        self.turns: dict[TransferRole, TransferAction] = {}
        self._owed: dict[TransferRole, ActionKind] = {}

    def endpoint(self, endpoint: SessionEndpoint[Any]) -> None:
        """Add a side. An action that is already its turn starts when its task next waits here."""
        self.endpoints[endpoint.role] = endpoint
        if len(self.endpoints) > 1:
            self.deadline_s = self._session_s
            for joined in self.endpoints.values():
                joined.extend(self._session_s)
        if endpoint.role == _FIRST[self.transfer.order]:
            self.perform(self.transfer.start())

    def perform(self, actions: list[TransferAction]) -> None:
        """Do the actions and all that follows from them at once; those that wait are left to their side's task."""
        due = deque(actions)
        while due:
            due.extend(self._do(due.popleft()))

    def acknowledge(self, kind: ActionKind, outcome: ActionOutcome) -> None:
        self.perform(self.transfer.acknowledge(kind, outcome))

    def give_up(self, reason: EndReason, by: TransferRole | None = None, cause: Exception | None = None) -> None:
        """End it, unless it is over; each side that may have blocks releases them."""
        if self._end(reason, by, cause):
            self.perform(self.transfer.give_up(reason))

    def settle(self, role: TransferRole) -> None:
        """Cancel the side if that is due; called when the side has stopped waiting."""
        kind = self._owed.pop(role, None)
        if kind is None:
            return
        try:
            self.endpoints[role].side.cancel()
        except Exception:  # nothing more can be done, and the other side must not be kept
            _log.exception("the %s of the transfer of request %r could not be cancelled", role, self.key.request_id)
        self.acknowledge(kind, ActionOutcome.APPLIED)

    def _do(self, action: TransferAction) -> list[TransferAction]:
        kind = action.kind
        if kind in _CANCELS:
            return self._cancel(kind, _SIDE[kind])
        if kind in _WAITING:
            self.turns[_SIDE[kind]] = action
        elif kind is ActionKind.COMPLETE:
            self._on_over(self)
        else:
            return self._apply(kind, _SIDE[kind])
        self._wake()
        return []

    def _apply(self, kind: ActionKind, role: TransferRole) -> list[TransferAction]:
        outcome = ActionOutcome.APPLIED
        try:
            self.endpoints[role].apply()
        except Exception as error:
            outcome = ActionOutcome.FAILED
            self._end("failed", role, error)
        return self.transfer.acknowledge(kind, outcome)

    def _end(self, reason: EndReason, by: TransferRole | None, cause: Exception | None) -> bool:
        """Record the reason and wake both sides; return False if it is over already."""
        if self.transfer.is_ending:
            return False
        self.ending = Ending(reason, by, cause, had_met=len(self.endpoints) > 1)
        self._wake()
        return True

    def _cancel(self, kind: ActionKind, role: TransferRole) -> list[TransferAction]:
        endpoint = self.endpoints.get(role)
        if endpoint is None or not endpoint.has_begun:  # issued, but never done
            return self.transfer.acknowledge(kind, ActionOutcome.NOOP)
        self._owed[role] = kind
        if endpoint.is_busy:
            endpoint.interrupt()
        else:
            self.settle(role)
        return []

    def _wake(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.wake()


_MS_PER_S = 1000.0


SideT = TypeVar("SideT", bound=SourceSide | DestinationSide)


class SessionEndpoint(Generic[SideT]):
    """One side's end of a session: entered and left by `async with`; leaving before the end gives the transfer up.

    In between nothing is held open, so a generator may yield while it is joined. One task at a time waits here.
    A stop or kill of `control` leaves at once, from anywhere; the task that waits here gets Cancelled.
    """

    role: TransferRole

    def __init__(
        self, side: SideT, join: Callable[[SessionEndpoint[SideT]], TransferSession], control: Control | None
    ) -> None:
        self.side = side
        self.is_busy = False
        """True while its side waits for something of its own, in its own task."""
        self.has_begun = False
        """True once its side was called in a way that may have given it blocks."""
        self._join = join
        self._control = Control() if control is None else control
        self._session: TransferSession | None = None
        self._scope: CancelScope | None = None
        self._news: anyio.Event | None = None

    async def __aenter__(self) -> Self:
        """Raises as described at the exchange's `source`; then nothing was taken."""
        self._session = self._join(self)
        self._forget = self._control.on_stop(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        self._leave(error if isinstance(error, Exception) else None)

    async def done(self) -> None:
        """Return when the transfer is complete.

        Raises the error of this endpoint's side, Cancelled after a stop, BackendDisconnected if the other side left or
        failed, BackendConnectionTimeout if it never came, BackendResponseTimeout if the session took too long. This
        side's blocks are released by then.
        """
        await self._until(lambda session: session.transfer.result == "succeeded")

    def apply(self) -> None:
        """Make the call that ends this side successfully."""
        raise NotImplementedError

    def wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def interrupt(self) -> None:
        """Cancel the wait of its side."""
        if self._scope is not None:
            self._scope.cancel()

    def extend(self, deadline_s: float) -> None:
        if self._scope is not None:
            self._scope.deadline = deadline_s

    async def _act(self, session: TransferSession, turn: TransferAction) -> None:
        """Do its side's part of the action and report it."""
        raise NotImplementedError

    def _leave(self, cause: Exception | None = None) -> None:
        if self._session is not None:
            self._session.give_up("cancelled" if cause is None else "failed", self.role, cause)

    async def _until(self, is_reached: Callable[[TransferSession], bool]) -> None:
        session = self._session
        assert session is not None, "enter the endpoint first: `async with`"
        while True:
            if session.ending is not None:
                raise session.ending.error_for(self.role, session.key.request_id)
            if is_reached(session):
                return
            with CancelScope(deadline=session.deadline_s) as self._scope:
                await self._step(session)
            if self._scope.cancelled_caught:  # else by an interrupt, after which this changes nothing
                session.give_up("timed_out")

    async def _step(self, session: TransferSession) -> None:
        turn = session.turns.pop(self.role, None)
        if turn is None:
            self._news = anyio.Event()
            await self._news.wait()
            return
        self.is_busy = self.has_begun = True
        try:
            await self._act(session, turn)
        except Exception as error:
            session.give_up("failed", self.role, error)
        finally:
            self.is_busy = False
            session.settle(self.role)


class SourceEndpoint(SessionEndpoint[SourceSide]):
    """The prefill worker's endpoint."""

    role = "source"

    async def held(self) -> None:
        """Return when the prefill is done and its blocks are held. Raises as `done`."""
        await self._until(lambda session: session.transfer.has(TransferFact.SOURCE_HELD))

    def apply(self) -> None:
        self.side.release()

    async def _act(self, session: TransferSession, turn: TransferAction) -> None:
        self.side.submit()
        session.acknowledge(turn.kind, ActionOutcome.SUBMITTED)
        timing = await self.side.hold()
        session.perform(session.transfer.source_held(timing))


class DestinationEndpoint(SessionEndpoint[DestinationSide]):
    """The decode worker's endpoint."""

    role = "destination"

    def apply(self) -> None:
        self.side.activate()

    async def _act(self, session: TransferSession, turn: TransferAction) -> None:
        if turn.kind is ActionKind.RESERVE_DESTINATION:
            session.acknowledge(turn.kind, ActionOutcome.ACCEPTED)
            missing_tokens = await self.side.reserve()
            session.perform(session.transfer.destination_reserved(missing_tokens))
        else:
            session.acknowledge(turn.kind, ActionOutcome.SCHEDULED)
            await anyio.sleep((turn.delay_ms or 0.0) / _MS_PER_S)
            session.perform(session.transfer.transfer_completed())
