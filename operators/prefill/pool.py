"""PrefillPool: the prefill workers behind some router: reserve one for a request, then send it there.

    KvPrefill(stage, stage >> PushRouter(workers)), stage = KvPushRouter(router)     by cached prefixes and load
    PushPrefill(PushRouter(workers, mode))                                           in any of that router's modes

PrefillSide: whether there is a pool to use, from the workers that come and go.

    workers ──► activated with the first, deactivated without any, reactivated with the next ──► pool

Source: dynamo lib/llm/src/kv_router/prefill_router/inner.rs, InnerPrefillRouter; activation.rs. Other than there a pool
that could not be made is tried again with the next change of the workers, and the end of these changes deactivates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from attrs import define, frozen

from pipeline import AsyncEngine, Cancelled, Context, ResponseStream, Unavailable
from pipeline.protocols import PreprocessedRequest, RequestPhase, RoutingHints
from pipeline.rx import Disposable, DisposableBase, Observable

from ..kv import KvPushRouter, KvRouter, RouteRequest, WorkerRank, hash_beside_the_loop
from ..pool import Configs, Output, PoolView, PushRouter, assign_worker
from ..text import offered_threads

PrefillEngine = AsyncEngine[PreprocessedRequest, Output]


@frozen
class PrefillWorker:
    """A prefill worker and its rank."""

    worker_id: int
    dp_rank: int | None = None
    """None where the worker itself decides."""


def named_worker(hints: RoutingHints | None) -> PrefillWorker | None:
    """Return the worker a request names for its prefill, with the rank it names for that, else for all phases."""
    if hints is None or hints.prefill_worker_id is None:
        return None
    rank = hints.dp_rank if hints.prefill_dp_rank is None else hints.prefill_dp_rank
    return PrefillWorker(hints.prefill_worker_id, rank)


@define
class PrefillReservation:
    """A worker that was chosen for one prefill, with what is booked for it."""

    worker: PrefillWorker
    give_back: Callable[[], object]
    """Called once, also for a prefill that was sent: it does nothing if the pool's router has taken the request."""


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

    async def reserve(self, request: Context[PreprocessedRequest]) -> PrefillReservation:
        """Choose the worker of a prefill: the one the request names, else the router's choice.

        Waits for room where the router has a queue; a stop or kill of the request then raises Cancelled. Raise why no
        worker can take it. The caller sends the request or gives the reservation back.
        """
        ...

    async def send(
        self, request: Context[PreprocessedRequest], reservation: PrefillReservation
    ) -> ResponseStream[Output]:
        """Send the request to the worker reserved for it, and return its stream.

        The request is the one of the reservation, with another payload. The tracker's `record_prefill_start` is called
        when the worker gets it. Until then the request may be stopped; it is then not sent, and this raises Cancelled.
        """
        ...

    def find(self, request: Context[PreprocessedRequest], *, takes_turn: bool = False) -> PrefillWorker:
        """Return the worker a request would go to now; nothing is booked. Raise why no worker can take it.

        With `takes_turn` a plain pool goes on to its next worker.
        """
        ...


