"""shared_bookings: the bookings of routers in all processes, also of those from before and after a loss.

    each router ──► an instance of the endpoint `router_bookings`, whose id is that of the router
    it appears, or events of it may be lost ──► BookingsRequest ──► its live bookings, with the events since, replace
                                                                    what is known of it
    it disappears ──► its bookings are dropped

Source: dynamo lib/kv-router/src/sequences/replica_sync.rs. Other than there a router that starts late, or loses events,
requests the bookings of the others, and those of a router that is gone do not wait for their expiry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

from attrs import frozen

from pipeline import Context, function_engine
from pipeline.errors import InvalidMessage
from pipeline.network import EndpointId, EndpointWorkers, Runtime, Scope
from pipeline.protocols.field_rules import U64

from ..other_routers import OtherRouters
from .booking_events import ACTIVE_SEQUENCES_TOPIC, ActiveSequenceEvent
from .replicas import ReplicaSync

BOOKINGS_ENDPOINT = "router_bookings"
"""Name of the endpoint, in the workers' component, at which routers give their bookings."""


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
    """Bounds of the answers."""

    part_bookings: int = 64
    """Bookings in one item of an answer."""
    bookings: int = 100_000
    """The most bookings of a router that are taken in; an answer with more is refused."""


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
        workers = runtime.workers(served_at, BookingsPart)
        missed = runtime.events.missed(Scope(where.namespace, where.component), ACTIVE_SEQUENCES_TOPIC)
        attempt = partial(_repair, sync, workers, limits.bookings)
        with OtherRouters(workers, missed, sync.router_id, attempt, sync.forget).follow(runtime.scheduler):
            yield sync
    finally:
        await served.close(0)


async def _repair(
    sync: ReplicaSync, workers: EndpointWorkers[BookingsRequest, BookingsPart], bookings_max: int, router_id: int
) -> bool:
    """Request the router's bookings and put them in place; return whether nothing is missing now."""
    bookings: list[ActiveSequenceEvent] | None = None
    sync.begin_repair(router_id)
    try:
        bookings = await _bookings_of(router_id, workers, bookings_max)
    finally:
        is_repaired = sync.end_repair(router_id, bookings)
    return is_repaired


async def _bookings_of(
    router_id: int, workers: EndpointWorkers[BookingsRequest, BookingsPart], bookings_max: int
) -> list[ActiveSequenceEvent]:
    found: list[ActiveSequenceEvent] = []
    async with await workers.engine(router_id).generate(Context(BookingsRequest())) as stream:
        async for part in stream:
            found += [one for one in part.bookings if one.router_id == router_id]
            if len(found) > bookings_max:
                raise InvalidMessage(f"more than {bookings_max} bookings")
    return found
