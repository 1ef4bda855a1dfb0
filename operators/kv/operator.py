"""KvPushRouter: reserves the best worker for a request, sends it there, and accounts for its stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from math import isfinite
from typing import Any

from attrs import asdict, evolve

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
    Control,
    Operator,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    Unavailable,
)
from pipeline.protocols import (
    LLMEngineOutput,
    PreprocessedRequest,
    RequestPhase,
    RouterChoice,
    RoutingData,
    RoutingHints,
)
from pipeline.protocols.openai import QUERY_INSTANCE_ID
from pipeline.telemetry import annotate

from ..pool import Next, Output, assign_worker
from ..records import shallow_copy
from .decision import Decision
from .metrics import RequestMeter, RouterMetrics, span_below
from .request import RouteRequest, hash_beside_the_loop
from .reservation import Reservation, ends_badly
from .router import KvRouter
from .sessions import Claimed, Entered, Sessions, check_explicit, session_id_of
from .types import WorkerRank

_log = logging.getLogger(__name__)

ROUTER_DECISION = "router_decision"
"""Annotation that requests an event of this name before the answer: the chosen worker, and why."""


class KvPushRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Sends each request to the worker that is best for it, and holds its reservation until the stream ends.

        request ──► worker reserved; routing.dp_rank set ──► that worker, by PushRouter
        stream  ◄── items unchanged, counted             ◄──

    Stands above PushRouter, which sends the request to the worker assigned to it in every mode. Three ways:

    1. annotation `query_instance_id:`: one item with the worker it would go to; nothing is booked, sent or counted
    2. `routing` names a worker for this phase: there, if it may take the request
    3. otherwise: the best worker, as the router selects it

    With `router_decision` among the annotations the reasons come first on the stream; a traced request has them as
    attributes of this stage's span. Where the router keeps sessions, requests of one session (`X-Dynamo-Session-ID` in
    the metadata) go where the first went.

    A stage above that needs the worker before it sends the request calls `reserve` first.

    Raises what `KvRouter.reserve` and `PushRouter` raise. A stop or kill while the request waits for room raises
    Cancelled, and so does a prefill that is stopped when its turn comes; later a stop is the worker's to handle, and
    what it leaves is delivered. A reservation is released once, on every way out, before an error or an item that ends
    the answer badly is shown.

    Source: dynamo lib/llm/src/kv_router/push_router.rs, KvPushRouter. Other than there a failed dispatch leaves no
    booking, an id that is booked already is an error, and queries are not counted.
    """

    def __init__(self, router: KvRouter, *, metrics: RouterMetrics | None = None, tracer: Any = None) -> None:
        """`metrics` and `tracer` are by default those of the global providers."""
        self.router = router
        self._metrics = RouterMetrics(worker_type=router.worker_type) if metrics is None else metrics
        self._tracer = tracer
        self._reserved: dict[Control, Reservation] = {}
        """What `reserve` has reserved, by the request's control, until `generate` or `give_back` takes it."""

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Output]
    ) -> ResponseStream[Output]:
        has_sessions = self.router.sessions is not None
        if not has_sessions and (reservation := self._reserved.pop(request.control, None)) is not None:
            return await self._send(request, reservation, next)
        route = await self._route(request)
        session_id = session_id_of(request.metadata) if has_sessions else None
        if request.payload.get_annotation_value(QUERY_INSTANCE_ID) is not None:
            return self._answer(request, route, session_id)
        if session_id is not None:
            return await self._in_session(request, route, session_id, next)
        reservation = self._reserved.pop(request.control, None) if has_sessions else None
        return await self._send(request, reservation or await self._reserve(request, route), next)

    async def reserve(self, request: Context[PreprocessedRequest]) -> WorkerRank:
        """Reserve a worker for a request, in its turn if all are busy; `generate` then sends it there.

        The request that is sent is this one or what `with_payload` makes of it. One that is not sent needs
        `give_back`. A request with the annotation `query_instance_id:` books nothing. Raises as `KvRouter.reserve`.
        """
        route = await self._route(request)
        if request.payload.get_annotation_value(QUERY_INSTANCE_ID) is not None:
            return self.router.advise(route).rank
        reservation = await self._reserve(request, route)
        self._reserved[request.control] = reservation
        return reservation.decision.rank

    def give_back(self, request: Context[PreprocessedRequest]) -> None:
        """Release what `reserve` has reserved, if `generate` has not taken it."""
        if (reservation := self._reserved.pop(request.control, None)) is not None:
            reservation.release()

    async def _route(self, request: Context[PreprocessedRequest]) -> RouteRequest:
        tracker = request.payload.tracker
        phase = RequestPhase.AGGREGATED if tracker is None else tracker.phase
        route = self.router.route_request(request, phase)
        await hash_beside_the_loop(route, request, chained=self.router.chains_hashes)
        return route

    async def _reserve(self, request: Context[PreprocessedRequest], route: RouteRequest) -> Reservation:
        """Reserve a worker, and record how many requests waited before this one."""
        waiting = len(self.router.queue)
        with self._metrics.steps(self.router.loads.clock, request, self._tracer) as steps:
            reservation = await self.router.reserve(route, request_id=request.id, control=request.control, steps=steps)
        if (tracker := request.payload.tracker) is not None:
            tracker.record_router_queue_depth(waiting)
        if route.worker_id is None and _log.isEnabledFor(logging.DEBUG):
            # Tools parse this line; its shape is that of the original.
            (worker_id, dp_rank), decision = reservation.rank, reservation.decision
            blocks, text = decision.prompt.blocks, "[ROUTING] Best: worker_%d dp_rank=%d with %d/%d blocks overlap"
            _log.debug(text, worker_id, dp_rank, decision.overlap_blocks, blocks)
        return reservation

    # -- 2 and 3: reserved and sent

    async def _send(
        self, request: Context[PreprocessedRequest], reservation: Reservation, next: Next, entry: Entered | None = None
    ) -> ResponseStream[Output]:
        """Send the request to the reserved worker, and account for its stream; `entry` is its place in a session."""
        payload, tracker, decision = request.payload, request.payload.tracker, reservation.decision
        phase = RequestPhase.AGGREGATED if tracker is None else tracker.phase
        try:
            if phase is RequestPhase.PREFILL and request.is_stopped:  # decode of such a request takes blocks
                raise Cancelled("stopped before its prefill was sent")
            self._note(request, decision)
            self._metrics.routed(len(payload.token_ids), tracker, decision)
            reasons = _reasons(decision) if payload.has_annotation(ROUTER_DECISION) else None
            ranked = _with_rank(payload, decision.rank, phase)
            sent = request if ranked is payload else request.with_payload(ranked)
            assign_worker(sent, decision.rank.worker_id, is_accounted=True)
            if request.trace is None:
                stream = await next.generate(sent)
            else:
                # The stages below hang below this stage's span, not below this one, which ends before their streams.
                attributes = _dispatch_attributes(request, decision, phase)
                with span_below(request, "kv_router.route_request", self._tracer, attributes):
                    stream = await next.generate(sent)
        except BaseException:
            reservation.release()
            raise
        reservation.meter = RequestMeter(self._metrics, tracker, phase)
        reservation.forget_decision()
        held = [ReleaseOnce(reservation.release)]
        if entry is not None:
            held.append(self._lease(entry, decision.rank))
        counted = _counted(stream, reservation, reasons, held)
        return ResponseStream(counted, request, stream, *held, relay=reservation.relay)

    def _note(self, request: Context[PreprocessedRequest], decision: Decision) -> None:
        """Write the choice into the tracker and the span."""
        prompt, blocks = decision.prompt, decision.overlap_blocks
        if (tracker := request.payload.tracker) is not None:
            tracker.record_kv_hit(blocks, prompt.blocks)
            tracker.record_isl(prompt.isl_tokens, int(blocks * prompt.block_size_tokens))
            tracker.record_worker(decision.rank.worker_id, decision.rank.dp_rank, self.router.worker_type)
            cost = decision.cost if isfinite(decision.cost) else None
            best = decision.best_available_overlap_blocks
            choice = RouterChoice(decision.placement, len(decision.ranks), blocks, best, prompt.blocks, cost)
            tracker.record_choice(choice)
        if request.trace is not None:
            annotate(request, {f"kv_router.{name}": value for name, value in decision.attributes().items()})

    # -- 1: only a query

    def _answer(
        self, request: Context[PreprocessedRequest], route: RouteRequest, session_id: str | None
    ) -> ResponseStream[Output]:
        """One item: the workers as the tracker has them now, and the prompt's tokens, in both response fields (legacy
        and current)."""
        payload = request.payload
        sessions = self.router.sessions
        bound = None if sessions is None or session_id is None else sessions.peek(session_id)
        with span_below(request, "kv_router.select_worker", self._tracer):
            decision = self.router.advise(route) if bound is None else self._advise_in_session(route, bound)
        self._note(request, decision)
        workers = None if payload.tracker is None else payload.tracker.worker_info()
        known = None if workers is None else {k: v for k, v in asdict(workers).items() if v is not None}
        tokens = list(payload.token_ids)
        legacy = {"worker_id": known, "token_ids": tokens}
        routing = RoutingData(worker_id=workers, token_ids=tokens)
        answer = LLMEngineOutput([], disaggregated_params=legacy, routing_data=routing)
        return ResponseStream.of([Annotated(answer)], request)

    def _advise_in_session(self, route: RouteRequest, bound: WorkerRank) -> Decision:
        """As a request of the session would go: to another worker, if its own cannot take it and it names none."""
        try:
            return self.router.advise(_in_session_of(bound, route))
        except PenstockError as error:
            if route.worker_id is not None or not _shows_a_lost_worker(error):
                raise
        return self.router.advise(route)

    # -- sessions

    async def _in_session(
        self, request: Context[PreprocessedRequest], route: RouteRequest, session_id: str, next: Next
    ) -> ResponseStream[Output]:
        """The answer of the session's worker; a worker that can no longer take it is replaced once."""
        sessions = self._sessions
        retried = False
        while True:
            entry = await sessions.enter(session_id, request.id, request.control)
            try:
                pinned = route if isinstance(entry, Claimed) else _in_session_of(entry.rank, route)
                reservation = self._reserved.pop(request.control, None) or await self._reserve(request, pinned)
                return await self._send(request, reservation, next, entry)
            except BaseException as error:
                if isinstance(entry, Claimed):
                    sessions.give_up(entry)
                    raise
                sessions.leave(entry)
                if not _shows_a_lost_worker(error):
                    raise
                if request.is_stopped:
                    raise
                sessions.invalidate(entry)
                if retried or route.worker_id is not None:
                    raise
                retried = True

    def _lease(self, entry: Entered, rank: WorkerRank) -> ReleaseOnce:
        """What keeps the session bound while the stream lasts."""
        bound = self._sessions.bind(entry, rank) if isinstance(entry, Claimed) else entry
        return ReleaseOnce(self._sessions.leave, bound)

    @property
    def _sessions(self) -> Sessions:
        assert self.router.sessions is not None, "requests are only in sessions where the router keeps them"
        return self.router.sessions


