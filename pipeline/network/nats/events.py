"""NatsEventPlane: the event plane over subjects of NATS, without storage.

publish ──► outbox ──► one task ──► subject of scope and topic ──► one subscription for each subject
                                                                     ├──► events, for each type of payload
                                                                     └──► missed: a gap, a reconnect, too slow
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import anyio
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from pipeline.errors import described
from pipeline.rx import CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase
from pipeline.wire import record_reader, to_msgpack

from ..events import (
    Event,
    EventPlane,
    Fanout,
    Missed,
    Publisher,
    Scope,
    Sequences,
    all_but,
    decode_event,
    decode_frame,
    encode_event,
    encode_frame,
)
from ..log_limit import LogLimit
from ..names import MAX_ID
from .broker_connection import NatsConnection
from .broker_messages import Delivered
from .broker_session import BrokerSession
from .event_outbox import Frame, Outbox
from .subjects import event_subject

_log = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING_EVENTS, _WAITING_BYTES = 2**16, 64 * 1024 * 1024
"""Events of one subject that wait to be delivered; further ones are dropped."""
_EVENTS_PER_TURN = 64
_CLOSE_TIMEOUT_S = 1.0
_SLOW_REPORT_S = 1.0
"""From the first event that is dropped, because this process is too slow, until it is reported as missed."""


class NatsEventPlane(EventPlane):
    """See the module. `wall_ms` dates the events, `rng` draws the publisher ids.

    An event reaches the subscribers of every process, this one included, through the server. It is lost, and its number
    with it, if it is larger than the server's `max_payload`, if more than `BUFFER_EVENTS` wait to be sent, as they do
    while there is no server, and for subscribers that are not connected or read too slowly. `missed` reports each gap,
    and all publishers after a reconnect. Whatever else arrives on a subject is passed over with a log line.
    """

    def __init__(self, connection: NatsConnection, wall_ms: Callable[[], int], rng: Random) -> None:
        self._connection, self._wall_ms, self._rng = connection, wall_ms, rng
        self._outbox = Outbox()
        self._subjects: dict[str, _Subject] = {}
        self._applied: set[str] = set()
        """Subjects that the outbox has had subscribed to."""
        self._sending: DisposableBase | None = None
        self._log = LogLimit(_log)
        self._is_closed = False

    @property
    def subscriptions(self) -> int:
        """Number of subscribers, those of losses included."""
        return sum(subject.subscribers for subject in self._subjects.values())

    @property
    def dropped(self) -> int:
        """Events of this process that were never sent: too large, or too many at a time."""
        return self._outbox.dropped

    async def open(self) -> None:
        """Connect, as `NatsConnection.open` does, and begin to send."""
        await self._connection.open()
        self._outbox.open()
        self._sending = self._connection.scheduler.spawn(self._send)

    def publisher(self, scope: Scope, topic: str) -> Publisher:
        """Return a new publisher. Raise InvalidArgument if scope and topic are too long for a subject."""
        subject = event_subject(scope, topic)
        return _NatsPublisher(self._outbox, subject, topic, self._rng.randint(1, MAX_ID), self._wall_ms)

    def subscribe(
        self, scope: Scope, topic: str, payload_type: type[T], *, but: Publisher | None = None
    ) -> Observable[Event[T]]:
        """See `EventPlane`. Payloads that are not of the type are passed over with a log line.

        Raise InvalidArgument if scope and topic are too long for a subject.
        """
        name, accepts = event_subject(scope, topic), all_but(but)

        def subscribe(observer: ObserverBase[Event[T]], _: Any = None) -> DisposableBase:
            if self._is_closed:
                observer.on_completed()
                return Disposable()
            subject = self._subject(name)
            if not subject.events:
                self._outbox.changed(name)
            listening = subject.events.setdefault(payload_type, Fanout()).add(observer, accepts=accepts)
            return CompositeDisposable(listening, Disposable(lambda: self._tidy(name)))

        return Observable(subscribe)

    def missed(self, scope: Scope, topic: str) -> Observable[Missed]:
        """See `EventPlane`. After a reconnect, any publisher's events may be missing."""
        name = event_subject(scope, topic)

        def subscribe(observer: ObserverBase[Missed], _: Any = None) -> DisposableBase:
            if self._is_closed:
                observer.on_completed()
                return Disposable()
            listening = self._subject(name).missed.add(observer)
            return CompositeDisposable(listening, Disposable(lambda: self._tidy(name)))

        return Observable(subscribe)

    async def close(self) -> None:
        """Complete all subscriptions. What waits to be sent is sent first, within a second, if there is a server."""
        if self._is_closed:
            return
        self._is_closed = True
        subjects, self._subjects = self._subjects, {}
        for subject in subjects.values():
            subject.complete()
        if self._sending is not None:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S if self._connection.is_connected else 0):
                await self._outbox.emptied()
            self._outbox.close()
            self._sending.dispose()
            await self._connection.close()

    # -- inside

    def _subject(self, name: str) -> _Subject:
        if name not in self._subjects:
            self._subjects[name] = _Subject(name)
        return self._subjects[name]

    def _tidy(self, name: str) -> None:
        if (subject := self._subjects.get(name)) is None:
            return
        had_events = bool(subject.events)
        subject.tidy()
        if had_events and not subject.events:
            self._outbox.changed(name)
        if not subject.subscribers:
            del self._subjects[name]

    async def _send(self, scope: CancelScope) -> None:
        with scope:
            await self._connection.each_session(self._serve)

    async def _serve(self, session: BrokerSession) -> None:
        made: dict[str, Callable[[], Awaitable[None]]] = {}
        try:
            await self._send_all(session, made)
        finally:
            for end in made.values():
                await end()

    async def _send_all(self, session: BrokerSession, made: dict[str, Callable[[], Awaitable[None]]]) -> None:
        """Subscribe, then send what waits, until the session is lost."""
        for name in list(self._applied):  # others follow in the order of the outbox
            await self._adjust(session, made, name)
        if self._connection.sessions > 1 and made:
            await session.round_trip()  # what is published from now on arrives
            for name in made:
                if name in self._subjects:
                    self._subjects[name].missed.push(Missed())
        sent = 0
        while True:
            entry = self._outbox.next_nowait()
            if entry is None:
                await self._outbox.arrival()
            elif isinstance(entry, Frame):
                await self._publish(session, entry.subject, entry.data)
                sent += 1
                if not sent % _EVENTS_PER_TURN:
                    await checkpoint()
            else:
                await self._adjust(session, made, entry)

    async def _adjust(self, session: BrokerSession, made: dict[str, Callable[[], Awaitable[None]]], name: str) -> None:
        """Make the session's subscription to a subject that has subscribers, end that to one without."""
        is_wanted = name in self._subjects and bool(self._subjects[name].events)
        if is_wanted and name not in made:
            made[name] = await session.subscribe(
                name,
                lambda message: self._receive(name, message),
                messages=_WAITING_EVENTS,
                size_bytes=_WAITING_BYTES,
                dropped=lambda: self._drop(name),
            )
            self._applied.add(name)
        elif not is_wanted:
            self._applied.discard(name)
            if name in made:
                await made.pop(name)()

    def _receive(self, name: str, message: Delivered) -> None:
        if (subject := self._subjects.get(name)) is not None:
            subject.receive(message)

    def _drop(self, name: str) -> None:
        """Report, a little later and once for many, that this process was too slow."""
        if (subject := self._subjects.get(name)) is None or subject.is_dropping:
            return
        subject.is_dropping = True

        def report(*_: object) -> None:
            subject.is_dropping = False
            subject.missed.push(Missed())

        self._connection.scheduler.schedule_relative(_SLOW_REPORT_S, report)

    async def _publish(self, session: BrokerSession, subject: str, frame: bytes) -> None:
        if len(frame) > session.max_payload_bytes:
            self._outbox.dropped += 1
            limit = session.max_payload_bytes
            self._log.warning("dropping an event of %d bytes on %s: the server takes %d", len(frame), subject, limit)
            return
        await session.publish(subject, frame)


