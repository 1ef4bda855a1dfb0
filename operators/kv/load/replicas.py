"""ReplicaSync: routers of the same workers share their bookings, so that all of them see the same load.

    booked, prompt computed, ended ──► published to the other routers
    the other routers ──► received ──► applied: 256 at a time, after 1 ms, and before each decision

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there every event received is applied before a
worker is chosen, and what is sent does not queue here: the event plane does not wait. And a router's bookings are its
own: the same request id booked here, or by a third router, is another booking. So a request that is prefilled in one
pool and decoded in another, or sent again through another router, never collides with itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import anyio
from attrs import frozen

from pipeline import InvalidArgument
from pipeline.network import EndpointId, Event, EventPlane, Scope
from pipeline.rx import DisposableBase

from ..errors import BookingError
from .booking_events import (
    ACTIVE_SEQUENCES_TOPIC,
    ENDED,
    ActiveSequenceEvent,
    AddRequest,
    MarkPrefillCompleted,
    RouterSteps,
    Step,
)
from .sequences import ActiveRequest, ActiveSequences, SequenceLoad

ReceivedEvent: TypeAlias = tuple[float, ActiveSequenceEvent]
"""An event and when it was received."""


@frozen
class Applied:
    """What a batch changed: whether loads must be published, and whether waiting requests may go on."""

    loads_changed: bool
    made_room: bool
    dropped: int


def apply_events(
    sequences: ActiveSequences, received: Sequence[ReceivedEvent], *, registered_only: bool = False
) -> Applied:
    """Apply a batch of other routers' events; an added prompt begins when its event was received.

    A booking on an unknown worker opens an account for it, or is dropped and counted with `registered_only`. A second
    booking of an id replaces the first: its router would not book it again unless the first had ended. The end of an
    unknown request changes nothing.
    """
    loads_changed = made_room = False
    dropped = 0
    for received_s, event in received:
        booked_as, data = _booked_as(event), event.data
        known = sequences.get(booked_as)
        if isinstance(data, MarkPrefillCompleted):
            if known is not None:
                made_room |= sequences.finish_prefill(known, received_s)
            continue
        if known is not None and sequences.release(known, received_s):
            loads_changed = made_room = True
        if isinstance(data, AddRequest):
            try:
                sequences.book(booked_as, event.worker, data.load(), received_s, registered_only=registered_only)
                loads_changed = True
            except (BookingError, InvalidArgument):
                dropped += 1
    return Applied(loads_changed, made_room, dropped)


def _booked_as(event: ActiveSequenceEvent) -> str:
    """The id under which another router's booking is in our account; no request of ours has such a one."""
    return f"{event.router_id}\0{event.request_id}"


def _router_of(booked_as: str) -> int | None:
    """The router that has booked a request of our account under this id; None if it is our own."""
    router_id, separator, _ = booked_as.partition("\0")
    return int(router_id) if separator and router_id.isdecimal() else None


BATCH_EVENTS = 256
"""The most steps in one event, too."""
BATCH_S = 0.001
"""Steps are applied when so many have arrived, or after so long."""
KEPT_EVENTS = 4096
"""Events of a router that are kept during its repair."""
REPORT_EVERY_S = 10.0
"""Events that could not be sent are reported this often, at most."""

_log = logging.getLogger(__name__)


