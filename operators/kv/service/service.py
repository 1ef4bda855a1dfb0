"""RouterService: a KvRouter that selects workers for other programs, over the network.

    new ──► chosen and booked under the request's id ──► worker, rank, overlap
    mark_prefill, mark_free ──► the booking's prompt is computed, the booking is over
    potential_loads ──► the load of every rank with the prompt

Source: dynamo lib/llm/src/kv_router.rs, AsyncEngine for KvRouter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pipeline import Annotated, AsyncEngine, Cancelled, Context, InvalidArgument, ReleaseOnce, ResponseStream
from pipeline.protocols import BlockExtraInfo, RoutingConstraints
from pipeline.wire import from_plain

from ..errors import QueueRejected
from ..prompt import PromptBlocks
from ..request import POLICY_CLASS, RouteRequest
from ..reservation import Reservation
from ..router import KvRouter
from .messages import (
    BackpressureResponse,
    FreeMarked,
    LoadsRequest,
    LoadsResponse,
    MarkFree,
    MarkPrefill,
    NewRequest,
    NewResponse,
    PrefillMarked,
    QueueRejectedResponse,
    QueueRejection,
    RouterRequest,
    RouterResponse,
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
        message = _record(request.payload)
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
            blocks=self._blocks(message.tokens, message.block_mm_infos, message.lora_name, message.cache_namespace),
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
            blocks = self._blocks(message.tokens, message.block_mm_infos, message.lora_name, message.cache_namespace)
            loads = self.router.potential_loads(blocks)
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
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            reservation.release()
        return FreeMarked(self.router.loads.sequences.get(request_id) is None)

    def _blocks(
        self, tokens: list[int], media: list[BlockExtraInfo | None] | None, lora: str | None, namespace: str | None
    ) -> PromptBlocks:
        router = self.router
        return PromptBlocks(tokens, router.block_size_tokens, lora, namespace, router.lookup.is_eagle, media or ())


def _record(payload: Any) -> RouterRequest:
    return payload if isinstance(payload, RouterRequest) else from_plain(payload, RouterRequest)


def _rejection(rejected: QueueRejected) -> RouterResponse:
    """The answer for a full queue: that of a class, or by depth, where there is no class."""
    if rejected.policy_class:
        kind: Any = rejected.limit_kind
        rejection = QueueRejection(rejected.policy_class, kind, rejected.current, rejected.limit)
        return QueueRejectedResponse(rejection)
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
