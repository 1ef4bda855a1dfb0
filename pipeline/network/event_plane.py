"""The event plane: facts published to whoever listens, without an answer and without a promise of arrival.

    publisher(scope, topic).publish(fact)  ──►  subscribe(scope, topic, type) ──► Observable[Event]

Source: dynamo lib/runtime/src/transports/event_plane. Loss shows: each publisher numbers its events, see `Sequences`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from attrs import frozen

from pipeline.rx import Observable

from .names import EndpointId

T = TypeVar("T")


@frozen
class Scope:
    """A namespace, a component or an endpoint; a listener hears exactly its own, nothing above or below."""

    namespace: str
    component: str | None = None
    endpoint: str | None = None

    @classmethod
    def of(cls, endpoint: EndpointId) -> Scope:
        """The scope of that endpoint."""
        return cls(endpoint.namespace, endpoint.component, endpoint.endpoint)


@frozen
class Event(Generic[T]):
    """One fact and where it comes from: the publisher, and how many it had published before."""

    publisher_id: int
    sequence: int
    published_at_ms: int
    topic: str
    payload: T


class Publisher(ABC):
    """Publishes to one scope and topic under an id of its own, numbering from 0. Another publisher starts anew."""

    publisher_id: int

    @abstractmethod
    def publish(self, payload: object) -> None:
        """Sends the fact to whoever listens now. Does not wait; may be called from any thread."""


class EventPlane(ABC):
    """See the module. Publisher ids are random and at most 2^53 - 1."""

    @abstractmethod
    def publisher(self, scope: Scope, topic: str) -> Publisher:
        """A new publisher."""

    @abstractmethod
    def subscribe(self, scope: Scope, topic: str, payload_type: type[T]) -> Observable[Event[T]]:
        """What is published there from the subscription on, read as the type; completes when the plane closes.

        Disposing releases. A listener's error stays its own.
        """

    @abstractmethod
    async def close(self) -> None:
        """Completes all subscriptions."""


class Sequences:
    """Sees what was lost: the next number expected of each publisher."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def missed(self, event: Event[Any]) -> range:
        """The numbers lost before this event: empty in order, and for one seen before.

        A publisher is expected to start at 0, so whoever joins late learns what it did not hear.
        """
        expected = self._next.get(event.publisher_id, 0)
        self._next[event.publisher_id] = max(expected, event.sequence + 1)
        return range(expected, event.sequence)

    def forget(self, publisher_id: int) -> None:
        """For a publisher that is gone."""
        self._next.pop(publisher_id, None)
