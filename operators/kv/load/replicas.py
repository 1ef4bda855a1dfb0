"""ReplicaSync: routers of the same workers share their bookings, so that all of them see the same load.

    booked, prompt computed, ended ──► published to the other routers
    the other routers ──► received ──► applied: 256 at a time, after 1 ms, and before each decision

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there every event received is applied before a
worker is chosen, and what is sent does not queue here: the event plane does not wait.

The events by which routers of the same workers share their requests, and how a router applies them.

Source: dynamo lib/kv-router/src/protocols.rs, ActiveSequenceEvent, and sequences/replica_sync.rs. The wire form is the
same; output blocks are not shared. Other than there a router's bookings are its own: the same request id booked here,
or by a third router, is another booking. So a request that is prefilled in one pool and decoded in another, or sent
again through another router, never collides with itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Self, TypeAlias

import anyio
from attrs import define, frozen

from pipeline import InvalidArgument
from pipeline.network import EndpointId, Event, EventPlane, Scope
from pipeline.protocols.field_rules import U32, U64, IntRange, Tagged, null
from pipeline.rx import DisposableBase

from ..errors import BookingError
from ..types import WorkerRank
from .sequences import ActiveRequest, ActiveSequences, SequenceLoad

ACTIVE_SEQUENCES_TOPIC = "active_sequences_events"
"""Topic of these events on the event plane."""

_NS = 1_000_000_000

Nanoseconds: TypeAlias = Annotated[int, IntRange(0, _NS - 1)]


@frozen
class Duration:
    """A time as other routers write it."""

    secs: U64
    """Whole seconds."""
    nanos: Nanoseconds
    """The rest, in nanoseconds."""

    @classmethod
    def of(cls, seconds: float) -> Self:
        """Return the duration, rounded to nanoseconds."""
        return cls(*divmod(round(seconds * _NS), _NS))

    @property
    def seconds(self) -> float:
        return self.secs + self.nanos / _NS


@define
class PrefillLoadHint:
    """The load of a prompt that counts."""

    initial_effective_prefill_tokens: U64
    """Prompt tokens the worker must compute."""
    expected_prefill_duration: Duration | None = null()
    """How long that takes; None if it is not modelled."""


@define
class AddRequest:
    """A request was booked."""

    token_sequence: list[U64] | None = null()
    """Sequence hashes of its blocks; None if blocks are not tracked."""
    track_prefill_tokens: bool = True
    """Whether the tokens of the hint count."""
    expected_output_tokens: U32 | None = null()
    """The client's estimate, in tokens."""
    prefill_load_hint: PrefillLoadHint | None = null()
    """None if the prompt does not count."""

    @classmethod
    def of(cls, load: SequenceLoad) -> Self:
        """Return the step in which a request with this load is booked."""
        hint = None
        if load.prefill_tokens:
            duration_s = load.prefill_duration_s
            hint = PrefillLoadHint(load.prefill_tokens, None if duration_s is None else Duration.of(duration_s))
        return cls(list(load.hashes) or None, load.prefill_tokens > 0, prefill_load_hint=hint)


@frozen
class MarkPrefillCompleted:
    """The prompt of a request is computed."""


@frozen
class Free:
    """A request has ended."""


SequenceEventData: TypeAlias = Annotated[
    AddRequest | MarkPrefillCompleted | Free,
    Tagged({"AddRequest": AddRequest, "MarkPrefillCompleted": MarkPrefillCompleted, "Free": Free}),
]


@define
class ActiveSequenceEvent:
    """One step in the life of a request, published by the router it is from. `worker` counts for `AddRequest` only."""

    request_id: str
    worker: WorkerRank
    data: SequenceEventData
    router_id: U64
    lora_name: str | None = null()


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
                sequences.book(booked_as, event.worker, _load(data), received_s, registered_only=registered_only)
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


def _load(data: AddRequest) -> SequenceLoad:
    hint = data.prefill_load_hint
    if hint is None:
        return SequenceLoad(data.token_sequence or ())
    tokens = hint.initial_effective_prefill_tokens if data.track_prefill_tokens else 0
    duration = hint.expected_prefill_duration
    return SequenceLoad(data.token_sequence or (), tokens, None if duration is None else duration.seconds)


BATCH_EVENTS = 256
BATCH_S = 0.001
"""Events are applied when so many have arrived, or after so long."""
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
        self._events = events.subscribe(scope, ACTIVE_SEQUENCES_TOPIC, ActiveSequenceEvent, but=self._publisher)
        self._registered_only = registered_only
        self._sequences: ActiveSequences | None = None
        self._now_s: Callable[[], float] = anyio.current_time
        self._following: DisposableBase | None = None
        self._received: list[ReceivedEvent] = []
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

    def publish(self, request: ActiveRequest, step: Callable[[], SequenceEventData], lora_name: str | None) -> None:
        """Publish a step of a request that is or was booked here; also long after it expired or its worker left.

        `step` makes it, where another router is there. A failure is logged, with the number since the last report:
        routing goes on without.
        """
        if step is Free and self._sequences is not None and self._sequences.get(request.request_id):
            return  # the id was booked again meanwhile, which has ended this booking at the other routers already
        try:
            self._publisher.publish_if_read(
                lambda: ActiveSequenceEvent(request.request_id, request.rank, step(), self.router_id, lora_name)
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

    def _receive(self, event: Event[ActiveSequenceEvent]) -> None:
        router_id = event.payload.router_id
        if router_id == self.router_id:
            return
        if (since := self._since.get(router_id)) is not None:
            since.append(event.payload)
        self._received.append((self._now_s(), event.payload))
        if len(self._received) >= BATCH_EVENTS:
            self.take_in()
        if self._news is not None:
            self._news.set()
