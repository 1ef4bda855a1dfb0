"""PrefillRouter: prefill elsewhere first, and hand its result to decode.

    request ──► resolve ─┬─ rendezvous known ──► prefill in the background ─┬─► decode begins at once
                         ├─ not known ─────────► prefill to its end ────────┴─► decode with its result
                         └─ nobody prefills ───► as it came (or refused) ─────► decode alone

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, PrefillRouter.

PrefillSettings: what a deployment decides about prefilling elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import isfinite
from random import Random
from types import TracebackType
from typing import Self

import anyio
from attrs import evolve, frozen

from pipeline import (
    AsyncEngine,
    Cancelled,
    Context,
    InvalidArgument,
    Operator,
    ResourceExhausted,
    ResponseStream,
    Stage,
    Unavailable,
)
from pipeline.llm import track_request
from pipeline.network import Ids
from pipeline.protocols import PhasePermit, PreprocessedRequest, RequestPhase, RequestTracker, RoutingHints
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL
from pipeline.rx import AnyIOScheduler, Observable
from pipeline.telemetry import Tracer

from ..kv import WorkerRank, share_hashes
from ..pool import Output
from ..records import copied
from .background import Handovers
from .conditional import ConditionalDisaggregation, without_claim
from .decode import announced, decode_in_span, fed
from .errors import PrefillNotActivated, backpressure
from .plan import Plan, decode_request, make_plan
from .pool import Activation, Configs, KvPrefill, PrefillPool, PrefillSide
from .resolve import PrefillWorker, named_worker
from .transfer import Handover


@frozen(kw_only=True)
class PrefillSettings:
    """Raises InvalidArgument, naming the field, for what cannot be.

    `enforce_disagg`: requests are refused, not served without, while nobody can prefill. At most `prefills_max` run at
    once, those that wait in a router's queue included, and each for `prefill_timeout_s`. A prefill that fails when
    decode waits for it already fails the request unless decode shows an item within `decode_patience_s`.
    `drain_timeout_s` is how long the end of the operator waits for those under way.
    """

    enforce_disagg: bool = False
    prefills_max: int = 4096
    prefill_timeout_s: float = 600.0
    decode_patience_s: float = 30.0
    drain_timeout_s: float = 5.0

    def __attrs_post_init__(self) -> None:
        if self.prefills_max < 1:
            raise InvalidArgument(f"must be at least 1, got {self.prefills_max}", field="prefills_max")
        for name in ("prefill_timeout_s", "decode_patience_s", "drain_timeout_s"):
            value: float = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise InvalidArgument(f"must be finite and not negative, got {value}", field=name)


_log = logging.getLogger(__name__)

Next = AsyncEngine[PreprocessedRequest, Output]


class PrefillRouter(Operator[PreprocessedRequest, Output, PreprocessedRequest, Output]):
    """Has a prefill worker compute the prompt, then a decode worker go on; without prefill workers it is transparent.

        request ──► prefill: a copy for one token, to `prefill`
                └─► decode: its result or meeting point, and where its blocks can go, to the next stage
        stream  ◄── decode's, unchanged

    Stands below Migration, so that a retry repeats both halves, and above the decode router.

    `prefill` is the pool (`KvPrefill`, `PushPrefill`), or a function that makes it when the first worker is there; None
    for never. `workers` tells who is there, `configs` what they say of themselves (see `operators.kv.configs_of`).
    Prefills are tasks of `scheduler`. A traced request has its halves in spans, `prefill` and `decode`, made by
    `tracer`, the second linked to the first. A context manager: its end takes nothing new, waits for prefills under way
    and then cuts them; `close` only stops following the workers.

    Raises PrefillNotActivated and Cancelled with nothing done; a ResourceExhausted that begins "router backpressure
    during prefill resolve" where nobody has room, TopologyError, and InvalidArgument in mode direct for a request that
    names no prefill worker, all with nothing sent; PrefillError for what a prefill met before decode began.

    A stop or kill, or a cancelled task, before the prefill is sent raises Cancelled, and it is not sent. Later they
    reach decode only, except that a worker which promises `EngineConfig.stops_prefills` is sent a stop as long as its
    prefill has given no item and decode was not asked. Any other prefill goes on, and decode is asked when it is due,
    also for a request that is stopped or killed by then, since the blocks must be taken; where the task that waits is
    cancelled, that happens in the background, with a request that is stopped. A prefill that fails when decode has
    begun is a warning, unless decode waits for its blocks: see `PrefillSettings.decode_patience_s`. A new attempt of
    the same request ends the prefill of the one before.
    """

    def __init__(
        self,
        prefill: PrefillPool | Callable[[], PrefillPool] | None,
        workers: Observable[Ids] | None = None,
        *,
        scheduler: AnyIOScheduler,
        configs: Observable[Configs] | None = None,
        settings: PrefillSettings | None = None,
        conditional: ConditionalDisaggregation | None = None,
        rng: Random | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = PrefillSettings() if settings is None else settings
        self._side = PrefillSide(prefill, workers, configs)
        self._handovers = Handovers(scheduler, self.settings.prefills_max)
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
            payload = copied(payload)
            payload.tracker = track_request(self._wall_ms)
            request = request.with_payload(payload)
        share_hashes(request)
        if isinstance(pool, KvPrefill):
            await pool.prepare(request)
        await self._handovers.replace(request.registry)
        if (rank := self._bypass(request, pool)) is not None:
            return await self._decoded_alone(request, rank, next)
        handover, plan = await self._dispatched(request, pool)
        return await self._decoded(request, handover, plan, next)

    # -- prefill

    async def _dispatched(self, request: Context[PreprocessedRequest], pool: PrefillPool) -> tuple[Handover, Plan]:
        """The prefill under way in its own task, and what was decided."""
        permit = await _tracker(request).set_phase(RequestPhase.PREFILL)
        try:
            return self._start(request, pool, permit)
        except BaseException:
            permit.release()
            raise

    def _start(
        self, request: Context[PreprocessedRequest], pool: PrefillPool, permit: PhasePermit
    ) -> tuple[Handover, Plan]:
        if request.is_stopped:
            raise Cancelled("stopped before its prefill")
        self._handovers.check_room()
        plan = make_plan(request, pool, self._side.activation.is_activated, self._side.configs, self._rng)
        settings = self.settings
        handover = Handover(
            request.child(plan.prefill, linked=False),
            pool,
            plan.worker,
            permit,
            plan.meeting,
            settings.prefill_timeout_s,
            settings.decode_patience_s,
            plan.was_chosen,
            self._stops_prefills,
            self._tracer,
        )
        self._handovers.start(handover, request)
        return handover, plan

    def _stops_prefills(self, worker_id: int) -> bool:
        config = self._side.configs.get(worker_id)
        return config is not None and config.stops_prefills

    # -- decode

    async def _decoded(
        self, request: Context[PreprocessedRequest], handover: Handover, plan: Plan, next: Next
    ) -> ResponseStream[Output]:
        try:
            payload = await self._decode_payload(request, handover, plan)
        except Exception:
            handover.abandon()
            raise
        except BaseException:  # the caller has left; blocks that are computed must be taken all the same
            handover.client_left()
            work = partial(self._received, request, handover, plan, next)
            self._handovers.receive(work, self.settings.prefill_timeout_s)
            raise
        if request.is_stopped:
            _log.debug("request %r was stopped during its prefill, decode is asked for the blocks' sake", request.id)
        return await fed(request, payload, handover, next)

    async def _decode_payload(
        self, request: Context[PreprocessedRequest], handover: Handover, plan: Plan
    ) -> PreprocessedRequest:
        """The request for decode, once decode may begin. Raises Cancelled where there will be no blocks to take."""
        handed = await handover.ready()
        (await _tracker(request).set_phase(RequestPhase.DECODE)).release()
        if handover.is_withdrawn and not handover.is_over:
            raise Cancelled("stopped before its prompt was computed")
        worker = handover.worker
        return decode_request(
            request.payload,
            None if worker is None else worker.worker_id,
            handed,
            plan.constraints,
            keeps_overlap=self._conditional is not None and self._conditional.rules is not None,
        )

    async def _received(
        self, request: Context[PreprocessedRequest], handover: Handover, plan: Plan, next: Next
    ) -> None:
        """Decode for a task that is gone: asked and stopped at once, so that it takes the blocks and lets them go."""
        try:
            payload = await self._decode_payload(request, handover, plan)
            below = request.child(payload, linked=False)
            below.stop()
            await (await decode_in_span(below, handover, next)).collect()
        finally:
            handover.abandon()

    async def _decoded_alone(
        self, request: Context[PreprocessedRequest], rank: WorkerRank, next: Next
    ) -> ResponseStream[Output]:
        """Both halves by one decode worker, which is told so, as is the caller."""
        (await _tracker(request).set_phase(RequestPhase.DECODE)).release()
        payload = request.payload
        hints = evolve(payload.routing or RoutingHints(), decode_worker_id=rank.worker_id, dp_rank=rank.dp_rank)
        asked = evolve(payload, routing=hints, annotations=[*payload.annotations, BYPASS_REMOTE_PREFILL])
        return announced(request, await next.generate(request.with_payload(asked)))

    def _bypass(self, request: Context[PreprocessedRequest], pool: PrefillPool) -> WorkerRank | None:
        return None if self._conditional is None else self._conditional.bypass(request, pool, self._side.configs)

    # -- its state

    @property
    def activation(self) -> Activation:
        return self._side.activation

    @property
    def can_serve_requests(self) -> bool:
        """Whether a request could be served now, be it without prefill."""
        return self._side.activation.can_serve(self.settings.enforce_disagg)

    @property
    def prefills(self) -> int:
        """How many prefills are under way."""
        return len(self._handovers)

    def deactivate(self) -> None:
        """Asks nobody until `reactivate`, or until workers come back."""
        self._side.deactivate()

    def reactivate(self) -> None:
        """Undoes `deactivate`; activates nothing."""
        self._side.reactivate()

    def query_prefill_worker(self, request: Context[PreprocessedRequest], *, takes_turn: bool = False) -> PrefillWorker:
        """Who would prefill that request; nothing is booked or sent. Raises what the request would meet.

        With `takes_turn` a plain pool goes on to its next worker.
        """
        if (pool := self._side.usable) is None:
            raise PrefillNotActivated
        if (named := named_worker(request.payload.routing)) is not None:
            return named
        found = pool.find(request)
        if isinstance(found, ResourceExhausted):
            raise backpressure(found)
        if not isinstance(found, PrefillWorker):
            raise found or Unavailable("it cannot be said beforehand who prefills this request")
        if takes_turn:
            pool.take(request)
        return found

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
                await self._handovers.drained()
        finally:
            self._handovers.cut()
            with anyio.CancelScope(shield=True):
                await self._handovers.drained()

    def _wall_ms(self) -> int:
        return round(self._scheduler.now.timestamp() * 1000)


def _tracker(request: Context[PreprocessedRequest]) -> RequestTracker:
    tracker = request.payload.tracker
    assert tracker is not None
    return tracker
