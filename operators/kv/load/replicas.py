"""ReplicaSync: routers of the same workers tell each other what they book, and count each other's bookings.

    booked, prompt computed, over ──► published: the other routers
    the other routers ──► heard ──► taken in: 256 at a time, after 1 ms, and before each decision

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there nothing heard is left aside when a worker
is chosen, and what is sent does not queue here: the event plane does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from attrs import define

from pipeline import InvalidArgument
from pipeline.network import EndpointId, Event, EventPlane, Scope
from pipeline.rx import DisposableBase

from ..clock import LoopClock
from ..types import WorkerRank
from .replica_events import (
    ACTIVE_SEQUENCES_TOPIC,
    ActiveSequenceEvent,
    Free,
    MarkPrefillCompleted,
    ReceivedEvent,
    SequenceEventData,
    apply_events,
)
from .sequences import ActiveSequences, SequenceLoad

BATCH_EVENTS = 256
BATCH_S = 0.001
"""What is heard is taken in when there is so much of it, or after so long."""
REPORT_EVERY_S = 10.0
"""Events that could not be sent are reported this often, at most."""

_log = logging.getLogger(__name__)


class ReplicaSync:
    """The part of one KvRouter in this; made for a router, which joins and closes it. For one loop.

    `endpoint` is that of the workers: all routers of its component hear each other. A booking on a worker that is not
    known here opens an account that goes with its last booking, so that a worker one router sees earlier has its load
    when the others see it too; with `registered_only` such a booking is dropped. This is best effort: a router that
    comes later does not hear what was booked before, and bookings whose router has died expire as any other.
    """

    def __init__(self, events: EventPlane, endpoint: str | EndpointId, *, registered_only: bool = False) -> None:
        where = EndpointId.parse(endpoint)
        scope = Scope(where.namespace, where.component)
        self._publisher = events.publisher(scope, ACTIVE_SEQUENCES_TOPIC)
        self._events = events.subscribe(scope, ACTIVE_SEQUENCES_TOPIC, ActiveSequenceEvent)
        self._registered_only = registered_only
        self._sequences: ActiveSequences | None = None
        self._clock = LoopClock()
        self._following: DisposableBase | None = None
        self._heard: list[ReceivedEvent] = []
        self._made_room = False
        self._news: anyio.Event | None = None
        self._untold = 0
        self._reported_s: float | None = None

    @property
    def router_id(self) -> int:
        """Whose events are ours: random, at most 2^53 - 1."""
        return self._publisher.publisher_id

    # -- for the router

    def join(self, sequences: ActiveSequences, clock: LoopClock) -> None:
        """Hears the others from now on. Raises InvalidArgument if a router has joined it already."""
        if self._sequences is not None:
            raise InvalidArgument("belongs to another router", field="peers")
        self._sequences, self._clock = sequences, clock
        self._following = self._events.subscribe(self._receive)

    def take_in(self) -> None:
        """Counts what was heard, as of when it was heard."""
        if not self._heard or self._sequences is None:
            return
        heard, self._heard = self._heard, []
        applied = apply_events(self._sequences, heard, registered_only=self._registered_only)
        self._made_room |= applied.made_room
        if applied.dropped:
            _log.debug("%d bookings on workers that are not known here are dropped", applied.dropped)

    def made_room(self) -> bool:
        """Takes in what was heard; whether since the last time some of it was the end of a prompt or a request."""
        self.take_in()
        made_room, self._made_room = self._made_room, False
        return made_room

    async def run(self, wake: Callable[[], object]) -> None:
        """Takes in what nobody asks for, and calls `wake` where that made room, until cancelled."""
        while True:
            if not self._heard and not self._made_room:
                self._news = anyio.Event()
                await self._news.wait()
            await anyio.sleep(BATCH_S)
            if self.made_room():
                wake()

    def booked(self, request_id: str, rank: WorkerRank, load: SequenceLoad, lora_name: str | None) -> ReplicatedBooking:
        """Tells of a booking; what is returned tells the rest of it."""
        self._tell(ActiveSequenceEvent.added(request_id, rank, load, self.router_id, lora_name))
        return ReplicatedBooking(self, request_id, rank, lora_name)

    def close(self) -> None:
        """Hears no more. Bookings there are may still be told to be over."""
        if self._following is not None:
            self._following.dispose()

    # -- inside

    def _receive(self, event: Event[ActiveSequenceEvent]) -> None:
        if event.payload.router_id == self.router_id:
            return
        self._heard.append((self._clock.now_s(), event.payload))
        if len(self._heard) >= BATCH_EVENTS:
            self.take_in()
        if self._news is not None:
            self._news.set()

    def _tell(self, event: ActiveSequenceEvent) -> None:
        """Routing does not depend on it: a failure is logged, together with those since the last report."""
        try:
            self._publisher.publish(event)
        except Exception as error:
            self._untold += 1
            now_s = self._clock.now_s()
            if self._reported_s is None or now_s - self._reported_s >= REPORT_EVERY_S:
                _log.warning("%d events were not told to the other routers: %s", self._untold, error)
                self._untold, self._reported_s = 0, now_s

    def _is_booked(self, request_id: str) -> bool:
        return self._sequences is not None and self._sequences.get(request_id) is not None


@define(eq=False)
class ReplicatedBooking:
    """One booking of ours that the other routers know of."""

    peers: ReplicaSync
    _request_id: str
    _rank: WorkerRank
    _lora_name: str | None
    _is_over: bool = False

    def prefill_completed(self) -> None:
        """Its prompt is computed."""
        self._tell(MarkPrefillCompleted())

    def over(self) -> None:
        """It was released, here perhaps long after it had expired or its worker had gone; twice is once.

        If the same id was booked again meanwhile, that has ended it elsewhere already.
        """
        if not self._is_over:
            self._is_over = True
            if not self.peers._is_booked(self._request_id):
                self._tell(Free())

    def _tell(self, data: SequenceEventData) -> None:
        self.peers._tell(ActiveSequenceEvent(self._request_id, self._rank, data, self.peers.router_id, self._lora_name))
