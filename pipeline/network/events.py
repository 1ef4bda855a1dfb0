"""The event plane: events published to the present subscribers, without an answer or a delivery guarantee.

    publisher(scope, topic).publish(fact)  ──►  subscribe(scope, topic, type) ──► Observable[Event]
                                                missed(scope, topic) ──► Observable[Missed]: a snapshot is due

Source: dynamo lib/runtime/src/transports/event_plane. Each publisher numbers its events: a gap shows loss. Other than
there, the plane finds the gaps, also those that no later event shows.

Sequences: finds gaps and repetitions in what arrives.

Events as bytes: an envelope in MessagePack inside a frame of version and length.

    byte 0: version 1    bytes 1-4: payload length, big endian    then the payload

Source: dynamo lib/runtime/src/transports/event_plane, frame.rs and codec.rs.

Fanout: one source, many subscribers, which do not affect each other.
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

from anyio.lowlevel import checkpoint
from attrs import define, frozen

from pipeline.errors import InvalidArgument, InvalidMessage
from pipeline.protocols.field_rules import U64
from pipeline.rx import Disposable, Observable, ObserverBase
from pipeline.wire import record_reader, to_msgpack

from .names import EndpointId

T = TypeVar("T")


@frozen
class Scope:
    """A namespace, component or endpoint. Subscribers receive the events of exactly their scope."""

    namespace: str
    component: str | None = None
    endpoint: str | None = None

    @classmethod
    def of(cls, endpoint: EndpointId) -> Scope:
        """Return the scope of that endpoint."""
        return cls(endpoint.namespace, endpoint.component, endpoint.endpoint)


@define
class Event(Generic[T]):
    """A published value with its publisher and its number. It is never changed; a frozen class would cost more."""

    publisher_id: int
    sequence: int
    published_at_ms: int
    topic: str
    payload: T


@frozen
class Missed:
    """Events may have been lost on their way here: what is known from events is due for a snapshot."""

    publisher_id: int | None = None
    """Their publisher; None: any of the topic."""


class Publisher(ABC):
    """Publishes to one scope and topic under its own id, numbering events from 0."""

    publisher_id: int

    @abstractmethod
    def publish(self, payload: object) -> None:
        """Send the event to the present subscribers. Does not wait; may be called from any thread."""

    def publish_soon(self, make: Callable[[], object]) -> bool:
        """Publish what `make` returns when events are next sent, which delays no event that would leave before.

        So what comes until then can be part of one event. Return False, and never call `make`, where there is no
        subscriber; the event has its number in any case, so a subscriber that comes later is told that it has missed
        something. An event that is still to be made is made and published before the next one of its publisher. This
        publisher makes it now, and raises what `make` and `publish` raise.
        """
        self.publish(make())
        return True


class EventPlane(ABC):
    """See the module. Publisher ids are random and at most 2^53 - 1."""

    async def open(self) -> None:
        """Connect. Called once, before anything else. Raise CannotConnect if that is not possible."""
        await checkpoint()

    @abstractmethod
    def publisher(self, scope: Scope, topic: str) -> Publisher:
        """Return a new publisher."""

    @abstractmethod
    def subscribe(
        self, scope: Scope, topic: str, payload_type: type[T], *, but: Publisher | None = None
    ) -> Observable[Event[T]]:
        """Return the events published there from the subscription on, as this type. Completes when the plane closes.

        Those of the publisher `but`, which is the subscriber itself, are left out. Disposing ends the subscription. The
        exception of a subscriber does not affect others.
        """

    def missed(self, scope: Scope, topic: str) -> Observable[Missed]:
        """Return when events published there may not have come to the subscribers of this process, while it has some.

        A loss is reported once, before the publisher's next event. A plane that connects to publishers after the
        subscription reports those that had published before. This one reports nothing: it is for planes without loss.
        """
        return Observable(lambda observer, _: Disposable())

    @abstractmethod
    async def close(self) -> None:
        """Complete all subscriptions."""


class Sequences:
    """The numbers that are expected of the publishers of a topic, by which loss and repetition show.

    At most `limit` publishers are known, those of the last events; one that was forgotten begins with a gap.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._expected: OrderedDict[int, int] = OrderedDict()

    def take(self, publisher_id: int, sequence: int) -> Literal["next", "gap", "repeated"]:
        """Return how the event relates to those taken before. An unknown publisher is expected to begin with 0."""
        expected = self._expected.get(publisher_id, 0)
        if sequence < expected:
            return "repeated"
        self._expect(publisher_id, sequence + 1)
        return "next" if sequence == expected else "gap"

    def skip_to(self, publisher_id: int, next_sequence: int) -> bool:
        """Expect that number next; return whether events before it were not taken."""
        is_gap = self._expected.get(publisher_id, 0) != next_sequence
        self._expect(publisher_id, next_sequence)
        return is_gap

    def forget(self, publisher_id: int) -> None:
        """Forget the publisher."""
        self._expected.pop(publisher_id, None)

    def _expect(self, publisher_id: int, sequence: int) -> None:
        self._expected[publisher_id] = sequence
        self._expected.move_to_end(publisher_id)
        if len(self._expected) > self._limit:
            self._expected.popitem(last=False)


