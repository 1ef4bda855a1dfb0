"""Channels: their keys and records in the store, and the messages of the streams that carry them.

    v1/event_channels/namespace/<ns>[/component/<c>[/endpoint/<e>]]/topic/<topic>/<publisher id in hex>

Source: dynamo lib/runtime/src/discovery, EventChannel. Other than there the record holds the instance at which the
publisher's process serves its channels, and many publishers of a process share one stream.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from urllib.parse import quote

from attrs import define, frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import U64, skip

from ..events import Scope
from ..names import EndpointId, Instance

EVENT_CHANNELS = "v1/event_channels"
"""The bucket of channels in the store."""
SERVED_AT = EndpointId("_penstock", "events", "channels")
"""The reserved endpoint: each process has one instance of it, which is found by the records of channels only."""

Channel: TypeAlias = tuple[Scope, str]
"""A scope and a topic."""


@frozen
class DirectEventLimits:
    """Bounds of what waits for one process that reads a channel, and of attempts to reach a process."""

    events: int = 16_384
    """Events that wait; more drop the oldest."""
    size_bytes: int = 16 * 1024 * 1024
    """Bytes that wait, apart from the newest event; more drop the oldest."""
    batch_events: int = 64
    """Events in one item of a stream."""
    gather_s: float = 0.002
    """Seconds in which events gather after an item, unless the next one is full: a process that is woken for each of
    many events spends more on that than on the events."""
    first_delay_s: float = 0.1
    """Seconds before a stream that broke is opened again; twice as long after each failure."""
    longest_delay_s: float = 5.0
    """The longest such wait, in seconds."""
    close_s: float = 1.0
    """Seconds in which the channels of a process that ends are removed from the store."""


@frozen
class ChannelRecord:
    """A publisher, as the store has it."""

    scope: Scope
    topic: str
    publisher_id: U64
    server: Instance
    """Where its process serves the channel."""


@frozen
class ChannelRequest:
    """A request for the events of a channel from now on, from all publishers of the process."""

    scope: Scope
    topic: str


@frozen
class PublisherState:
    """A publisher and the number of its next event."""

    publisher_id: U64
    next_sequence: U64


@define
class EventRun:
    """Events of a publisher that follow each other: an envelope for all of them. The lists have one length."""

    publisher_id: U64
    sequence: U64
    """The number of the first."""
    published_at_ms: list[U64]
    payloads: list[Any]
    """Each as bytes of MessagePack."""


@define
class EventBatch:
    """An item of a channel's stream. The first one comes at once."""

    publishers: list[PublisherState] = skip(factory=list)
    """How the events go on: of all publishers in the first item, later of those whose events were dropped."""
    runs: list[EventRun] = skip(factory=list)
    """Events, in their order."""


def channel_prefix(channel: Channel) -> str:
    """Return the key below which the channel's publishers are, and those of no other channel.

    Raise InvalidArgument for a name that is no text, as half a surrogate pair.
    """
    scope, topic = channel
    named = [("namespace", scope.namespace), ("component", scope.component), ("endpoint", scope.endpoint)]
    words = [f"{word}/{_escaped(name)}" for word, name in [*named, ("topic", topic)] if name is not None]
    return "/".join([EVENT_CHANNELS, *words])


def channel_key(channel: Channel, publisher_id: int) -> str:
    """Return the key of the publisher's record."""
    return f"{channel_prefix(channel)}/{publisher_id:x}"


def _escaped(name: str) -> str:
    """Return the name percent-encoded except for letters, digits, `-` and `_` of ASCII."""
    try:
        return quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name!r} is no name of a channel: {error}") from error