class ReplicaSync:
    """The share of one KvRouter in this; the router joins it and closes it. For one loop.

    `endpoint` is that of the workers: all routers of its component receive each other's events. A booking on a worker
    that is not known here opens an account, which goes with its last booking: when the worker appears, its load is
    there already. With `registered_only` such a booking is dropped. By itself this is best effort: a router that starts
    later does not receive earlier bookings, and bookings of a router that has died expire like any other.
    `shared_bookings` repairs both.
    """

    def __init__(self, events: EventPlane, endpoint: str | EndpointId, *, registered_only: bool = False) -> None:
        where = EndpointId.parse(endpoint)
        scope = Scope(where.namespace, where.component)
        self._publisher = events.publisher(scope, ACTIVE_SEQUENCES_TOPIC)
        self._events = events.subscribe(scope, ACTIVE_SEQUENCES_TOPIC, RouterSteps, but=self._publisher)
        self._registered_only = registered_only
        self._sequences: ActiveSequences | None = None
        self._now_s: Callable[[], float] = anyio.current_time
        self._following: DisposableBase | None = None
        self._received: list[tuple[float, RouterSteps]] = []
        self._received_steps = 0
        self._unpublished: list[Step] | None = None
        """Steps of the event that is made when events are next sent; None if none is due."""
        self._made_room = False
        self._news: anyio.Event | None = None
        self._unsent = 0
        self._reported_s: float | None = None
        self._since: dict[int, deque[ActiveSequenceEvent]] = {}
        """Of each router that is being repaired, the last events since the repair began."""

    @property
    def router_id(self) -> int:
        """Whose events are ours: random, at most 2^53 - 1."""
        return self._publisher.publisher_id

    # -- for the router

    def join(self, sequences: ActiveSequences, now_s: Callable[[], float]) -> None:
        """Receive the other routers' events from now on, each as of its time by this clock.

        Raises InvalidArgument if a router has joined it already.
        """
        if self._sequences is not None:
            raise InvalidArgument("belongs to another router", field="peers")
        self._sequences, self._now_s = sequences, now_s
        self._following = self._events.subscribe(self._receive)

    def take_in(self) -> None:
        """Apply the events received, each as of its arrival."""
        if not self._received or self._sequences is None:
            return
        received = [(received_s, event) for received_s, steps in self._received for event in steps.events()]
        self._received, self._received_steps = [], 0
        applied = apply_events(self._sequences, received, registered_only=self._registered_only)
        self._made_room |= applied.made_room
        if applied.dropped:
            _log.debug("%d bookings on workers that are not known here are dropped", applied.dropped)

    def made_room(self) -> bool:
        """Apply the events received; return whether one since the last call was the end of a prompt or a request."""
        self.take_in()
        made_room, self._made_room = self._made_room, False
        return made_room

    async def run(self, wake: Callable[[], object]) -> None:
        """Apply events without a decision too, and call `wake` where that made room, until cancelled."""
        while True:
            if not self._received and not self._made_room:
                self._news = anyio.Event()
                await self._news.wait()
            await anyio.sleep(BATCH_S)
            if self.made_room():
                wake()

    def publish(self, kind: str, request: ActiveRequest, load: SequenceLoad | None = None) -> None:
        """Publish a step of a request that is or was booked here; also long after it expired or its worker left.

        Steps until events are next sent are one event; where there is no other router none is made. A failure is
        logged, with the number since the last report: routing goes on without.
        """
        if kind == ENDED and self._sequences is not None and self._sequences.get(request.request_id):
            return  # the id was booked again meanwhile, which has ended this booking at the other routers already
        steps = self._unpublished
        if steps is not None and len(steps) < BATCH_EVENTS:
            steps.append((kind, request, load))
            return
        steps = self._unpublished = [(kind, request, load)]
        try:
            if not self._publisher.publish_soon(partial(self._made, steps)):
                self._unpublished = None
        except Exception as error:
            self._unpublished = None
            self._unsent += 1
            now_s = self._now_s()
            if self._reported_s is None or now_s - self._reported_s >= REPORT_EVERY_S:
                _log.warning("%d events were not sent to the other routers: %s", self._unsent, error)
                self._unsent, self._reported_s = 0, now_s

    def close(self) -> None:
        """Receive nothing more. The ends of bookings that exist are still published."""
        if self._following is not None:
            self._following.dispose()

    # -- for the repair

    def own_bookings(self) -> Iterator[ActiveSequenceEvent]:
        """Yield this router's live requests as if each was booked now, one at a time, each as it is by then."""
        if (sequences := self._sequences) is None:
            return
        for request in sequences.booked():
            if _router_of(request.request_id) is None and sequences.is_live(request):
                load = sequences.load_of(request, self._now_s())
                yield ActiveSequenceEvent(request.request_id, request.rank, AddRequest.of(load), self.router_id)

    def begin_repair(self, router_id: int) -> None:
        """Keep the router's events from now on, to be applied once more over its bookings."""
        self._since[router_id] = deque(maxlen=KEPT_EVENTS)

    def end_repair(self, router_id: int, bookings: Iterable[ActiveSequenceEvent] | None = None) -> bool:
        """Put these bookings, and the events since the repair began, in place of what is known of the router.

        Without bookings the repair has failed and all stays as it is. Return False then, if no router has joined yet,
        and if so many events came that some of them were not kept: another repair is due.
        """
        since = self._since.pop(router_id, None)
        if bookings is None or since is None or self._sequences is None:  # the router may be gone meanwhile
            return False
        self._replace(router_id, [*bookings, *since])
        return len(since) < KEPT_EVENTS

    def forget(self, router_id: int) -> None:
        """Drop the router's bookings: it is gone."""
        self._since.pop(router_id, None)
        self._replace(router_id, [])

    # -- inside

    def _replace(self, router_id: int, events: Sequence[ActiveSequenceEvent]) -> None:
        if (sequences := self._sequences) is None:
            return
        self.take_in()
        now_s = self._now_s()
        theirs = [one for one in sequences.booked() if _router_of(one.request_id) == router_id]
        for request in theirs:
            sequences.release(request, now_s)
        apply_events(sequences, [(now_s, event) for event in events], registered_only=self._registered_only)
        self._made_room |= bool(theirs)
        if self._news is not None:
            self._news.set()

    def _made(self, steps: list[Step]) -> RouterSteps:
        """Return the event of these steps; later ones are not part of it."""
        if self._unpublished is steps:
            self._unpublished = None
        return RouterSteps.of(self.router_id, steps)

    def _receive(self, event: Event[RouterSteps]) -> None:
        steps = event.payload
        if steps.router_id == self.router_id:
            return
        if (since := self._since.get(steps.router_id)) is not None:
            since.extend(steps.events())
        self._received.append((self._now_s(), steps))
        self._received_steps += len(steps.kinds)
        if self._received_steps >= BATCH_EVENTS:
            self.take_in()
        if self._news is not None:
            self._news.set()