async def _counted(
    stream: ResponseStream[Output], reservation: Reservation, reasons: Output | None, held: Sequence[ReleaseOnce]
) -> AsyncGenerator[Output, None]:
    """The items unchanged. Tokens are counted, and a reservation is released before a failure is shown.

    A token that changes no load makes no call here: the reservation is advanced at its next step only.
    """
    try:
        async with stream:
            if reasons is not None and not stream.context.is_stopped:
                yield reasons
            async for item in stream:
                is_marked = item.event is not None
                if (data := item.data) is not None:
                    if token_ids := data.token_ids:
                        reservation.output_tokens += len(token_ids)
                        if reservation.output_tokens >= reservation.next_step_tokens:
                            reservation.advance()
                    is_marked = is_marked or data.finish_reason is not None
                if is_marked and ends_badly(item):
                    reservation.finish()
                yield item
    finally:
        for one in held:
            one.release()
        reservation.finish()


def _reasons(decision: Decision) -> Output:
    """The event with the reasons of the choice."""
    candidates = [{**_finite(asdict(one)), "rank": list(one.rank)} for one in decision.report()]
    reasons = {**_finite(decision.attributes()), "candidates": candidates}
    return Annotated[Any].from_annotation(ROUTER_DECISION, reasons)


def _dispatch_attributes(
    request: Context[PreprocessedRequest], decision: Decision, phase: RequestPhase
) -> Mapping[str, Any]:
    reasons = decision.attributes()
    names = ("worker_id", "dp_rank", "overlap_blocks", "best_available_overlap_blocks")
    return {"request_id": request.id, **{name: reasons[name] for name in names}, "phase": phase.value}


