"""PrefixWatch: the keys of a bucket under one prefix, followed for any number of watches.

    session ──► snapshot: last message of each key ──► difference to what is known ──► changes as they come
       ▲                                                                                     │
       └──────────── a gap, silence, a lost connection: a new snapshot ◄─────────────────────┘

A key is Gone when the server reports that it was deleted or has lapsed. One that is silent, which is not renewed for
longer than it may live, is looked for in a new snapshot: older servers report nothing of what lapsed while they were
away, and a server without room for renewals keeps what it has.

What is known stays while there is no connection. A key that lapsed, or is not there any more, when the server has not
been there for a whole lease time, or a cluster has elected who writes the bucket within it, is not gone yet: its owner
could not renew it. It has a lease time to come back; only
then is it Gone. A key that was deleted is Gone at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import anyio
from anyio import CancelScope

from pipeline.errors import InvalidMessage
from pipeline.loop import clock

from ..discovery import Change, Gone, Put
from ..events import Fanout
from ..log_limit import LogLimit
from ..names import matches_prefix
from .broker_connection import NatsConnection
from .broker_messages import Delivered, Position
from .broker_session import BrokerSession
from .kv_bucket import Bucket, lifetime_s, put_of, state_of
from .subjects import is_hashed, key_of

_log = logging.getLogger(__name__)

_WAITING_MESSAGES, _WAITING_BYTES = 2**17, 256 * 1024 * 1024
_ELECTED = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED"
"""Subject below which the servers of a cluster publish that a stream has another leader."""
_SILENT_HEARTBEATS = 4
"""A reader of a stream that has received nothing, not even a heartbeat, for so long is made anew."""


class Delivery:
    """The messages of one reader of a stream, checked: each in order, none left out.

    `take` is called with each. `is_complete`: all that the stream held at the begin has come. `is_broken`: one is
    missing, or the server has ended the reader.
    """

    def __init__(self, take: Callable[[Delivered, Position], None]) -> None:
        self._take, self._now_s = take, clock()
        self._number = 0
        self.heard_s = self._now_s()
        self.is_complete = self.is_broken = False
        self.changed = anyio.Event()

    def receive(self, message: Delivered) -> None:
        """Take the next message of the reader's inbox."""
        if self.is_broken:
            return
        self.heard_s = self._now_s()
        if message.is_control:
            self._control(message)
        elif (position := message.position) is not None:
            if position.number != self._number + 1:
                self._break()
                return
            self._number += 1
            self._take(message, position)
            if not position.pending:
                self.complete()

    def complete(self) -> None:
        """All that the stream held has come."""
        if not self.is_complete:
            self.is_complete = True
            self.changed.set()

    def give_up(self) -> None:
        """Take nothing more."""
        self._break()

    def _control(self, message: Delivered) -> None:
        headers = message.headers
        if headers["Status"] != "100":
            self._break()
        elif (last := headers.get("Nats-Last-Consumer")) is not None:
            if last != str(self._number):
                self._break()
            else:
                self.complete()

    def _break(self) -> None:
        self.is_broken = True
        self.changed.set()


async def read_stream(
    session: BrokerSession,
    bucket: Bucket,
    prefix: str,
    delivery: Delivery,
    watch: Callable[[Delivery], None] | None = None,
) -> None:
    """Let the delivery take the last message of each key, then each that comes, until it breaks or falls silent.

    `watch` is called at each heartbeat, and once the delivery is complete; without it, this returns then.
    """
    inbox, heartbeat_s, now_s = session.new_inbox(), session.options.heartbeat_s, clock()
    name = inbox.rpartition(".")[2]
    unsubscribe = await session.subscribe(
        inbox, delivery.receive, messages=_WAITING_MESSAGES, size_bytes=_WAITING_BYTES
    )
    try:
        if not await session.streams.consume(bucket.stream, name, inbox, bucket.subjects(prefix), latest=True):
            delivery.complete()
        while not delivery.is_broken and now_s() - delivery.heard_s < _SILENT_HEARTBEATS * heartbeat_s:
            if delivery.is_complete:
                if watch is None:
                    return
                watch(delivery)
            delivery.changed = anyio.Event()
            with anyio.move_on_after(heartbeat_s):
                await delivery.changed.wait()
    finally:
        if not session.lost.is_set():
            with CancelScope(shield=True, deadline=now_s() + 1.0), session.call():
                await unsubscribe()
                await session.streams.forget(bucket.stream, name)


