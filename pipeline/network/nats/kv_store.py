"""NatsStore: discovery's keys and values in a KV bucket of NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import anyio
from anyio import CancelScope

from pipeline import CannotConnect, InvalidArgument, PenstockError, Unavailable
from pipeline.errors import InvalidMessage
from pipeline.rx import CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase

from ..discovery import Change, Put, Store, Written
from ..names import matches_prefix
from .broker_connection import NatsConnection
from .broker_messages import Delivered, Position
from .broker_session import BrokerSession
from .kv_bucket import Bucket, Writer, put_of, revision_of, state_of, whole_ttl_s
from .kv_leases import Leases
from .kv_watch import Delivery, PrefixWatch, read_stream
from .options import LOST_AFTER_HEARTBEATS
from .subjects import key_of, token_of

_ATTEMPTS = 8
"""Attempts at a write that conflicts with other writers."""
_BATCH = 64
_CLOSE_TIMEOUT_S = 2.0


class NatsStore(Store):
    """See the module. Its keys live for `ttl_s`, rounded up to whole seconds, after their owner's last renewal.

    While no server can be reached, watches keep what they know, and calls raise Unavailable: `delete` at once, others
    after the connection's `call_timeout_s`. Keys that lapsed meanwhile are registered again as soon as there is a
    server. For watches they are `Gone` only if they stay away for another `ttl_s`: a broker that was away, or that
    came back empty, removes nothing by that alone.

    A value has the same revision however often it is renewed. Values must fit into one message of the server, keys
    have at most 16 kB; others are refused by MessageTooLarge and InvalidArgument.
    """

    def __init__(
        self, connection: NatsConnection, ttl_s: float, *, bucket: str = "penstock", replicas: int = 1
    ) -> None:
        if token_of(bucket) != bucket:
            raise InvalidArgument("the name of a bucket has letters, digits, - and _", field="bucket")
        ttl_whole_s = whole_ttl_s(ttl_s)
        if ttl_whole_s < LOST_AFTER_HEARTBEATS * connection.options.heartbeat_s:
            # A watch that sees a key lapse must have noticed the outage that kept the owner from renewing it.
            raise InvalidArgument(f"a time to live must be {LOST_AFTER_HEARTBEATS} heartbeats or more", field="ttl_s")
        self._connection = connection
        self._bucket = Bucket(bucket, replicas=replicas)
        self._writer = Writer(self._bucket, uuid4().hex, ttl_whole_s)
        self._leases = Leases(self._writer)
        self._watches: dict[str, tuple[PrefixWatch, DisposableBase]] = {}
        self._renewing: DisposableBase | None = None
        self._ready: BrokerSession | None = None
        self._is_closed = False

    @property
    def watchers(self) -> int:
        """Number of watches."""
        return sum(len(watch.changes) for watch, _ in self._watches.values())

    @property
    def renewals(self) -> int:
        """Number of times that a key was renewed."""
        return self._leases.renewals

    async def open(self) -> None:
        """Connect, and create the bucket if there is none. Raise CannotConnect as `NatsConnection.open` does."""
        await self._connection.open()
        try:
            async with self._session():
                pass
        except BaseException as error:
            await self._connection.close()
            if isinstance(error, Unavailable):
                raise CannotConnect(f"the bucket {self._bucket.name} cannot be used: {error}") from error
            raise
        self._renewing = self._connection.scheduler.spawn(self._renew)

    async def create(self, key: str, value: bytes) -> Written:
        async with self._session() as session:
            for _ in range(_ATTEMPTS):
                last = await self._writer.last(session, key)
                if last is not None and state_of(last) == "value":
                    return Written("exists", revision_of(last, last.sequence))
                expected = 0 if last is None else last.sequence
                if (number := await self._writer.write(session, key, value, expected)) is not None:
                    self._leases.hold(key, value, number)
                    return Written("created", number)
        raise Unavailable(f"{key} keeps changing")

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        async with self._session() as session:
            for _ in range(_ATTEMPTS):
                last = await self._writer.last(session, key)
                if last is None or state_of(last) != "value":
                    return Written("missing")
                if (present := revision_of(last, last.sequence)) != revision:
                    return Written("retry", present)
                # A renewal in between has the same revision under another number.
                if (number := await self._writer.write(session, key, value, last.sequence)) is not None:
                    self._leases.hold(key, value, number)
                    return Written("created", number)
        raise Unavailable(f"{key} keeps changing")

    async def delete(self, key: str) -> None:
        self._leases.drop(key)
        self._bucket.subject(key)  # an invalid one is refused also without a connection
        self._connection.session_now()
        async with self._session() as session:
            await self._writer.delete(session, key)

    async def get(self, key: str) -> Put | None:
        async with self._session() as session:
            last = await self._writer.last(session, key)
        return None if last is None or state_of(last) != "value" else put_of(key, last, last.sequence)

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        found: dict[str, Delivered] = {}

        def take(message: Delivered, _: Position) -> None:
            if (key := self._key(message)) is not None and matches_prefix(key, prefix):
                found[key] = message

        async with self._session() as session:
            delivery = Delivery(take)
            await read_stream(session, self._bucket, prefix, delivery)
            if not delivery.is_complete:
                raise Unavailable(f"the keys under {prefix!r} did not all arrive")
        return {key: message.data for key, message in sorted(found.items()) if state_of(message) == "value"}

    def _key(self, message: Delivered) -> str | None:
        try:
            return key_of(self._bucket.root, message.subject, message.headers)
        except InvalidMessage:  # another program's, or what is left of a long key
            return None

    def watch(self, prefix: str = "") -> Observable[Change]:
        """See `Store`. All watches of one prefix share what the server sends.

        A malformed key is passed over with a log line. Raise InvalidArgument for a prefix that is too long.
        """
        prefix = prefix.removesuffix("/")
        self._bucket.subjects(prefix)

        def subscribe(observer: ObserverBase[Change], _: object = None) -> DisposableBase:
            if self._is_closed:
                observer.on_completed()
                return Disposable()
            if prefix not in self._watches:
                watch = PrefixWatch(self._connection, self._bucket, prefix, self._writer.ttl_s)
                running = self._connection.scheduler.spawn(lambda scope: _within(scope, watch))
                self._watches[prefix] = watch, running
            watch, _ = self._watches[prefix]
            return CompositeDisposable(
                watch.changes.add(observer, first=watch.first), Disposable(lambda: self._tidy(prefix, watch))
            )

        return Observable(subscribe)

    def abandon(self, key: str) -> None:
        self._leases.drop(key)

    async def close(self) -> None:
        """Remove the keys of this process, if there is a server, and complete all watches, within a few seconds."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S):
                await self._remove_all()
        finally:
            watches, self._watches = self._watches, {}
            for watch, running in watches.values():
                running.dispose()
                watch.changes.complete()
            if self._renewing is not None:
                self._renewing.dispose()
                await self._connection.close()

    # -- inside

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[BrokerSession]:
        """Give the present session, or the next one, with the bucket in it, all within the time of one call."""
        async with self._connection.calling() as session:
            if self._ready is not session:
                await self._bucket.ensure(session)
                self._ready = session
            try:
                yield session
            except BaseException:
                self._ready = None  # whatever it was, the bucket is looked for again
                raise

    async def _renew(self, scope: CancelScope) -> None:
        with scope:
            await self._connection.each_session(self._leases.renew)

    async def _remove_all(self) -> None:
        keys = self._leases.keys
        for key in keys:
            self._leases.drop(key)
        if not self._connection.is_connected:
            return
        try:
            for watch, _ in self._watches.values():
                await watch.synced()
            for first in range(0, len(keys), _BATCH):
                async with anyio.create_task_group() as tasks:
                    for key in keys[first : first + _BATCH]:
                        tasks.start_soon(self._remove, key)
            for prefix, (watch, _) in self._watches.items():
                await watch.without([key for key in keys if matches_prefix(key, prefix)])
        except PenstockError:
            return

    async def _remove(self, key: str) -> None:
        try:
            async with self._session() as session:
                await self._writer.delete(session, key)
        except PenstockError:  # it lapses
            return

    def _tidy(self, prefix: str, watch: PrefixWatch) -> None:
        if not watch.changes and prefix in self._watches and self._watches[prefix][0] is watch:
            self._watches.pop(prefix)[1].dispose()


async def _within(scope: CancelScope, watch: PrefixWatch) -> None:
    with scope:
        await watch.run()