def _shows_a_lost_worker(error: BaseException) -> bool:
    """Whether another worker may succeed with the request; not so after a cancellation or for an invalid request."""
    return isinstance(error, PenstockError) and error.facts.retry


def _with_rank(payload: PreprocessedRequest, rank: WorkerRank, phase: RequestPhase) -> PreprocessedRequest:
    """A copy of the request with the rank that is to compute it; the request itself if it has that already."""
    hints, is_prefill, dp_rank = payload.routing, phase is RequestPhase.PREFILL, rank.dp_rank
    if hints is not None and hints.dp_rank == dp_rank and (not is_prefill or hints.prefill_dp_rank == dp_rank):
        return payload
    ranked = shallow_copy(payload)
    hints = ranked.routing = RoutingHints() if hints is None else shallow_copy(hints)
    hints.dp_rank = dp_rank
    if is_prefill:
        hints.prefill_dp_rank = dp_rank
    return ranked


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that JSON can represent: an extreme weight makes a cost infinite, which is left out."""
    return {name: number for name, number in numbers.items() if not isinstance(number, float) or isfinite(number)}


def _in_session_of(rank: WorkerRank, route: RouteRequest) -> RouteRequest:
    """The request pinned to its session's worker.

    Raises InvalidArgument if it names another, Unavailable if it may not go there, which is no mistake of its own.
    """
    if route.worker_id is not None:
        check_explicit(rank, route.worker_id, route.dp_rank)
    elif route.allowed_worker_ids is not None and rank.worker_id not in route.allowed_worker_ids:
        raise Unavailable(f"worker {rank.worker_id} of this session may not take this request")
    elif rank.worker_id in route.failed_worker_ids:
        raise Unavailable(f"worker {rank.worker_id} of this session has failed this request")
    return evolve(route, worker_id=rank.worker_id, dp_rank=rank.dp_rank)
