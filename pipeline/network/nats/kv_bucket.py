"""KvBucket: keys and values in a KV bucket of JetStream, each with a time to live that its writer renews.

| header             | on                                     | meaning                                              |
|--------------------|----------------------------------------|------------------------------------------------------|
| Nats-TTL           | a value, a deletion                    | whole seconds until the server removes it            |
| Penstock-Writer    | a value                                | the store that wrote it last, which renews it        |
| Penstock-Revision  | a value written again as it was        | the sequence number of when it was written first     |
| KV-Operation       | a deletion by a client                 |                                                      |
| Nats-Marker-Reason | what is left of a value by the server  | MaxAge: it was not renewed                           |

A renewal writes the value again, on condition that it is still the last message. The revision of a value, by which it
is replaced, is the number of its first message: renewals do not change it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.errors import MessageTooLarge

from ..discovery import Put
from .broker_messages import Delivered
from .broker_session import BrokerSession
from .broker_streams import TTL_HEADER, Stored
from .subjects import key_headers, key_subject, prefix_subjects

MARKER_TTL_S = 300
"""How long the server remembers a deletion or an expiry: readers that were away see by it what became of a key."""
TTL_MAX_S = 100
_HEADERS_BYTES = 128
"""More than the frame of the headers takes; the server's limit on messages includes them."""
_WRITER, _REVISION = "Penstock-Writer", "Penstock-Revision"
_OPERATION, _REASON, _ROLLUP = "KV-Operation", "Nats-Marker-Reason", "Nats-Rollup"

State = Literal["value", "deleted", "lapsed"]


def state_of(message: Delivered | Stored) -> State:
    """Return what the last message of a key means."""
    headers = message.headers
    if headers.get(_OPERATION) in ("DEL", "PURGE"):
        return "deleted"
    if (reason := headers.get(_REASON)) is not None:
        return "lapsed" if reason == "MaxAge" else "deleted"
    return "value"


def revision_of(message: Delivered | Stored, sequence: int) -> int:
    """Return the revision of a value that stands at this number of the stream."""
    text = message.headers.get(_REVISION, "")
    return int(text) if text.isdecimal() and len(text) < 20 else sequence


def lifetime_s(message: Delivered | Stored) -> int | None:
    """Return how long a value lives without renewal; None if it says nothing that stores like this one write."""
    text = message.headers.get(TTL_HEADER, "")
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) else None


def whole_ttl_s(ttl_s: float) -> int:
    """Return the time as the server takes it, rounded up. Raise InvalidArgument above `TTL_MAX_S` and for none."""
    if not 0 < ttl_s <= TTL_MAX_S:
        raise InvalidArgument(f"the time to live must be above 0 and at most {TTL_MAX_S} s", field="ttl_s")
    return math.ceil(ttl_s)


@frozen
class Bucket:
    """The names and the settings of a bucket."""

    name: str
    replicas: int = 1
    """Copies in a cluster of servers."""
    is_in_memory: bool = False
    """Whether a restart of the server loses the content."""

    @property
    def stream(self) -> str:
        return f"KV_{self.name}"

    @property
    def root(self) -> str:
        """What the subjects of all keys begin with."""
        return f"$KV.{self.name}"

    def subject(self, key: str) -> str:
        return key_subject(self.root, key)

    def subjects(self, prefix: str) -> list[str]:
        """Return the subjects under a prefix of keys."""
        return prefix_subjects(self.root, prefix)

    async def ensure(self, session: BrokerSession) -> None:
        """Create the bucket, if there is none. Raise Unavailable if there is one without times to live."""
        settings: dict[str, Any] = {
            "name": self.stream,
            "subjects": [f"{self.root}.>"],
            "max_msgs_per_subject": 1,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "deny_delete": True,
            "subject_delete_marker_ttl": float(MARKER_TTL_S),
            "num_replicas": self.replicas,
            "storage": "memory" if self.is_in_memory else "file",
            "max_consumers": -1,
        }
        await session.streams.ensure_stream(settings)


@frozen
class Writer:
    """One store's writes to a bucket."""

    bucket: Bucket
    id: str
    """Of the store, different for each."""
    ttl_s: int

    def wrote(self, message: Stored) -> bool:
        """Return whether the message is this store's."""
        return message.headers.get(_WRITER) == self.id

    def headers(self, key: str, revision: int | None = None) -> dict[str, str]:
        """Return the headers of a value, of a known revision if it is written again."""
        found = {TTL_HEADER: str(self.ttl_s), _WRITER: self.id} | key_headers(self.bucket.subject(key), key)
        return found if revision is None else found | {_REVISION: str(revision)}

    async def write(self, session: BrokerSession, key: str, value: bytes, expected: int) -> int | None:
        """Write a new value over the message of that number (0: none). Return its number, None if it is not the last.

        Raise MessageTooLarge for a value that the server does not take.
        """
        headers = self.headers(key)
        size_bytes = len(value) + sum(len(name) + len(text) for name, text in headers.items()) + _HEADERS_BYTES
        if size_bytes > session.max_payload_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=session.max_payload_bytes)
        return await session.streams.store(self.bucket.subject(key), value, headers, expected=expected)

    async def last(self, session: BrokerSession, key: str) -> Stored | None:
        """Return the last message of the key."""
        return await session.streams.last(self.bucket.stream, self.bucket.subject(key))

    async def delete(self, session: BrokerSession, key: str) -> None:
        """Leave a deletion in the place of the key's value."""
        headers = {_OPERATION: "PURGE", _ROLLUP: "sub", TTL_HEADER: str(MARKER_TTL_S)}
        await session.streams.store(self.bucket.subject(key), b"", headers)


def put_of(key: str, message: Delivered | Stored, sequence: int) -> Put:
    """Return the value of a message."""
    return Put(key, message.data, revision_of(message, sequence))
