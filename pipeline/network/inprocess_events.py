"""The event plane of one process: a fan-out for each scope and topic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any, TypeVar

from pipeline.rx import CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase

from ..loop import Home
from .event_plane import Event, EventPlane, Publisher, Scope
from .fanout import Fanout
from .names import MAX_ID

T = TypeVar("T")
Key = tuple[Scope, str]


class InProcessEventPlane(EventPlane):
    """Hands payloads over as they are, on the thread the publisher was made in; nothing is lost.

    `wall_ms` dates the events, `rng` draws the publisher ids.
    """

    def __init__(self, wall_ms: Callable[[], int], rng: Random) -> None:
        self._wall_ms = wall_ms
        self._rng = rng
        self._topics: dict[Key, Fanout[Event[Any]]] = {}
        self._closed = False

    @property
    def subscriptions(self) -> int:
        """How many listen."""
        return sum(len(fanout) for fanout in self._topics.values())

    def publisher(self, scope: Scope, topic: str) -> Publisher:
        return _InProcessPublisher(self._rng.randint(1, MAX_ID), topic, self._wall_ms, self._push_to((scope, topic)))

    def subscribe(self, scope: Scope, topic: str, payload_type: type[T]) -> Observable[Event[T]]:
        key = (scope, topic)

        def subscribe(observer: ObserverBase[Event[T]], _: Any = None) -> DisposableBase:
            if self._closed:
                observer.on_completed()
                return Disposable()
            listening = self._topics.setdefault(key, Fanout()).add(observer)
            return CompositeDisposable(listening, Disposable(lambda: self._tidy(key)))

        return Observable(subscribe)

    async def close(self) -> None:
        self._closed = True
        topics, self._topics = self._topics, {}
        for fanout in topics.values():
            fanout.complete()

    def _push_to(self, key: Key) -> Callable[[Event[Any]], None]:
        def push(event: Event[Any]) -> None:
            if (fanout := self._topics.get(key)) is not None:
                fanout.push(event)

        return push

    def _tidy(self, key: Key) -> None:
        if key in self._topics and not self._topics[key]:
            del self._topics[key]


class _InProcessPublisher(Publisher):
    def __init__(
        self, publisher_id: int, topic: str, wall_ms: Callable[[], int], push: Callable[[Event[Any]], None]
    ) -> None:
        self.publisher_id = publisher_id
        self._topic, self._wall_ms, self._push = topic, wall_ms, push
        self._numbers = count()
        self._home = Home()

    def publish(self, payload: object) -> None:
        self._home.run(lambda: self._publish(payload))

    def _publish(self, payload: object) -> None:
        # Numbered where it is delivered, so that events of several threads arrive in the order of their numbers.
        self._push(Event(self.publisher_id, next(self._numbers), self._wall_ms(), self._topic, payload))
