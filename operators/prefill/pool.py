"""The prefill side as the operator sees it: who would prefill, and sending it there.

    KvPrefill(router, KvPushRouter(router) >> PushRouter(workers))      by cached prefixes and load
    PushPrefill(PushRouter(workers, mode))                                in any of that router's modes

Source: dynamo lib/llm/src/kv_router/prefill_router/inner.rs, InnerPrefillRouter.

Whether there is somebody to prefill: from the news of the workers to the pool that may be asked.

    workers ──► activated with the first, deactivated without any, reactivated with the next ──► pool
    configs ──► the workers' own settings

Source: dynamo lib/llm/src/kv_router/prefill_router/activation.rs. Other than there a pool that could not be made is
tried again with the next news, and the end of the news deactivates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from attrs import evolve, frozen

from pipeline import AsyncEngine, Cancelled, Context, PenstockError, ResponseStream
from pipeline.network import Ids
from pipeline.protocols import PreprocessedRequest, RequestPhase
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import CompositeDisposable, Observable

from ..kv import KvRouter, RouteRequest, hash_beside_the_loop, with_shared_hashes
from ..pool import Output, PushRouter, assign_worker
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
    """A pool whose router knows cached prefixes and load. `engine` is a graph with that router's KvPushRouter.

    The router should be made with `worker_type="prefill"` and, as prefill workers do not decode, with a configuration
    whose `router_track_active_blocks` is off.
    """

    router: KvRouter
    engine: PrefillEngine
    is_direct: bool = False

    async def prepare(self, request: Context[PreprocessedRequest]) -> None:
        """Hash a long prompt beside the loop; see `hash_beside_the_loop`."""
        await hash_beside_the_loop(self._route(request), request)

    def find(self, request: Context[PreprocessedRequest]) -> Found:
        try:
            route = self._route(request)
            rank = self.router.advise(route if route.override is None else evolve(route, override=None)).rank
        except PenstockError as error:
            return error
        return PrefillWorker(rank.worker_id, rank.dp_rank)

    def take(self, request: Context[PreprocessedRequest]) -> None:
        pass  # it is booked when it is sent

    def prompt_tokens_of(self, request: Context[PreprocessedRequest]) -> tuple[PrefillWorker, int] | None:
        decision = self.router.advise(self._route(request))
        worker = PrefillWorker(decision.rank.worker_id, decision.rank.dp_rank)
        return worker, decision.chosen.active_prefill_tokens

    async def send(self, request: Context[PreprocessedRequest], worker_id: int | None) -> ResponseStream[Output]:
        return await self.engine.generate(request)

    def _route(self, request: Context[PreprocessedRequest]) -> RouteRequest:
        route = self.router.route_request(request.payload, RequestPhase.PREFILL, request.metadata)
        return with_shared_hashes(route, request)


@frozen
class PushPrefill:
    """A pool behind a PushRouter; `graph`, if given, is a graph that ends in that PushRouter."""

    router: PushRouter[PreprocessedRequest, Output]
    graph: PrefillEngine | None = None

    @property
    def engine(self) -> PrefillEngine:
        return self.router if self.graph is None else self.graph

    @property
    def is_direct(self) -> bool:
        return self.router.is_direct

    def find(self, request: Context[PreprocessedRequest]) -> Found:
        if self.is_direct:
            return None
        try:
            return PrefillWorker(self.router.select_worker(request, advances=False))
        except PenstockError as error:
            return error

    def take(self, request: Context[PreprocessedRequest]) -> None:
        if not self.is_direct:
            self.router.select_worker(request)

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
        if worker_id is not None:
            assign_worker(request, worker_id)
        return await self.engine.generate(request)


_log = logging.getLogger(__name__)

Configs = Mapping[int, ModelRuntimeConfig]


@frozen
class Activation:
    """How far a prefill router has come: it is activated once and for all, and deactivated and reactivated since."""

    is_activated: bool = False
    is_deactivated: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether a request may go to a prefill worker."""
        return self.is_activated and not self.is_deactivated

    def can_serve(self, enforce_disagg: bool) -> bool:
        """Whether a request can be served at all, be it without prefill."""
        return not enforce_disagg or self.is_usable

    def deactivated(self) -> Activation:
        return evolve(self, is_deactivated=True)

    def reactivated(self) -> Activation:
        return evolve(self, is_deactivated=False)


class PrefillSide:
    """Follows the workers until it is closed; a side without workers is never activated.

    `pool` is asked for, if it is a function, with the first workers. It is kept when they leave: it finds those that
    come back by itself.
    """

    def __init__(
        self,
        pool: PrefillPool | Callable[[], PrefillPool] | None,
        workers: Observable[Ids] | None,
        configs: Observable[Configs] | None,
    ) -> None:
        self.activation = Activation()
        self.configs: Configs = {}
        self.pool: PrefillPool | None = None
        self._make: Callable[[], PrefillPool] | None = None
        if callable(pool):
            self._make = pool
        else:
            self.pool = pool
        self._following = CompositeDisposable()
        if configs is not None:  # before the workers: who is there is known with its settings
            self._following.add(configs.subscribe(self._learn, _failed))
        if workers is not None:
            self._following.add(workers.subscribe(self._hear, self._lose, self.deactivate))

    @property
    def usable(self) -> PrefillPool | None:
        """The pool, while a request may go there."""
        return self.pool if self.activation.is_usable else None

    def deactivate(self) -> None:
        self.activation = self.activation.deactivated()

    def reactivate(self) -> None:
        self.activation = self.activation.reactivated()

    def close(self) -> None:
        """Follows nothing more; nobody is asked any more."""
        self._following.dispose()
        self.deactivate()

    def _hear(self, ids: Ids) -> None:
        if self.activation.is_activated:
            self.activation = self.activation.reactivated() if ids else self.activation.deactivated()
        elif ids and self._has_pool():
            self.activation = Activation(is_activated=True)

    def _has_pool(self) -> bool:
        if self.pool is None and self._make is not None:
            try:
                self.pool = self._make()
            except Exception:
                _log.exception("the prefill pool could not be made; requests go without until the next news")
        return self.pool is not None

    def _learn(self, configs: Configs) -> None:
        self.configs = configs

    def _lose(self, error: Exception) -> None:
        _failed(error)
        self.deactivate()


def _failed(error: Exception) -> None:
    _log.error("news of the prefill workers ended", exc_info=error)
