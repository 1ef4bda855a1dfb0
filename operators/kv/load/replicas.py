"""ReplicaSync: routers of the same workers share their bookings, so that all of them see the same load.

    booked, prompt computed, ended ──► published to the other routers
    the other routers ──► received ──► applied: 256 at a time, after 1 ms, and before each decision

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there every event received is applied before a
worker is chosen, and what is sent does not queue here: the event plane does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from pipeline import InvalidArgument
from pipeline.network import EndpointId, Event, EventPlane, Scope
from pipeline.rx import DisposableBase

from .replica_events import (
    ACTIVE_SEQUENCES_TOPIC,
    ActiveSequenceEvent,
    Free,
    ReceivedEvent,
    SequenceEventData,
    apply_events,
)
from .sequences import ActiveRequest, ActiveSequences

BATCH_EVENTS = 256
BATCH_S = 0.001
"""Events are applied when so many have arrived, or after so long."""
REPORT_EVERY_S = 10.0
"""Events that could not be sent are reported this often, at most."""

_log = logging.getLogger(__name__)


class ReplicaSync:
    """The share of one KvRouter in this; the router joins it and closes it. For one loop.

    `endpoint` is that of the workers: all routers of its component receive each other's events. A booking on a worker
    that is not known here opens an account, which goes with its last booking: when the worker appears, its load is
    there already. With `registered_only` such a booking is dropped. This is best effort: a router that starts later
    does not receive earlier bookings, and bookings of a router that has died expire like any other.
    """

    def __init__(self, events: EventPlane, endpoint: str | EndpointId, *, registered_only: bool = False) -> None:
        where = EndpointId.parse(endpoint)
        scope = Scope(where.namespace, where.component)
        self._publisher = events.publisher(scope, ACTIVE_SEQUENCES_TOPIC)
        self._events = events.subscribe(scope, ACTIVE_SEQUENCES_TOPIC, ActiveSequenceEvent)
        self._registered_only = registered_only
        self._sequences: ActiveSequences | None = None
        self._now_s: Callable[[], float] = anyio.current_time
        self._following: DisposableBase | None = None
        self._received: list[ReceivedEvent] = []
        self._made_room = False
        self._news: anyio.Event | None = None
        self._unsent = 0
        self._reported_s: float | None = None

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
        received, self._received = self._received, []
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

    def publish(self, request: ActiveRequest, data: SequenceEventData, lora_name: str | None) -> None:
        """Publish a step of a request that is or was booked here; also long after it expired or its worker left.

        A failure is logged, with the number since the last report: routing goes on without.
        """
        if isinstance(data, Free) and self._sequences is not None and self._sequences.get(request.request_id):
            return  # the id was booked again meanwhile, which has ended this booking at the other routers already
        try:
            self._publisher.publish(
                ActiveSequenceEvent(request.request_id, request.rank, data, self.router_id, lora_name)
            )
        except Exception as error:
            self._unsent += 1
            now_s = self._now_s()
            if self._reported_s is None or now_s - self._reported_s >= REPORT_EVERY_S:
                _log.warning("%d events were not sent to the other routers: %s", self._unsent, error)
                self._unsent, self._reported_s = 0, now_s

    def close(self) -> None:
        """Receive nothing more. The ends of bookings that exist are still published."""
        if self._following is not None:
            self._following.dispose()

    # -- inside

    def _receive(self, event: Event[ActiveSequenceEvent]) -> None:
        if event.payload.router_id == self.router_id:
            return
        self._received.append((self._now_s(), event.payload))
        if len(self._received) >= BATCH_EVENTS:
            self.take_in()
        if self._news is not None:
            self._news.set()
