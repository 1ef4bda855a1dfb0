"""RouterService: a KvRouter that selects workers for other programs; no program here serves one.

    new ──► chosen and booked under the request's id ──► worker, rank, overlap
    mark_prefill, mark_free ──► the booking's prompt is computed, the booking is over
    potential_loads ──► the load of every rank with the prompt

Source: dynamo lib/llm/src/kv_router.rs, AsyncEngine for KvRouter.

Requests and answers are objects with their kind in the key `method`: `new`, `potential_loads`, `mark_prefill`,
`mark_free`; `new`, `queue_rejected`, `backpressure`, `potential_loads`, `prefill_marked`, `free_marked`.
Source: dynamo lib/kv-router/src/protocols.rs, RouterRequest and RouterResponse; `backpressure` is of the releases
before policy classes.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Literal

from attrs import define, frozen

from pipeline import Annotated, AsyncEngine, Cancelled, Context, InvalidArgument, ReleaseOnce, ResponseStream
from pipeline.protocols import BlockExtraInfo, RoutingConstraints
from pipeline.protocols.field_rules import U32, U64, InvalidRecord, Tagged, skip
from pipeline.wire import from_plain

from .errors import LimitKind, QueueRejected
from .load import PotentialLoad
from .prompt import PromptBlocks
from .request import POLICY_CLASS, RouteRequest
from .reservation import Reservation
from .router import KvRouter


class RouterRequest:
    """A request to a router service."""

    wire_union: ClassVar[Tagged]


class RouterResponse:
    """An answer of a router service; other failures are errors."""

    wire_union: ClassVar[Tagged]


@define(kw_only=True)
class NewRequest(RouterRequest):
    """Where should this prompt go? It is booked there, under the request's id.

    The longer `priority_jump` (seconds), the earlier its turn; a higher `strict_priority` goes before all of that.
    """

    tokens: list[U32]
    block_mm_infos: list[BlockExtraInfo | None] | None = None
    routing_constraints: RoutingConstraints | None = None
    priority_jump: float = 0.0
    strict_priority: U32 = skip(0)
    lora_name: str | None = None
    cache_namespace: str | None = None

    def __attrs_post_init__(self) -> None:
        if not math.isfinite(self.priority_jump):
            raise InvalidRecord("expected a finite number", "priority_jump")


@define(kw_only=True)
class LoadsRequest(RouterRequest):
    """What would each worker have to do with this prompt? Nothing is booked."""

    tokens: list[U32]
    block_mm_infos: list[BlockExtraInfo | None] | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None


@define
class MarkPrefill(RouterRequest):
    """The prompt of the request is computed. Without an id, or with a blank one, that of this request itself."""

    request_id: str | None = None


@define
class MarkFree(RouterRequest):
    """The request is over; the id as in `MarkPrefill`."""

    request_id: str | None = None


@define
class NewResponse(RouterResponse):
    """There; so many blocks of the prompt are on that rank's device."""

    worker_id: U64
    dp_rank: U32 = 0
    overlap_blocks: U32 = 0


@frozen
class QueueRejection:
    """Which limit of which class is reached."""

    policy_class: str
    limit_kind: LimitKind
    current: U64
    limit: U64


@define
class QueueRejectedResponse(RouterResponse):
    """Nowhere: no more requests of its class may wait."""

    rejection: QueueRejection


@define
class BackpressureResponse(RouterResponse):
    """Nowhere: too many prompt tokens wait already for one of which so little is cached."""

    queued_isl_tokens: U64
    max_queued_isl_tokens: U64 | None = None
    reason: Literal["max_queued_isl_tokens_exceeded"] = "max_queued_isl_tokens_exceeded"


@define
class PrefillMarked(RouterResponse):
    """False: no such request is booked here."""

    success: bool


@define
class FreeMarked(RouterResponse):
    """True also for a request that is not booked at all: it is as free as it can be."""

    success: bool


@define
class LoadsResponse(RouterResponse):
    """The load of every rank with the prompt added, and what waits in the router: requests, and their tokens."""

    loads: list[PotentialLoad]
    pending_count: U64 = 0
    pending_isl_tokens: U64 = 0


RouterRequest.wire_union = Tagged(
    {"new": NewRequest, "potential_loads": LoadsRequest, "mark_prefill": MarkPrefill, "mark_free": MarkFree},
    key="method",
)
RouterResponse.wire_union = Tagged(
    {
        "new": NewResponse,
        "queue_rejected": QueueRejectedResponse,
        "backpressure": BackpressureResponse,
        "potential_loads": LoadsResponse,
        "prefill_marked": PrefillMarked,
        "free_marked": FreeMarked,
    },
    key="method",
)


_SWEEP_RESERVATIONS = 64
"""Below so many, reservations that have expired just stay in the table."""

Answer = Annotated[RouterResponse]


