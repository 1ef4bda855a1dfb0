"""shared_bookings: the bookings of routers in all processes, also of those from before and after a loss.

    each router ──► an instance of the endpoint `router_bookings`, whose id is that of the router
    it appears, or events of it may be lost ──► BookingsRequest ──► its live bookings, with the events since, replace
                                                                    what is known of it
    it disappears ──► its bookings are dropped

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there a router that starts late, or loses events,
requests the bookings of the others, and those of a router that is gone do not wait for their expiry.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import anyio
from attrs import define, field, frozen

from pipeline import Context, function_engine
from pipeline.errors import InvalidMessage
from pipeline.network import EndpointId, EndpointWorkers, Members, Missed, Runtime, Scope
from pipeline.protocols.field_rules import U64
from pipeline.rx import CompositeDisposable, Disposable, DisposableBase

from .replicas import ACTIVE_SEQUENCES_TOPIC, ActiveSequenceEvent, ReplicaSync

BOOKINGS_ENDPOINT = "router_bookings"
"""Name of the endpoint, in the workers' component, at which routers give their bookings."""

_log = logging.getLogger(__name__)


@frozen
class BookingsRequest:
    """A request for all bookings of the router."""


@frozen
class BookingsPart:
    """Some of a router's live bookings, each as if it was booked now."""

    router_id: U64
    bookings: list[ActiveSequenceEvent]


@frozen
class ShareLimits:
    """Bounds of the repairs."""

    part_bookings: int = 64
    """Bookings in one item of an answer."""
    bookings: int = 100_000
    """The most bookings of a router that are taken in; an answer with more is refused."""
    timeout_s: float = 10.0
    """Seconds for one attempt."""
    first_delay_s: float = 0.1
    """Seconds before the second attempt; twice as long after each that failed, until the router is gone."""
    longest_delay_s: float = 10.0
    """The longest wait between attempts, in seconds."""


@asynccontextmanager
async def shared_bookings(
    runtime: Runtime, endpoint: str | EndpointId, *, registered_only: bool = False, limits: ShareLimits | None = None
) -> AsyncIterator[ReplicaSync]:
    """Give a ReplicaSync that knows the bookings of all routers of the component, from before and after losses too.

    The router that is given it is served to the others until the block ends; then they drop its bookings. The bookings
    of a router that died are dropped when its lease has lapsed; while discovery is away they stay. Raise as
    `Runtime.serve`.
    """
    limits = limits or ShareLimits()
    where = EndpointId.parse(endpoint)
    served_at = EndpointId(where.namespace, where.component, BOOKINGS_ENDPOINT)
    sync = ReplicaSync(runtime.events, where, registered_only=registered_only)

    async def give(request: BookingsRequest) -> AsyncIterator[BookingsPart]:
        bookings = sync.own_bookings()
        while part := list(islice(bookings, limits.part_bookings)):
            yield BookingsPart(sync.router_id, part)

    served = await runtime.serve(served_at, function_engine(give), instance_id=sync.router_id)
    try:
        peers = _Peers(runtime, sync, runtime.workers(served_at, BookingsPart), limits)
        with peers.follow(Scope(where.namespace, where.component)):
            yield sync
    finally:
        await served.close(0)


@define(eq=False)
class _Peer:
    """Another router."""

    router_id: int
    is_doubted: bool = True
    """Whether its bookings are to be requested."""
    news: anyio.Event = field(factory=anyio.Event)
    """Set when they have become doubtful."""
    task: DisposableBase = field(factory=Disposable)


class _Peers:
    """The other routers as discovery has them, and a task for each that repairs what is known of it."""

    def __init__(
        self,
        runtime: Runtime,
        sync: ReplicaSync,
        workers: EndpointWorkers[BookingsRequest, BookingsPart],
        limits: ShareLimits,
    ) -> None:
        self._runtime, self._sync, self._workers, self._limits = runtime, sync, workers, limits
        self._members = Members()
        self._peers: dict[int, _Peer] = {}

    def follow(self, scope: Scope) -> DisposableBase:
        """Keep the bookings true until disposed."""
        missed = self._runtime.events.missed(scope, ACTIVE_SEQUENCES_TOPIC).subscribe(self._on_missed)
        members = self._workers.follow(self._on_members)
        return CompositeDisposable(missed, members, Disposable(self._close))

    def _close(self) -> None:
        self._workers.close()
        for peer in self._peers.values():
            peer.task.dispose()

    def _on_missed(self, missed: Missed) -> None:
        for peer in self._peers.values():
            if missed.publisher_id in (None, peer.router_id):
                peer.is_doubted = True
                peer.news.set()

    def _on_members(self, members: Members) -> None:
        gone, new = members.gone_since(self._members), members.new_since(self._members)
        self._members = members
        for router_id in gone:
            if (peer := self._peers.pop(router_id, None)) is not None:
                peer.task.dispose()
                self._sync.forget(router_id)
        for router_id in new:
            if router_id != self._sync.router_id:
                self._peers[router_id] = peer = _Peer(router_id)
                peer.task = self._runtime.scheduler.spawn(partial(self._repair, peer))

    async def _repair(self, peer: _Peer, scope: anyio.CancelScope) -> None:
        delay_s = self._limits.first_delay_s
        with scope:
            while True:
                if not peer.is_doubted:
                    await peer.news.wait()
                peer.is_doubted, peer.news = False, anyio.Event()
                if await self._one_attempt(peer.router_id):
                    delay_s = self._limits.first_delay_s
                    continue
                peer.is_doubted = True
                await anyio.sleep(delay_s)
                delay_s = min(2 * delay_s, self._limits.longest_delay_s)

    async def _one_attempt(self, router_id: int) -> bool:
        """Request the router's bookings and put them in place; return whether nothing is missing now."""
        bookings: list[ActiveSequenceEvent] | None = None
        self._sync.begin_repair(router_id)
        try:
            with anyio.fail_after(self._limits.timeout_s):
                bookings = await self._bookings_of(router_id)
        except Exception as error:
            _log.info("the bookings of router %d are not known: %s", router_id, error)
        finally:
            is_repaired = self._sync.end_repair(router_id, bookings)
        return is_repaired

    async def _bookings_of(self, router_id: int) -> list[ActiveSequenceEvent]:
        found: list[ActiveSequenceEvent] = []
        async with await self._workers.engine(router_id).generate(Context(BookingsRequest())) as stream:
            async for part in stream:
                found += [one for one in part.bookings if one.router_id == router_id]
                if len(found) > self._limits.bookings:
                    raise InvalidMessage(f"more than {self._limits.bookings} bookings")
        return found