class _Subject:
    """The subscribers to one subject in this process."""

    def __init__(self, name: str) -> None:
        self.events: dict[type[Any], Fanout[Event[Any]]] = {}
        """By the type of their payload."""
        self.missed: Fanout[Missed] = Fanout()
        self.is_dropping = False
        self._name = name
        self._sequences = Sequences()
        self._log = LogLimit(_log)

    @property
    def subscribers(self) -> int:
        return len(self.missed) + sum(len(fanout) for fanout in self.events.values())

    def tidy(self) -> None:
        """Forget types without subscribers."""
        self.events = {kind: fanout for kind, fanout in self.events.items() if fanout}

    def complete(self) -> None:
        self.missed.complete()
        for fanout in self.events.values():
            fanout.complete()

    def receive(self, message: Delivered) -> None:
        """Deliver one message to the subscribers."""
        try:
            event = decode_event(decode_frame(message.data))
        except Exception as error:  # whatever another process has sent
            self._pass_over(error)
            return
        relation = self._sequences.take(event.publisher_id, event.sequence)
        if relation == "repeated":
            return
        if relation == "gap":
            self.missed.push(Missed(event.publisher_id))
        for kind, fanout in list(self.events.items()):
            try:
                payload = record_reader(kind)(event.payload)
            except Exception as error:  # of another type
                self._pass_over(error)
                continue
            fanout.push(Event(event.publisher_id, event.sequence, event.published_at_ms, event.topic, payload))

    def _pass_over(self, error: Exception) -> None:
        self._log.warning("passing over what is no event on %s: %s", self._name, described(error)[:200])


class _NatsPublisher(Publisher):
    def __init__(self, outbox: Outbox, subject: str, topic: str, publisher_id: int, wall_ms: Callable[[], int]) -> None:
        self.publisher_id = publisher_id
        self._outbox, self._subject, self._topic, self._wall_ms = outbox, subject, topic, wall_ms
        self._number = 0

    def publish(self, payload: object) -> None:
        data, at_ms = to_msgpack(payload), self._wall_ms()

        def numbered() -> bytes:
            event = Event(self.publisher_id, self._number, at_ms, self._topic, data)
            self._number += 1
            return encode_frame(encode_event(event))

        self._outbox.event(self._subject, numbered)