class RouterService(AsyncEngine[RouterRequest, Answer]):
    """Answers each request with one item. A request is a record, or the plain object that stands for one.

        await runtime.serve("ns/router/generate", RouterService(router))

    A reservation ends with `mark_free`, or when it expires; only reservations of this service can be marked. One whose
    request was killed, or whose answer was not read, ends at once. The metadata `policy-class` names the class to wait
    in. A queue that is full is an answer.

    Raises InvalidArgument for an invalid request; for `new` what `KvRouter.reserve` raises, and Cancelled for a
    request that was stopped before; Unavailable for `potential_loads` where no worker is reachable. Marking works for a
    stopped request too. The service neither runs nor closes the router.
    """

    def __init__(self, router: KvRouter) -> None:
        self.router = router
        self._reservations: dict[str, Reservation] = {}

    async def generate(self, request: Context[RouterRequest]) -> ResponseStream[Answer]:
        payload: Any = request.payload
        message = payload if isinstance(payload, RouterRequest) else from_plain(payload, RouterRequest)
        if isinstance(message, NewRequest):
            return await self._new(request, message)
        return ResponseStream(_one(self._answer(request, message), request), request)

    # -- new

    async def _new(self, request: Context[RouterRequest], message: NewRequest) -> ResponseStream[Answer]:
        if request.is_stopped:
            raise Cancelled(f"Request {request.id} was cancelled")
        try:
            reservation = await self.router.reserve(
                self._route(request, message), request_id=request.id, control=request.control
            )
        except QueueRejected as rejected:
            return ResponseStream(_one(_rejection(rejected), request), request)
        self._sweep()
        self._reservations[request.id] = reservation
        undelivered = ReleaseOnce(reservation.release)
        return ResponseStream(_answered(reservation, undelivered, request), request, undelivered)

    def _route(self, request: Context[RouterRequest], message: NewRequest) -> RouteRequest:
        return RouteRequest(
            blocks=self._blocks(message),
            constraints=message.routing_constraints or RoutingConstraints(),
            priority_jump_s=message.priority_jump,
            strict_priority=message.strict_priority,
            policy_class=request.metadata.get(POLICY_CLASS),
        )

    def _sweep(self) -> None:
        """Forgets reservations that expired or lost their worker; now and then, so that it costs nothing each time."""
        if len(self._reservations) > 2 * len(self.router.loads) + _SWEEP_RESERVATIONS:
            self._reservations = {name: one for name, one in self._reservations.items() if one.is_live}

    # -- all else

    def _answer(self, request: Context[RouterRequest], message: RouterRequest) -> RouterResponse:
        if isinstance(message, LoadsRequest):
            loads = self.router.potential_loads(self._blocks(message))
            waiting = self.router.queue.waiting_by_class().values()
            return LoadsResponse(loads, sum(one.requests for one in waiting), sum(one.isl_tokens for one in waiting))
        if not isinstance(message, MarkPrefill | MarkFree):
            raise InvalidArgument(f"a router service does not take a {type(message).__name__}", field="method")
        named = message.request_id
        request_id = named if named is not None and named.strip() else request.id
        return self._mark_free(request_id) if isinstance(message, MarkFree) else self._mark_prefill(request_id)

    def _mark_prefill(self, request_id: str) -> PrefillMarked:
        reservation = self._reservations.get(request_id)
        if reservation is None or not reservation.is_live:
            return PrefillMarked(False)
        reservation.mark_prefill_completed()
        return PrefillMarked(True)

    def _mark_free(self, request_id: str) -> FreeMarked:
        if (reservation := self._reservations.pop(request_id, None)) is not None:
            reservation.release()
        return FreeMarked(self.router.loads.sequences.get(request_id) is None)

    def _blocks(self, message: NewRequest | LoadsRequest) -> PromptBlocks:
        size, is_eagle, media = self.router.block_size_tokens, self.router.lookup.is_eagle, message.block_mm_infos or ()
        return PromptBlocks(message.tokens, size, message.lora_name, message.cache_namespace, is_eagle, media)


def _rejection(rejected: QueueRejected) -> RouterResponse:
    """The answer for a full queue: that of a class, or by depth, where there is no class."""
    if rejected.policy_class:
        kind: Any = rejected.limit_kind
        return QueueRejectedResponse(QueueRejection(rejected.policy_class, kind, rejected.current, rejected.limit))
    return BackpressureResponse(rejected.current, rejected.limit)


async def _one(answer: RouterResponse, request: Context[Any]) -> AsyncGenerator[Answer, None]:
    """Also for a stopped request: its effect is done."""
    if not request.is_killed:
        yield Annotated(answer)


async def _answered(
    reservation: Reservation, undelivered: ReleaseOnce, request: Context[Any]
) -> AsyncGenerator[Answer, None]:
    """Where the request goes; what was not handed on ends the booking."""
    if request.is_killed:
        undelivered.release()
        return
    undelivered.cancel()
    rank, overlap_blocks = reservation.rank, int(reservation.decision.overlap_blocks)
    yield Annotated(NewResponse(rank.worker_id, rank.dp_rank, overlap_blocks))
