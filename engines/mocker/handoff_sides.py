"""What a prefill and a decode worker bring to a hand-over, and how they find each other.

Whatever blocks a side got are given back by one call: the source's by `release` or `cancel`, the destination's by
`cancel`, unless `activate` made them the request's own. `cancel` follows one of these only where it, or the source's
`release`, raised. None of the three waits or asks anyio for the loop: they may run in the other side's task, or in a
plain callback when a request is stopped.
"""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from attrs import frozen

from pipeline.protocols import BootstrapInfo

from .handoff_timing import TransferTiming


class SourceSide(Protocol):
    """The prefill worker's part, for one request. `cancel` comes only after `submit`, and never while `hold` waits."""

    def submit(self) -> None:
        """Queues the prefill, whose blocks are to be kept when it is done. What it raises ends the hand-over."""

    async def hold(self) -> TransferTiming:
        """Returns when the prompt is computed and its blocks are held. May be cancelled; what it raises ends it."""
        ...

    def release(self) -> None:
        """The blocks have arrived elsewhere: lets them go."""

    def cancel(self) -> None:
        """Lets go whatever it has: a queued, a running or a held prefill, or nothing at all."""


class DestinationSide(Protocol):
    """The decode worker's part, for one request. `cancel` comes only after `reserve` was called and has ended."""

    async def reserve(self) -> int:
        """Returns when there is room for the prompt, with the number of its tokens that have to be fetched.

        May be cancelled; what it raises ends the hand-over.
        """
        ...

    def activate(self) -> None:
        """The blocks have arrived: the request may decode."""

    def cancel(self) -> None:
        """Lets go whatever it has, a request that was activated included."""


@frozen
class HandoffKey:
    """Who meets: both sides bring the same. Two meetings differ in room, and in hand-over id where they have one."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    request_id: str
    handoff_id: UUID | None = None

    @classmethod
    def of(cls, info: BootstrapInfo, request_id: str) -> HandoffKey:
        """The key of a request whose router chose that meeting place."""
        return cls(info.bootstrap_host, info.bootstrap_port, info.bootstrap_room, request_id, info.handoff_id)

    @property
    def places(self) -> list[tuple[str, int, int] | UUID]:
        """The names of the meeting, each its own."""
        room = (self.bootstrap_host, self.bootstrap_port, self.bootstrap_room)
        return [room] if self.handoff_id is None else [room, self.handoff_id]

    def differs_in(self, other: HandoffKey) -> str | None:
        """The first field the two do not share, if there is one."""
        fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id", "request_id")
        return next((name for name in fields if getattr(self, name) != getattr(other, name)), None)
