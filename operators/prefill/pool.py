"""The prefill side as the operator sees it: who would prefill, and sending it there.

    KvPrefill(chooser, KvPushRouter(chooser) >> PushRouter(workers))      by cached prefixes and load
    PushPrefill(PushRouter(workers, mode))                                in any of that router's modes

Source: dynamo lib/llm/src/kv_router/prefill_router/inner.rs, InnerPrefillRouter.
"""

from __future__ import annotations

from typing import Protocol

from attrs import evolve, frozen

from pipeline import AsyncEngine, Cancelled, Context, PenstockError, ResponseStream
from pipeline.protocols import PreprocessedRequest, RequestPhase

from ..kv.chooser import KvRouter
from ..kv.hashed_prompts import hash_beside_the_loop, with_shared_hashes
from ..kv.router_dispatch import Output, send_to
from ..kv.router_request import RouteRequest
from ..push_router import PushRouter
from .resolve import Found, PrefillWorker

PrefillEngine = AsyncEngine[PreprocessedRequest, Output]


class PrefillPool(Protocol):
    """A pool of prefill workers behind some router."""

    @property
    def engine(self) -> PrefillEngine:
        """The graph a prefill goes through."""
        ...

    @property
    def is_direct(self) -> bool:
        """Whether every request has to name its worker."""
        ...

    def find(self, request: Context[PreprocessedRequest]) -> Found:
        """Whom the request would go to; nothing is booked, and nobody's turn is over."""
        ...

    def take(self, request: Context[PreprocessedRequest]) -> None:
        """The one found is sent the request: the next turn is another's."""
        ...

    def prompt_tokens_of(self, request: Context[PreprocessedRequest]) -> tuple[PrefillWorker, int] | None:
        """Whom the request would go to, and the prompt tokens in flight there; None where that is not known."""
        ...

    async def send(self, request: Context[PreprocessedRequest], worker_id: int | None) -> ResponseStream[Output]:
        """The answer of that worker, or of the one the router takes. The request itself names a worker that is set.

        Calls the tracker's `record_prefill_start` when a worker is handed the request. Until then the request may be
        stopped; it is then not sent, and this raises Cancelled.
        """
        ...


@frozen
class KvPrefill:
    """A pool whose chooser knows cached prefixes and load. `engine` is a graph with that chooser's KvPushRouter.

    The chooser should be made with `worker_type="prefill"` and, as prefill workers do not decode, with a configuration
    whose `router_track_active_blocks` is off.
    """

    chooser: KvRouter
    engine: PrefillEngine
    is_direct: bool = False

    async def prepare(self, request: Context[PreprocessedRequest]) -> None:
        """Hash a long prompt beside the loop; see `hash_beside_the_loop`."""
        await hash_beside_the_loop(self._route(request), request)

    def find(self, request: Context[PreprocessedRequest]) -> Found:
        try:
            route = self._route(request)
            rank = self.chooser.advise(route if route.override is None else evolve(route, override=None)).rank
        except PenstockError as error:
            return error
        return PrefillWorker(rank.worker_id, rank.dp_rank)

    def take(self, request: Context[PreprocessedRequest]) -> None:
        pass  # it is booked when it is sent

    def prompt_tokens_of(self, request: Context[PreprocessedRequest]) -> tuple[PrefillWorker, int] | None:
        decision = self.chooser.advise(self._route(request))
        worker = PrefillWorker(decision.rank.worker_id, decision.rank.dp_rank)
        return worker, decision.chosen.active_prefill_tokens

    async def send(self, request: Context[PreprocessedRequest], worker_id: int | None) -> ResponseStream[Output]:
        return await self.engine.generate(request)

    def _route(self, request: Context[PreprocessedRequest]) -> RouteRequest:
        route = self.chooser.route_request(request.payload, RequestPhase.PREFILL, request.metadata)
        return with_shared_hashes(route, request)


@frozen
class PushPrefill:
    """A pool behind a PushRouter, or behind a graph that ends in it; `graph` then has it in mode `direct`."""

    router: PushRouter[PreprocessedRequest, Output]
    graph: PrefillEngine | None = None

    @property
    def engine(self) -> PrefillEngine:
        return self.router if self.graph is None else self.graph

    @property
    def is_direct(self) -> bool:
        return self.router.is_direct

    def find(self, request: Context[PreprocessedRequest]) -> Found:
        if (found := self.router.peek(request)) is not None:
            return PrefillWorker(found)
        return None if self.is_direct else self.router.refusal()

    def take(self, request: Context[PreprocessedRequest]) -> None:
        self.router.select(request)

    def prompt_tokens_of(self, request: Context[PreprocessedRequest]) -> tuple[PrefillWorker, int] | None:
        return None

    async def send(self, request: Context[PreprocessedRequest], worker_id: int | None) -> ResponseStream[Output]:
        if request.is_stopped:
            raise Cancelled("stopped before its prefill was sent")
        tracker, hints = request.payload.tracker, request.payload.routing
        if tracker is not None:
            tracker.record_prefill_start()
            if worker_id is not None:
                tracker.record_worker(worker_id, None if hints is None else hints.prefill_dp_rank, "prefill")
        if worker_id is None:
            return await self.engine.generate(request)
        return await send_to(request, worker_id, self.engine)