FRAME_VERSION = 1
_HEADER = struct.Struct(">BI")


@frozen
class EventIdentity:
    """The publisher of an event, and the event's number."""

    publisher_id: U64
    sequence: U64


@frozen
class _Envelope(EventIdentity):
    """`published_at` is in milliseconds."""

    published_at: U64
    topic: str
    payload: Any


def encode_frame(payload: bytes) -> bytes:
    """Return the payload with its version and length before it."""
    return _HEADER.pack(FRAME_VERSION, len(payload)) + payload


def decode_frame(data: bytes) -> bytes:
    """Return the payload. Raise InvalidMessage for another version and for an incomplete frame."""
    if len(data) < _HEADER.size:
        raise InvalidMessage(f"incomplete header: {len(data)} of {_HEADER.size} bytes")
    version, length = _HEADER.unpack_from(data)
    if version != FRAME_VERSION:
        raise InvalidMessage(f"unsupported version {version}")
    available = len(data) - _HEADER.size
    if available < length:
        raise InvalidMessage(f"incomplete payload: {available} of {length} bytes")
    return data[_HEADER.size : _HEADER.size + length]


def encode_event(event: Event[bytes]) -> bytes:
    """Return the envelope of an event whose payload is bytes already."""
    return to_msgpack(_Envelope(event.publisher_id, event.sequence, event.published_at_ms, event.topic, event.payload))


def decode_event(data: bytes) -> Event[bytes]:
    """Return the event in an envelope. Raise InvalidMessage for anything else."""
    envelope = _read(data, _Envelope)
    if not isinstance(envelope.payload, bytes):
        raise InvalidMessage("the payload of an event is bytes")
    return Event(envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.topic, envelope.payload)


def decode_identity(data: bytes) -> EventIdentity:
    """Publisher and sequence alone. Raise InvalidMessage for anything that is not an envelope."""
    return _read(data, EventIdentity)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        found: T = record_reader(kind)(data)
    except InvalidArgument as error:
        raise InvalidMessage(f"not an envelope: {error}") from error
    return found


_log = logging.getLogger(__name__)


class Fanout(Generic[T]):
    """Delivers each item, in order, to every subscriber that was there before it. For one thread.

    Items pushed by a subscriber during a delivery come after it. The exception of a subscriber is logged and, as in
    reactivex, ends its subscription; the other subscribers are not affected.
    """

    def __init__(self) -> None:
        self._listeners: dict[object, tuple[ObserverBase[T], Callable[[T], bool]]] = {}
        self._due: deque[tuple[T, tuple[object, ...]]] = deque()
        self._delivering = False
        self._is_complete = False

    def __len__(self) -> int:
        return len(self._listeners)

    def add(
        self, observer: ObserverBase[T], *, first: Iterable[T] = (), accepts: Callable[[T], bool] = lambda _: True
    ) -> Disposable:
        """Subscribe to the `first` items, then to items that are pushed and accepted. Disposing ends this.

        After `complete` the subscriber is completed and receives nothing else.
        """
        if self._is_complete:
            observer.on_completed()
            return Disposable()
        key = object()
        self._listeners[key] = (observer, accepts)
        self._due.extend((item, (key,)) for item in first)
        self._deliver()
        return Disposable(lambda: self._remove(key))

    def push(self, item: T) -> None:
        """Deliver the item to the present subscribers."""
        self._due.append((item, tuple(self._listeners)))
        self._deliver()

    def complete(self) -> None:
        """Complete and remove every subscriber."""
        self._is_complete = True
        listeners, self._listeners = self._listeners, {}
        for observer, _ in listeners.values():
            _guarded(observer.on_completed)

    def _remove(self, key: object) -> None:
        self._listeners.pop(key, None)

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._due:
                item, keys = self._due.popleft()
                for key in keys:
                    self._deliver_to(key, item)
        finally:
            self._delivering = False

    def _deliver_to(self, key: object, item: T) -> None:
        if key not in self._listeners:  # it stopped listening meanwhile
            return
        observer, accepts = self._listeners[key]
        if accepts(item):
            _guarded(observer.on_next, item)


def all_but(publisher: Publisher | None) -> Callable[[Event[Any]], bool]:
    """Return whether an event is of another publisher than this one; None: any is."""
    if publisher is None:
        return lambda _: True
    left_out = publisher.publisher_id
    return lambda event: event.publisher_id != left_out


def _guarded(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except Exception:
        _log.exception("a listener failed")