@frozen
class KvPrefill:
    """A pool whose router knows cached prefixes and load. `engine` is a graph with `stage` in it.

    The router of `stage` should be made with `worker_type="prefill"` and, as prefill workers do not decode, with a
    configuration whose `router_track_active_blocks` is off.
    """

    stage: KvPushRouter
    engine: PrefillEngine
    is_direct: bool = False

    @property
    def router(self) -> KvRouter:
        """The router that chooses and books."""
        return self.stage.router

    async def prepare(self, request: Context[PreprocessedRequest]) -> None:
        """Hash a long prompt beside the loop; see `hash_beside_the_loop`."""
        if offered_threads(request) is not None:
            await hash_beside_the_loop(self._route(request), request, chained=self.router.chains_hashes)

    async def reserve(self, request: Context[PreprocessedRequest]) -> PrefillReservation:
        rank = await self.stage.reserve(request)
        return PrefillReservation(PrefillWorker(*rank), partial(self.stage.give_back, request))

    async def send(
        self, request: Context[PreprocessedRequest], reservation: PrefillReservation
    ) -> ResponseStream[Output]:
        return await self.engine.generate(request)

    def find(self, request: Context[PreprocessedRequest], *, takes_turn: bool = False) -> PrefillWorker:
        return PrefillWorker(*self.advise(request)[0])

    def advise(self, request: Context[PreprocessedRequest]) -> tuple[WorkerRank, int]:
        """Return the rank a request would go to now, and the prompt tokens in flight there. Raise as `find`."""
        decision = self.router.advise(self._route(request))
        return decision.rank, decision.chosen.active_prefill_tokens

    def _route(self, request: Context[PreprocessedRequest]) -> RouteRequest:
        return self.router.route_request(request, RequestPhase.PREFILL)


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

    async def reserve(self, request: Context[PreprocessedRequest]) -> PrefillReservation:
        if (named := named_worker(request.payload.routing)) is not None:
            return PrefillReservation(named, _nothing)
        worker_id = self.router.select_worker(request)
        return PrefillReservation(PrefillWorker(worker_id), self.router.give_back_turn)

    async def send(
        self, request: Context[PreprocessedRequest], reservation: PrefillReservation
    ) -> ResponseStream[Output]:
        if request.is_stopped:
            raise Cancelled("stopped before its prefill was sent")
        reservation.give_back = _nothing
        worker = reservation.worker
        if (tracker := request.payload.tracker) is not None:
            tracker.record_prefill_start()
            tracker.record_worker(worker.worker_id, worker.dp_rank, "prefill")
        assign_worker(request, worker.worker_id)
        return await self.engine.generate(request)

    def find(self, request: Context[PreprocessedRequest], *, takes_turn: bool = False) -> PrefillWorker:
        if self.is_direct:
            raise Unavailable("it cannot be said beforehand who prefills this request")
        return PrefillWorker(self.router.select_worker(request, advances=takes_turn))


def _nothing() -> None:
    """What is given back of a worker that the request names, or that was sent the request."""


_log = logging.getLogger(__name__)


class PrefillSide:
    """Follows the prefill workers until it is closed; a side without workers is never activated.

    If `pool` is a function, it is called with the first workers. The pool is kept when they leave: it finds workers
    that come back by itself. Once activated the side stays so, and may be deactivated and reactivated.
    """

    def __init__(
        self, pool: PrefillPool | Callable[[], PrefillPool] | None, views: Observable[PoolView] | None
    ) -> None:
        self.is_activated, self.is_deactivated = False, False
        self.pool: PrefillPool | None = None
        self._make: Callable[[], PrefillPool] | None = None
        if callable(pool):
            self._make = pool
        else:
            self.pool = pool
        self._view = PoolView()
        self._following: DisposableBase = Disposable()
        if views is not None:
            self._following = views.subscribe(self._on_view, self._on_lost, self.deactivate)

    @property
    def usable(self) -> PrefillPool | None:
        """The pool, while a request may go there."""
        return self.pool if self.is_activated and not self.is_deactivated else None

    @property
    def configs(self) -> Configs:
        """The settings of the workers, as far as they are known."""
        return self._view.cards.configs or {}

    def deactivate(self) -> None:
        self.is_deactivated = True

    def reactivate(self) -> None:
        self.is_deactivated = False

    def close(self) -> None:
        """Stop following the workers; the pool is not used any more."""
        self._following.dispose()
        self.deactivate()

    def _on_view(self, view: PoolView) -> None:
        before, self._view = self._view, view
        if view.ids is before.ids:
            return
        if self.is_activated:
            self.is_deactivated = not view.ids
        elif view.ids and self._has_pool():
            self.is_activated, self.is_deactivated = True, False

    def _has_pool(self) -> bool:
        if self.pool is None and self._make is not None:
            try:
                self.pool = self._make()
            except Exception:
                _log.exception("the prefill pool could not be made; requests go without until the workers change")
        return self.pool is not None

    def _on_lost(self, error: Exception) -> None:
        _log.error("changes of the prefill workers ended", exc_info=error)
        self.deactivate()
