"""KvPushRouter: asks the chooser, sends direct, and keeps account until the stream ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from math import isfinite
from typing import Any

from attrs import asdict, evolve

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
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
    RequestTracker,
    RouterChoice,
    RoutingData,
    RoutingHints,
)
from pipeline.protocols.openai import QUERY_INSTANCE_ID
from pipeline.telemetry import annotate

from ..pool import Next, Output, assign_worker
from ..records import copied
from .errors import QueueRejected
from .metrics import RouterMetrics, span_below
from .request import RouteRequest, hash_beside_the_loop, with_shared_hashes
from .reservation import Placement, RequestAccount, ends_badly
from .router import KvRouter
from .selection import Decision
from .sessions import SESSION_HEADER, Entered, First, Sessions, check_explicit, may_retry_unpinned, session_id_of
from .types import WorkerRank

_log = logging.getLogger(__name__)

ROUTER_DECISION = "router_decision"
"""Annotation that asks for an event of this name before the answer: where the request goes, and why."""


class KvPushRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Sends each request to the worker that is best for it, and keeps the chooser's account of it.

        request ──► worker chosen, booked; routing.dp_rank set ──► that worker, by PushRouter
        stream  ◄── items unchanged, counted                   ◄──

    Stands above PushRouter, which sends the request to the worker assigned to it in every mode. Three ways:

    1. annotation `query_instance_id:`: one item that says where the request would go; nothing is booked, sent, counted
    2. `routing` names a worker for this phase: there, if it may take the request
    3. otherwise: where the chooser finds it best

    With `router_decision` among the annotations the reasons come first on the stream; a traced request has them as
    attributes of this stage's span. Where the chooser keeps sessions, requests of one session (`X-Dynamo-Session-ID` in
    the metadata) go where the first went.

    Raises what `KvRouter.find_best_match` and `PushRouter` raise. A stop or kill while the request waits for
    room raises Cancelled, and so does a prefill that is stopped when its turn comes; later both are the worker's
    business, and what a stop leaves is delivered. What is booked is released once, on every way out, before an error or
    an item that says the answer failed is shown.

    Source: dynamo lib/llm/src/kv_router/push_router.rs, KvPushRouter. Other than there a failed dispatch leaves no
    booking, an id that is booked already is an error, and queries are not counted.
    """

    def __init__(self, chooser: KvRouter, *, metrics: RouterMetrics | None = None, tracer: Any = None) -> None:
        self.chooser = chooser
        self._metrics = RouterMetrics(worker_type=chooser.worker_type) if metrics is None else metrics
        self._tracer = tracer

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Output]
    ) -> ResponseStream[Output]:
        payload = request.payload
        asked = self.chooser.route_request(payload, _phase(payload.tracker), request.metadata)
        route = with_shared_hashes(asked, request)
        await hash_beside_the_loop(route, request)
        session_id = None if self.chooser.sessions is None else session_id_of(_session(request.metadata))
        if payload.get_annotation_value(QUERY_INSTANCE_ID) is not None:
            return self._answer(request, route, session_id)
        if session_id is None:
            return (await self._routed(request, route, next))[0]
        return await self._in_session(request, route, session_id, next)

    # -- 1: only asked

    def _answer(
        self, request: Context[PreprocessedRequest], route: RouteRequest, session_id: str | None
    ) -> ResponseStream[Output]:
        """One item: the workers as the tracker knows them now, and the prompt's tokens, said in both ways there are."""
        payload = request.payload
        sessions = self.chooser.sessions
        bound = None if sessions is None or session_id is None else sessions.peek(session_id)
        with span_below(request, "kv_router.select_worker", self._tracer):
            decision = self.chooser.advise(route) if bound is None else self._advise_in_session(route, bound)
        self._note(request, decision)
        workers = None if payload.tracker is None else payload.tracker.worker_info()
        known = None if workers is None else {k: v for k, v in asdict(workers).items() if v is not None}
        said = {"worker_id": known, "token_ids": payload.token_ids}
        routing = RoutingData(worker_id=workers, token_ids=payload.token_ids)
        answer = LLMEngineOutput([], disaggregated_params=said, routing_data=routing)
        return ResponseStream.of([Annotated(answer)], request)

    def _advise_in_session(self, route: RouteRequest, bound: WorkerRank) -> Decision:
        """As a request of the session would go: elsewhere, if its worker cannot take it and it names none itself."""
        try:
            return self.chooser.advise(_in_session_of(bound, route))
        except PenstockError as error:
            if route.worker_id is not None or not _shows_a_lost_worker(error):
                raise
        return self.chooser.advise(route)

    # -- 2 and 3: chosen and sent

    async def _routed(
        self, request: Context[PreprocessedRequest], route: RouteRequest, next: Next
    ) -> tuple[ResponseStream[Output], WorkerRank]:
        """The answer, and whose it is."""
        waiting = self.chooser.waiting_requests
        placement = await self._placed(request, route)
        account = self._account(request.payload, placement)
        try:
            if request.is_stopped and account.phase is RequestPhase.PREFILL:  # decode of such a request takes blocks
                raise Cancelled("stopped before its prefill was sent")
            if route.worker_id is None:
                _log_choice(placement.decision)
            self._note(request, placement.decision)
            if (tracker := request.payload.tracker) is not None:
                tracker.record_router_queue_depth(waiting)
                tracker.record_prefill_start()
            self._metrics.routed(account.input_tokens, tracker, placement.decision)
            reasons = self._reasons(request.payload, placement.decision)
            stream = await self._sent(request, placement, next)
        except BaseException:
            account.finish()
            raise
        account.was_dispatched = True
        placement.forget_decision()
        return ResponseStream(_counted(stream, account, reasons), request, stream, account.held), placement.rank

    async def _placed(self, request: Context[PreprocessedRequest], route: RouteRequest) -> Placement:
        if request.trace is None:
            return await self._found(request, route)
        with span_below(request, "kv_router.select_worker", self._tracer) as below:
            return await self._found(below, route)

    async def _found(self, request: Context[PreprocessedRequest], route: RouteRequest) -> Placement:
        steps = self._metrics.steps(self.chooser.clock.now_s, request, self._tracer)
        try:
            return await self.chooser.find_best_match(
                route, request_id=request.id, control=request.control, steps=steps
            )
        except QueueRejected as error:
            self._metrics.refused(error)
            raise

    async def _sent(
        self, request: Context[PreprocessedRequest], placement: Placement, next: Next
    ) -> ResponseStream[Output]:
        rank, phase = placement.rank, _phase(request.payload.tracker)
        ranked = request.with_payload(_with_rank(request.payload, rank, phase))
        assign_worker(ranked, rank.worker_id)
        if request.trace is None:
            return await next.generate(ranked)
        attributes = {
            "request_id": request.id,
            "worker_id": rank.worker_id,
            "dp_rank": rank.dp_rank,
            "overlap_blocks": placement.decision.overlap_blocks,
            "best_available_overlap_blocks": placement.decision.best_available_overlap_blocks,
            "phase": phase.value,
        }
        # The stages below hang below this stage's span, not below this one, which ends before their streams.
        with span_below(request, "kv_router.route_request", self._tracer, attributes):
            return await next.generate(ranked)

    # -- sessions

    async def _in_session(
        self, request: Context[PreprocessedRequest], route: RouteRequest, session_id: str, next: Next
    ) -> ResponseStream[Output]:
        """The answer of the session's worker; a worker that cannot take it any more is replaced once."""
        sessions = self.chooser.sessions
        assert sessions is not None
        retried = False
        while True:
            entry = await sessions.enter(session_id, request.id, request.control)
            try:
                return await self._entered(request, route, entry, sessions, next)
            except BaseException as error:
                if isinstance(entry, First):
                    sessions.give_up(entry)
                    raise
                sessions.leave(entry)
                if not _shows_a_lost_worker(error):
                    raise
                cancelled, explicit = request.is_stopped, route.worker_id is not None
                if not cancelled:
                    sessions.invalidate(entry)
                if not may_retry_unpinned(cancelled=cancelled, explicit=explicit, retried=retried):
                    raise
                retried = True

    async def _entered(
        self, request: Context[PreprocessedRequest], route: RouteRequest, entry: Entered, sessions: Sessions, next: Next
    ) -> ResponseStream[Output]:
        """The answer, with its part of the session held while it lasts."""
        if isinstance(entry, First):
            stream, rank = await self._routed(request, route, next)
            bound = sessions.bind(entry, rank)
        else:
            stream, _ = await self._routed(request, _in_session_of(entry.rank, route), next)
            bound = entry
        lease = ReleaseOnce(partial(sessions.leave, bound))
        return ResponseStream(_leased(stream, lease), request, stream, lease)

    # -- what is told

    def _account(self, payload: PreprocessedRequest, placement: Placement) -> RequestAccount:
        hints = payload.routing
        return RequestAccount(
            placement,
            self._metrics,
            payload.tracker,
            len(payload.token_ids),
            self.chooser.block_size_tokens,
            None if hints is None else hints.expected_output_tokens,
            self.chooser.config.router_track_output_blocks,
            _phase(payload.tracker),
        )

    def _note(self, request: Context[PreprocessedRequest], decision: Decision) -> None:
        """Tells the tracker and the span."""
        prompt, blocks = decision.prompt, decision.overlap_blocks
        if (tracker := request.payload.tracker) is not None:
            tracker.record_kv_hit(blocks, prompt.blocks)
            tracker.record_isl(prompt.isl_tokens, int(blocks * prompt.block_size_tokens))
            tracker.record_worker(decision.rank.worker_id, decision.rank.dp_rank, self.chooser.worker_type)
            tracker.record_choice(_choice(decision))
        if request.trace is not None:
            annotate(request, {f"kv_router.{name}": value for name, value in decision.attributes().items()})

    def _reasons(self, payload: PreprocessedRequest, decision: Decision) -> Output | None:
        """The event that tells the caller, if it asked for it."""
        if not payload.has_annotation(ROUTER_DECISION):
            return None
        candidates = [{**_finite(asdict(one)), "rank": list(one.rank)} for one in decision.report()]
        reasons = {**_finite(decision.attributes()), "candidates": candidates}
        return Annotated[Any].from_annotation(ROUTER_DECISION, reasons)


