"""Seat: one worker's place at a meeting, from which its side takes its turns.

The meeting decides; a seat waits for what its own side has to wait for, in its own task, and reports how it went.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope

from pipeline import Control

from .handoff import ActionKind, ActionOutcome, HandoffAction, HandoffFact
from .handoff_sides import DestinationSide, SourceSide
from .meeting import Meeting, Role

_MS_PER_S = 1000.0


class Seat:
    """One side's place: `async with` takes it and leaves it, and leaving before the end gives the hand-over up.

    In between nothing is held open, so a generator may yield while it is seated. One task at a time waits here.
    Stopping or killing `control` is leaving, at once and from anywhere; whoever waits here then gets Cancelled.
    """

    role: Role

    def __init__(self, sit: Callable[[Seat], Meeting], cancel: Callable[[], None], control: Control | None) -> None:
        self.cancel = cancel
        self.is_busy = False
        """True while its side waits for something of its own, in its own task."""
        self.has_begun = False
        """True once its side was asked for anything that may have given it blocks."""
        self._sit = sit
        self._control = control
        self._meeting: Meeting | None = None
        self._scope: CancelScope | None = None
        self._news: anyio.Event | None = None

    async def __aenter__(self) -> Self:
        """Raises as the exchange's `source` and `destination` say; then nothing was taken."""
        self._meeting = self._sit(self)
        self._forget = self._control.on_stop(self._leave) if self._control is not None else _nothing
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        self._leave(error if isinstance(error, Exception) else None)

    async def done(self) -> None:
        """Returns when the hand-over is complete.

        Raises what our own side raised, Cancelled after a stop, BackendDisconnected if the other side left or failed,
        BackendConnectionTimeout if it never came, BackendResponseTimeout if the session took too long. Our side's
        blocks are given back by then.
        """
        await self._until(lambda meeting: meeting.handoff.result == "succeeded")

    def apply(self) -> None:
        """The one call that ends this side well."""
        raise NotImplementedError

    def wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def interrupt(self) -> None:
        """Cancels what its side waits for."""
        if self._scope is not None:
            self._scope.cancel()

    def extend(self, deadline_s: float) -> None:
        if self._scope is not None:
            self._scope.deadline = deadline_s

    async def _act(self, meeting: Meeting, turn: HandoffAction) -> None:
        """Does its side's part of the action, and reports."""
        raise NotImplementedError

    def _leave(self, cause: Exception | None = None) -> None:
        if self._meeting is not None:
            self._meeting.give_up("cancelled" if cause is None else "failed", self.role, cause)

    async def _until(self, is_reached: Callable[[Meeting], bool]) -> None:
        meeting = self._meeting
        assert meeting is not None, "take the seat first: `async with`"
        while True:
            if meeting.ending is not None:
                raise meeting.ending.error_for(self.role, meeting.key.request_id)
            if is_reached(meeting):
                return
            with CancelScope(deadline=meeting.deadline_s) as self._scope:
                await self._step(meeting)
            if self._scope.cancelled_caught:  # else by an interrupt, after which this changes nothing
                meeting.give_up("timed_out")

    async def _step(self, meeting: Meeting) -> None:
        turn = meeting.take_turn(self.role)
        if turn is None:
            self._news = anyio.Event()
            await self._news.wait()
            return
        self.is_busy = self.has_begun = True
        try:
            await self._act(meeting, turn)
        except Exception as error:
            meeting.give_up("failed", self.role, error)
        finally:
            self.is_busy = False
            meeting.settle(self.role)


class SourceSeat(Seat):
    """The prefill worker's seat."""

    role = "source"

    def __init__(self, sit: Callable[[Seat], Meeting], side: SourceSide, control: Control | None) -> None:
        super().__init__(sit, side.cancel, control)
        self._side = side

    async def held(self) -> None:
        """Returns when our prefill is done and its blocks are held. Raises as `done`."""
        await self._until(lambda meeting: meeting.handoff.has(HandoffFact.SOURCE_HELD))

    def apply(self) -> None:
        self._side.release()

    async def _act(self, meeting: Meeting, turn: HandoffAction) -> None:
        self._side.submit()
        meeting.acknowledge(turn.kind, ActionOutcome.SUBMITTED)
        timing = await self._side.hold()
        meeting.perform(meeting.handoff.source_held(timing))


class DestinationSeat(Seat):
    """The decode worker's seat."""

    role = "destination"

    def __init__(self, sit: Callable[[Seat], Meeting], side: DestinationSide, control: Control | None) -> None:
        super().__init__(sit, side.cancel, control)
        self._side = side

    def apply(self) -> None:
        self._side.activate()

    async def _act(self, meeting: Meeting, turn: HandoffAction) -> None:
        if turn.kind is ActionKind.RESERVE_DESTINATION:
            meeting.acknowledge(turn.kind, ActionOutcome.ACCEPTED)
            missing_tokens = await self._side.reserve()
            meeting.perform(meeting.handoff.destination_reserved(missing_tokens))
        else:
            meeting.acknowledge(turn.kind, ActionOutcome.SCHEDULED)
            await anyio.sleep((turn.delay_ms or 0.0) / _MS_PER_S)
            meeting.perform(meeting.handoff.transfer_completed())


def _nothing() -> None:
    pass
