"""DirectEventPlane: the event plane of many processes without a broker."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from pipeline.rx import AnyIOScheduler, Observable

from ..discovery import Store
from ..events import Event, EventPlane, Missed, Publisher, Scope
from ..requests import RequestPlane
from .channels import DirectEventLimits
from .incoming import SubscribedChannels
from .outgoing import PublishedChannels

T = TypeVar("T")


class DirectEventPlane(EventPlane):
    """Events between the processes that share the store, over their request planes.

    Publishers are registered in the store while they exist: dropping the object removes it. Subscribers of the same
    process get payloads by reference, at once; other processes get them as MessagePack, over one stream for each
    process and channel. What waits for a process is bounded by `limits`: the oldest events are dropped, which shows in
    the numbers and as `missed`. A stream that breaks is opened again, with growing delays, while the publisher is
    registered; it goes on with the present number, and what was published meanwhile is reported as missed.

    `publish` raises CodecError for a payload without a MessagePack form that another process reads. `wall_ms` dates the
    events, `rng` draws ids and varies delays. One loop opens and uses it; only `publish` works in every thread.
    """

    def __init__(
        self,
        store: Store,
        requests: RequestPlane,
        scheduler: AnyIOScheduler,
        wall_ms: Callable[[], int],
        rng: Random,
        limits: DirectEventLimits | None = None,
    ) -> None:
        limits = limits or DirectEventLimits()
        self._requests = requests
        self.incoming = SubscribedChannels(store, requests, scheduler, limits, rng, lambda: self.outgoing.server)
        """What this process subscribes to."""
        self.outgoing = PublishedChannels(store, scheduler, limits, self.incoming, wall_ms, rng)
        """What this process publishes."""

    async def open(self) -> None:
        """Serve the channels of this process. Raise as `RequestPlane.serve`."""
        await self.outgoing.open(self._requests)

    def publisher(self, scope: Scope, topic: str) -> Publisher:
        """Return a new publisher. Raise StreamClosed before `open`, and InvalidArgument for names that are no text."""
        return self.outgoing.publisher((scope, topic))

    def subscribe(
        self, scope: Scope, topic: str, payload_type: type[T], *, but: Publisher | None = None
    ) -> Observable[Event[T]]:
        return self.incoming.subscribe((scope, topic), payload_type, but)

    def missed(self, scope: Scope, topic: str) -> Observable[Missed]:
        return self.incoming.missed((scope, topic))

    async def close(self) -> None:
        """Remove the publishers from the store, complete all subscriptions and end all streams."""
        self.incoming.close()
        await self.outgoing.close()