async def _counted(
    stream: ResponseStream[Output], account: RequestAccount, reasons: Output | None
) -> AsyncGenerator[Output, None]:
    """The stream as it is; its tokens are counted, and it is off its worker's account before a failure is seen."""
    try:
        async with stream:
            if reasons is not None and not stream.context.is_stopped:
                yield reasons
            async for item in stream:
                is_marked = item.event is not None
                if (data := item.data) is not None:
                    if token_ids := data.token_ids:
                        account.count(len(token_ids))
                    is_marked = is_marked or data.finish_reason is not None
                if is_marked and ends_badly(item):
                    account.finish()
                yield item
    finally:
        account.finish()


async def _leased(stream: ResponseStream[Output], lease: ReleaseOnce) -> AsyncGenerator[Output, None]:
    try:
        async with stream:
            async for item in stream:
                yield item
    finally:
        lease.release()


def _choice(decision: Decision) -> RouterChoice:
    return RouterChoice(
        decision.placement,
        len(decision.ranks),
        decision.overlap_blocks,
        decision.best_available_overlap_blocks,
        decision.prompt.blocks,
        decision.cost if isfinite(decision.cost) else None,
    )


def _log_choice(decision: Decision) -> None:
    """Writes the line by which tools tell who was chosen: its shape is that of the original."""
    rank, blocks = decision.rank, decision.prompt.blocks
    text = "[ROUTING] Best: worker_%d dp_rank=%d with %d/%d blocks overlap"
    _log.debug(text, rank.worker_id, rank.dp_rank, decision.overlap_blocks, blocks)


def _shows_a_lost_worker(error: BaseException) -> bool:
    """Whether another worker may do better with the request: a cancellation or a wrong request says nothing of it."""
    return isinstance(error, PenstockError) and error.facts.retry


def _phase(tracker: RequestTracker | None) -> RequestPhase:
    return RequestPhase.AGGREGATED if tracker is None else tracker.phase


def _with_rank(payload: PreprocessedRequest, rank: WorkerRank, phase: RequestPhase) -> PreprocessedRequest:
    """A copy of the request that says which rank is to compute it."""
    ranked = copied(payload)
    hints = ranked.routing = RoutingHints() if payload.routing is None else copied(payload.routing)
    hints.dp_rank = rank.dp_rank
    if phase is RequestPhase.PREFILL:
        hints.prefill_dp_rank = rank.dp_rank
    return ranked


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers as JSON can say them: an extreme weight makes a cost infinite, which is left out."""
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


def _session(metadata: Mapping[str, str]) -> str | None:
    """The session in the request's metadata; header names know no case."""
    wanted = SESSION_HEADER.lower()
    return next((text for name, text in metadata.items() if name.lower() == wanted), None)
