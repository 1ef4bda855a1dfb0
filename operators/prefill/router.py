"""PrefillRouter: prefill elsewhere first, and hand its result to decode.

    request ──► reserve a worker ─┬─ meeting point known ─► prefill in the background ─┬─► decode begins at once
                                  └─ not known ───────────► prefill to its end ────────┴─► decode with its output
            ──► no prefill worker for it, or not worth it ──────────────────────────────► decode alone (or refused)

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, PrefillRouter.

PrefillSettings: what a deployment decides about prefilling elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from random import Random
from types import TracebackType
from typing import Self

import anyio
from attrs import evolve, frozen

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
    InvalidArgument,
    Operator,
    ResourceExhausted,
    ResponseStream,
    Stage,
)
from pipeline.llm import track_request
from pipeline.protocols import (
    LLMEngineOutput,
    PreprocessedRequest,
    RequestPhase,
    RequestTracker,
    RoutingHints,
)
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL
from pipeline.rx import AnyIOScheduler, Observable
from pipeline.settings import at_least, finite, setting
from pipeline.telemetry import Tracer

from ..kv import WorkerRank, share_hashes
from ..pool import Output, PoolView
from ..records import shallow_copy
from .background import PrefillTasks
from .conditional import ConditionalDisaggregation, without_claim
from .decode import decode_in_span, decode_stream
from .errors import PrefillError, PrefillNotActivated, backpressure
from .plan import decode_request, resolve
from .pool import KvPrefill, PrefillPool, PrefillSide, PrefillWorker, named_worker
from .task import PrefillTask


@frozen(kw_only=True)
class PrefillSettings:
    """What a deployment decides about prefilling elsewhere. Raises InvalidArgument, naming the field."""

    enforce_disagg: bool = setting(False, "Refuse requests, and decode none alone, while there is no prefill worker.")
    prefills_max: int = setting(4096, "Prefills at once, those that wait in a router's queue included.", at_least(1))
    prefill_timeout_s: float = setting(600.0, "Seconds a prefill may take, the wait in the queue included.", finite(0))
    decode_patience_s: float = setting(
        30.0, "Seconds decode has to give an item if its prefill fails when decode may wait for blocks.", finite(0)
    )
    drain_timeout_s: float = setting(5.0, "Seconds the end of the operator waits for prefills under way.", finite(0))


_log = logging.getLogger(__name__)

Next = AsyncEngine[PreprocessedRequest, Output]


class PrefillRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Has a prefill worker compute the prompt, then a decode worker go on; without prefill workers it is transparent.

        request ──► prefill: a copy for one token, to `prefill`
                └─► decode: its result or meeting point, and where its blocks can go, to the next stage
        stream  ◄── decode's, unchanged

    Stands below Migration, so that a retry repeats both halves, and above the decode router.

    Raises PrefillNotActivated and Cancelled with nothing done; a ResourceExhausted that begins "router backpressure
    during prefill resolve" where no worker has room, TopologyError, and InvalidArgument in mode direct for a request
    that names no prefill worker, all with nothing sent; PrefillError for what a prefill meets before decode begins.

    Where no prefill worker can take a request, because all of them cool down, have failed it, or have just left, decode
    computes its prompt, unless `enforce_disagg` is set or it names its prefill worker. A TransferFailed counts as a
    failure of the prefill worker where there is no other decode worker.

    A stop or kill, or a cancelled task, before the prefill is sent raises Cancelled, and it is not sent. Later they
    reach decode only, except that a worker which promises `EngineConfig.stops_prefills` is sent a stop as long as its
    prefill has no output and decode was not sent. Any other prefill goes on, and decode is sent when it is due, also
    for a request that is stopped or killed by then, since its blocks must be fetched; if the task that waits is
    cancelled, that happens in the background, with a request that is stopped. A prefill that fails after decode has
    begun is a warning, unless decode waits for its blocks: see `PrefillSettings.decode_patience_s`. A new attempt of
    the same request ends the prefill of the one before.

    A context manager: its end takes nothing new, waits for prefills under way and then cancels them; `close` only stops
    following the workers. A traced request has its halves in spans, `prefill` and `decode`, the second linked to the
    first.

    prefill: the pool (`KvPrefill`, `PushPrefill`), or a function that makes it when the first worker is there; None for
        never
    views: the views of the prefill workers, now and after each change, as `PushRouter.health.changes()`
    scheduler: runs the prefills as its tasks
    conditional: decides which requests are prefilled where they decode; None for none of them
    rng: draws the rooms where decode and prefill meet
    tracer: makes the spans; None for the global one
    """

    def __init__(
        self,
        prefill: PrefillPool | Callable[[], PrefillPool] | None,
        views: Observable[PoolView] | None = None,
        *,
        scheduler: AnyIOScheduler,
        settings: PrefillSettings | None = None,
        conditional: ConditionalDisaggregation | None = None,
        rng: Random | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = PrefillSettings() if settings is None else settings
        self._side = PrefillSide(prefill, views)
        self._tasks = PrefillTasks(scheduler, self.settings.prefills_max)
        self._scheduler = scheduler
        self._conditional = conditional
        self._rng = rng or Random()
        self._tracer = tracer

    async def generate(self, request: Context[PreprocessedRequest], next: Next) -> ResponseStream[Output]:
        payload = without_claim(request.payload)
        if payload is not request.payload:
            request = request.with_payload(payload)
        pool = self._side.usable
        if pool is None:
            if self.settings.enforce_disagg:
                raise PrefillNotActivated
            return await next.generate(request)
        if request.is_stopped:
            raise Cancelled("stopped before its prefill")
        if payload.tracker is None:
            payload = shallow_copy(payload)
            payload.tracker = track_request(lambda: round(self._scheduler.now.timestamp() * 1000))
            request = request.with_payload(payload)
        share_hashes(request)
        if isinstance(pool, KvPrefill):
            await pool.prepare(request)
        await self._tasks.replace(request.registry)
        if self._conditional is not None:
            rank = self._conditional.select_decode_worker(request, pool, self._side.configs)
            if rank is not None:
                return await self._decoded_alone(request, rank, next)
        return await self._disaggregated(request, pool, next)

    async def _disaggregated(
        self, request: Context[PreprocessedRequest], pool: PrefillPool, next: Next
    ) -> ResponseStream[Output]:
        prefill = await self._started(request, pool)
        try:
            return await self._decoded(request, prefill, next)
        except PrefillError:
            if not prefill.found_no_worker or self.settings.enforce_disagg or _names_prefill_worker(request):
                raise
        # Those that are there cool down, or have failed this request, or the last one has left: as without any.
        (await _tracker(request).set_phase(RequestPhase.AGGREGATED)).release()
        return await next.generate(request)

    # -- prefill

    async def _started(self, request: Context[PreprocessedRequest], pool: PrefillPool) -> PrefillTask:
        """Return the prefill, under way in its own task."""
        permit = await _tracker(request).set_phase(RequestPhase.PREFILL)
        try:
            if request.is_stopped:
                raise Cancelled("stopped before its prefill")
            if pool.is_direct and not _names_prefill_worker(request):
                raise InvalidArgument(
                    "in direct mode a request names its prefill worker: the router in front sets prefill_worker_id "
                    "(header x-dynamo-prefill-instance-id, formerly x-prefill-instance-id), and this request has none",
                    field="routing.prefill_worker_id",
                )
            self._tasks.check_room()
            prefill = PrefillTask(
                request.child(request.payload, linked=False),
                pool,
                lambda worker: resolve(request.payload, worker, self._side.configs, self._rng),
                permit,
                self.settings.prefill_timeout_s,
                self.settings.decode_patience_s,
                self._tracer,
            )
            self._tasks.start(prefill, request)
        except BaseException:
            permit.release()
            raise
        return prefill

    # -- decode

    async def _decoded(
        self, request: Context[PreprocessedRequest], prefill: PrefillTask, next: Next
    ) -> ResponseStream[Output]:
        try:
            payload = await self._decode_payload(request, prefill)
        except anyio.get_cancelled_exc_class():
            # The caller's task is cancelled; blocks that are computed must be fetched all the same.
            prefill.client_left()
            self._tasks.run_detached(partial(self._fetched, request, prefill, next), self.settings.prefill_timeout_s)
            raise
        except BaseException:
            prefill.abandon()
            raise
        if request.is_stopped:
            _log.debug("request %r was stopped during its prefill; decode is sent to fetch the blocks", request.id)
        return await decode_stream(request, payload, prefill, next)

    async def _decode_payload(self, request: Context[PreprocessedRequest], prefill: PrefillTask) -> PreprocessedRequest:
        """Return decode's request, once decode may begin. Raise Cancelled where there will be no blocks to fetch."""
        handed = await prefill.ready()
        (await prefill.tracker.set_phase(RequestPhase.DECODE)).release()
        if prefill.is_withdrawn and not prefill.is_done:
            raise Cancelled("stopped before its prompt was computed")
        plan = prefill.plan
        assert plan is not None, "decode is due, so the prefill was sent"
        return decode_request(
            request.payload,
            plan.worker.worker_id,
            handed,
            plan.constraints,
            keeps_overlap=self._conditional is not None and self._conditional.config.conditional_disagg_enabled,
        )

    async def _fetched(self, request: Context[PreprocessedRequest], prefill: PrefillTask, next: Next) -> None:
        """Decode for a task that is gone: sent and stopped at once, so that it fetches the blocks and frees them."""
        try:
            payload = await self._decode_payload(request, prefill)
            below = request.child(payload, linked=False)
            below.stop()
            await (await decode_in_span(below, prefill, next)).collect()
        finally:
            prefill.abandon()

    async def _decoded_alone(
        self, request: Context[PreprocessedRequest], rank: WorkerRank, next: Next
    ) -> ResponseStream[Output]:
        """Return the stream of one decode worker that does both halves; its request and the stream are marked so."""
        (await _tracker(request).set_phase(RequestPhase.DECODE)).release()
        payload = request.payload
        hints = evolve(payload.routing or RoutingHints(), decode_worker_id=rank.worker_id, dp_rank=rank.dp_rank)
        marked = evolve(payload, routing=hints, annotations=[*payload.annotations, BYPASS_REMOTE_PREFILL])
        stream = await next.generate(request.with_payload(marked))
        return stream.prepend(Annotated[LLMEngineOutput].from_annotation(BYPASS_REMOTE_PREFILL, True))

    # -- its state

    @property
    def can_serve_requests(self) -> bool:
        """Whether a request could be served now, be it without prefill."""
        return self._side.usable is not None or not self.settings.enforce_disagg

    @property
    def prefills(self) -> int:
        """How many prefills are under way."""
        return len(self._tasks)

    def deactivate(self) -> None:
        """Send no prefill until `reactivate`, or until workers come back."""
        self._side.deactivate()

    def reactivate(self) -> None:
        """Undoes `deactivate`; activates nothing."""
        self._side.reactivate()

    def query_prefill_worker(self, request: Context[PreprocessedRequest], *, takes_turn: bool = False) -> PrefillWorker:
        """Return the worker that would prefill that request; nothing is booked or sent. Raise what would refuse it.

        With `takes_turn` a plain pool goes on to its next worker.
        """
        if (pool := self._side.usable) is None:
            raise PrefillNotActivated
        if (named := named_worker(request.payload.routing)) is not None:
            return named
        try:
            return pool.find(request, takes_turn=takes_turn)
        except ResourceExhausted as error:
            raise backpressure(error) from error

    def branches(self) -> dict[str, Stage]:
        return {} if self._side.pool is None else {"prefill": self._side.pool.engine}

    # -- its end

    def close(self) -> None:
        """Follows the workers no more: requests are served as without any. Prefills under way go on."""
        self._side.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        try:
            with anyio.move_on_after(self.settings.drain_timeout_s if kind is None else 0):
                await self._tasks.drained()
        finally:
            self._tasks.cut()
            with anyio.CancelScope(shield=True):
                await self._tasks.drained()


def _names_prefill_worker(request: Context[PreprocessedRequest]) -> bool:
    return named_worker(request.payload.routing) is not None


def _tracker(request: Context[PreprocessedRequest]) -> RequestTracker:
    tracker = request.payload.tracker
    assert tracker is not None
    return tracker