class PrefixWatch:
    """See the module. `run` follows; `changes` has the subscribers."""

    def __init__(self, connection: NatsConnection, bucket: Bucket, prefix: str, ttl_s: int) -> None:
        self.changes: Fanout[Change] = Fanout()
        self.known: dict[str, Put] = {}
        self._connection, self._bucket, self._prefix, self._ttl_s = connection, bucket, prefix, ttl_s
        self._now_s = clock()
        self._doubted: dict[str, float] = {}
        """Keys that may come back, and since when."""
        self._leases: dict[str, tuple[float, int]] = {}
        """When a key was renewed last, and its time to live."""
        self._silent: frozenset[str] = frozenset()
        """Keys that were not renewed in time."""
        self._snapshot: dict[str, Delivered] | None = None
        self._positions: dict[str, int] = {}
        self._hashed: dict[str, str] = {}
        """Subject -> key, where the subject does not hold it."""
        self._elected_s = -math.inf
        """When the servers of a cluster elected the one that writes the bucket: until then nobody could renew."""
        self._synced = anyio.Event()
        self._removed = anyio.Event()
        self._log = LogLimit(_log)

    @property
    def first(self) -> list[Put]:
        """What is known, for a new subscriber."""
        return [put for _, put in sorted(self.known.items())]

    async def run(self) -> None:
        """Follow the keys until this is cancelled."""
        await self._connection.each_session(self._follow)

    async def _follow(self, session: BrokerSession) -> None:
        await self._bucket.ensure(session)
        self._silent = frozenset()  # silence over a reconnect means nothing
        subject = f"{_ELECTED}.{self._bucket.stream}"
        unsubscribe = await session.subscribe(subject, self._on_elected, messages=16, size_bytes=64 * 1024)
        try:
            await self._read(session)
        finally:
            if not session.lost.is_set():
                with CancelScope(shield=True, deadline=self._now_s() + 1.0), session.call():
                    await unsubscribe()

    async def _read(self, session: BrokerSession) -> None:
        while True:
            self._snapshot, self._positions = {}, {}
            delivery = Delivery(self._take)
            await read_stream(session, self._bucket, self._prefix, delivery, self._settle)
            if not self._silent:
                self._log.warning("the watch of %s/%s has a gap and begins again", self._bucket.name, self._prefix)

    def _on_elected(self, _: Delivered) -> None:
        self._elected_s = self._now_s()

    def _steady_since_s(self) -> float:
        """Return since when each owner could have renewed its keys, for all that is known here."""
        return max(self._connection.steady_since_s(), self._elected_s)

    def _take(self, message: Delivered, position: Position) -> None:
        if (key := self._key(message)) is None or not matches_prefix(key, self._prefix):
            return
        if self._snapshot is not None:
            self._snapshot[key], self._positions[key] = message, position.sequence
        else:
            self._apply(key, message, position.sequence)

    def _key(self, message: Delivered) -> str | None:
        """Return the key of a message, None if there is none, or none that has ever had a value."""
        if is_hashed(message.subject) and state_of(message) != "value":
            return self._hashed.get(message.subject)
        try:
            key = key_of(self._bucket.root, message.subject, message.headers)
        except InvalidMessage as error:
            self._log.warning("passing over a key in %s: %s", self._bucket.name, error)
            return None
        if is_hashed(message.subject):
            self._hashed[message.subject] = key
        return key

    def _settle(self, delivery: Delivery) -> None:
        """Finish the snapshot, then let go of the keys that have not come back in time."""
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            for key in sorted(self.known.keys() - snapshot.keys()):
                (self._remove if key in self._silent else self._doubt)(key)
            self._silent = frozenset()
            for key in sorted(snapshot):
                self._apply(key, snapshot[key], self._positions[key], is_again=True)
            self._positions = {}
            self._synced.set()
        steady_s, late_s = self._steady_since_s(), self._now_s() - self._connection.options.reconnect_max_s
        for key in [key for key, since_s in self._doubted.items() if max(since_s, steady_s) + self._ttl_s <= late_s]:
            self._remove(key)
        self._silent = frozenset(
            key for key, (since_s, ttl_s) in self._leases.items() if max(since_s, steady_s) + ttl_s <= late_s
        )
        if self._silent:
            delivery.give_up()

    def _apply(self, key: str, message: Delivered, sequence: int, *, is_again: bool = False) -> None:
        state = state_of(message)
        if state == "value":
            self._renew(key, lifetime_s(message))
            self._put(put_of(key, message, sequence), is_again=is_again)
        elif key in self.known:
            # The last renewal was a lease time ago. If there was an outage then, the owner could not renew it again.
            is_doubtful = self._steady_since_s() > self._now_s() - self._ttl_s
            if state == "lapsed" and is_doubtful:
                self._doubt(key)
            else:
                self._remove(key)

    def _doubt(self, key: str) -> None:
        self._doubted.setdefault(key, self._now_s())
        self._leases.pop(key, None)

    def _renew(self, key: str, ttl_s: int | None) -> None:
        if ttl_s is None:
            self._leases.pop(key, None)
        else:
            self._leases[key] = self._now_s(), ttl_s

    def _put(self, put: Put, *, is_again: bool) -> None:
        self._doubted.pop(put.key, None)
        known = self.known.get(put.key)
        self.known[put.key] = put
        # A renewal has the revision that is known; after a gap, only another value is a difference.
        if known is None or known.value != put.value or (not is_again and known.revision != put.revision):
            self.changes.push(put)

    def _remove(self, key: str) -> None:
        self._doubted.pop(key, None)
        self._leases.pop(key, None)
        if self.known.pop(key, None) is not None:
            self._hashed.pop(self._bucket.subject(key), None)
            self.changes.push(Gone(key))
            removed, self._removed = self._removed, anyio.Event()
            removed.set()

    async def synced(self) -> None:
        """Wait until what is there has been received once."""
        await self._synced.wait()

    async def without(self, keys: list[str]) -> None:
        """Wait until none of the keys is known."""
        while any(key in self.known for key in keys):
            await self._removed.wait()
