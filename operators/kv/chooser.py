"""KvRouter: which worker should take a prompt: what is cached, what is in flight, the choice and the queue, in one.

    KV events, own routing ──► overlap ┐
    bookings ──► active sequences ─────┼──► choose ──► book ──► Placement ──► release
    instances, cards, faults ──► pool ─┘      └─ all busy: wait

Source: dynamo lib/llm/src/kv_router.rs, KvRouter, and lib/kv-router/src/scheduling. Other than there the account of a
request is an object made with its booking, a query books and waits for nothing and so is a plain call, and a request
that names its worker goes the same way as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from types import TracebackType
from typing import Any, Self

import anyio

from pipeline import Control, InvalidArgument, PenstockError
from pipeline.network import Event, Workers
from pipeline.protocols import PreprocessedRequest, RouterConfigOverride
from pipeline.protocols.kv_events import RouterEvent
from pipeline.protocols.timing import RequestPhase
from pipeline.rx import DisposableBase, Observable

from .active_sequences import EXPIRY_S, SWEEP_EVERY_S, ActiveSequences, SequenceLoad
from .active_sequences_hashes import tracking_hashes
from .active_sequences_loads import PotentialLoad
from .block_hash import PromptBlocks
from .choose import Decision, choose
from .config import KvRouterConfig
from .config_settings import RequestSettings
from .cost import Prompt, WorkerType
from .eligibility import RoutingRules
from .event_feed import Recover
from .overlap import Overlap
from .queue_classes import PolicyProfile, PromptSize
from .queue_limits import DepthTier
from .router_admission import Admission, Applicant
from .router_clock import LoopClock
from .router_overlap import OverlapSource
from .router_placement import Placement
from .router_pool import Configs, RouterPool
from .router_request import RouteRequest
from .router_sessions import Sessions
from .worker_rank import WorkerRank

REFRESH_AFTER_S = 10.0
"""After how long a wait what is cached is looked up again."""
MODELLED_DRAIN_EVERY_S = 0.1
"""How often the queue is looked at where prompt work goes down by time alone."""

PrefillDuration = Callable[[Prompt, int], float]
"""Seconds a worker should take for a prompt of which so many tokens are cached."""


class KvRouter:
    """See the module. One for a pool and model, used in one loop; a context manager, or `close` it.

    `configs` are the workers' own settings (see `router_pool.configs_of`), `routable` and `overloaded` who may be asked
    now and who is busy, as `PushRouter.standing.routable` and `BusyWatch.busy` tell. `recover` asks a worker for events
    that were lost; give the events themselves to `follow`. `profile` and `tiers` say who waits; the plain settings do
    by default. `prefill_duration` is the load model the configuration may ask for. `expiry_s` is when a booking that
    nobody released is given up. `run` belongs in a task: without it nothing lost is recovered and only requests that
    come or end move the queue. Raises InvalidArgument for a block size below 1 and for a missing load model.
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        config: KvRouterConfig | None = None,
        *,
        block_size_tokens: int,
        configs: Observable[Configs] | None = None,
        routable: Callable[[], Sequence[int]] | None = None,
        overloaded: Callable[[], AbstractSet[int]] | None = None,
        recover: Recover | None = None,
        rng: Random | None = None,
        worker_type: WorkerType = "aggregated",
        is_eagle: bool = False,
        profile: PolicyProfile | None = None,
        tiers: Sequence[DepthTier] = (),
        prefill_duration: PrefillDuration | None = None,
        expiry_s: float = EXPIRY_S,
        refresh_after_s: float | None = REFRESH_AFTER_S,
        session_ttl_s: float | None = None,
    ) -> None:
        self.config = KvRouterConfig() if config is None else config
        if block_size_tokens < 1:
            raise InvalidArgument(f"must be at least 1, got {block_size_tokens}", field="block_size_tokens")
        if self.config.router_prefill_load_model != "none" and prefill_duration is None:
            raise InvalidArgument("the configured load model is not given", field="prefill_duration")
        self.block_size_tokens, self.is_eagle = block_size_tokens, is_eagle
        self.worker_type: WorkerType = worker_type
        self.sequences = ActiveSequences(expiry_s)
        self.clock = LoopClock()
        self.sessions = None if session_ttl_s is None else Sessions(session_ttl_s, self.clock)
        self._workers, self._rng, self._settings = workers, rng or Random(), self.config.settings()
        self._duration = prefill_duration if self.config.router_prefill_load_model != "none" else None
        self._profile = profile or PolicyProfile.from_config(self.config)
        self._admission: Admission[Placement] = Admission(
            self._profile,
            tiers,
            place=self._place,
            is_full=self._is_full,
            workers=lambda: len(self._pool.now().ranks),
            now_s=self.clock.now_s,
            refresh_after_s=refresh_after_s or None,
        )
        self.overlap = OverlapSource(self.config, recover)
        self._pool = RouterPool(
            workers, self._workers_changed, configs=configs, routable=routable, overloaded=overloaded
        )

    # -- asking

    def route_request(
        self, request: PreprocessedRequest, phase: RequestPhase, metadata: Mapping[str, str] | None = None
    ) -> RouteRequest:
        """What the request asks of this router."""
        return RouteRequest.of_request(
            request, self.block_size_tokens, phase=phase, is_eagle=self.is_eagle, metadata=metadata
        )

    def advise(self, request: RouteRequest) -> Decision:
        """Where the request would go now. Books, records and waits for nothing; raises as `find_best_match`."""
        now_s = self.clock.now_s()
        return self._decide(request, self.overlap.find(request.blocks, now_s), now_s)[0]

    async def find_best_match(
        self, request: RouteRequest, *, request_id: str, control: Control | None = None
    ) -> Placement:
        """The request booked on the best worker for it, in its turn if all are busy.

        Raises InvalidArgument for an empty prompt, or a pin that is not allowed or names no rank; Unavailable where no
        worker can be asked, ResourceExhausted where all are overloaded, WorkerOverloaded where the named one is;
        QueueRejected where no more may wait; DuplicateRequest for an id that is booked; Cancelled on a stop or kill of
        `control` while it waits. Nothing is booked then, nor if the task is cancelled.
        """
        overlap = self.overlap.find(request.blocks, self.clock.now_s())
        applicant: Applicant[Placement] = Applicant(request_id, request, self._size(request, overlap), overlap)
        return await self._admission.admit(applicant, control)

    def overlap_blocks(self, blocks: PromptBlocks, rank: WorkerRank) -> float:
        """How many of the prompt's blocks are on the device of that rank."""
        return self.overlap.find(blocks, self.clock.now_s()).device.get(rank, 0)

    def potential_loads(
        self, blocks: PromptBlocks, override: RouterConfigOverride | None = None
    ) -> list[PotentialLoad]:
        """The load of every rank with this prompt added."""
        now_s, settings = self.clock.now_s(), self._settings_for(override)
        ranks, overlap = self._pool.now().candidates(RoutingRules()).ranks, self.overlap.find(blocks, now_s)
        new = [_uncached(len(blocks.token_ids), overlap, rank, settings, self.block_size_tokens) for rank in ranks]
        return self.sequences.potential_loads(self._hashes(blocks, settings), new, ranks, now_s)

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for room."""
        return len(self._admission)

    # -- being told

    def follow(self, events: Observable[RouterEvent] | Observable[Event[RouterEvent]]) -> DisposableBase:
        """Takes in what engines say of their caches, until disposed; see `router_overlap.kv_events`."""
        return self.overlap.follow(events)

    async def ready(self) -> None:
        """Returns when as many workers are there as the configuration wants at the start."""
        await self._workers.wait_for_instances(self.config.initial_workers)

    async def run(self) -> None:
        """Recovers lost events, gives up lost bookings and sessions, and looks after the queue, until cancelled."""
        every_s = SWEEP_EVERY_S if self._duration is None else MODELLED_DRAIN_EVERY_S
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.overlap.run)
            if self.sessions is not None:
                tasks.start_soon(self.sessions.run)
            while True:
                await anyio.sleep(every_s)
                now_s = self.clock.now_s()
                self.sequences.expire(now_s)
                self.overlap.expire(now_s)
                self._admission.drain()

    def close(self) -> None:
        """Follows nothing more; those that wait, and all that come, get Unavailable. Placements stay valid."""
        self._pool.close()
        self._admission.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _workers_changed(self, gone: Sequence[int], ranks: Mapping[int, range]) -> None:
        for worker_id in gone:
            self.sequences.remove_worker(worker_id)
        self.sequences.set_workers(ranks)
        self.overlap.set_workers(gone, ranks)
        self._admission.drain()

    def _decide(self, request: RouteRequest, overlap: Overlap, now_s: float) -> tuple[Decision, list[int]]:
        """The choice, and the hashes the prompt's blocks would be counted by."""
        settings, pool = self._settings_for(request.override), self._pool.now()
        candidates = pool.candidates(request.rules(pool))
        hashes = self._hashes(request.blocks, settings)
        loads = self.sequences.project(hashes, candidates.ranks, now_s)
        decision = choose(request.prompt, candidates, overlap, loads, settings, self._rng, self.worker_type)
        return decision, hashes

    def _place(self, applicant: Applicant[Placement], must_refresh: bool) -> Placement:
        request, now_s = applicant.request, self.clock.now_s()
        overlap = self.overlap.find(request.blocks, now_s) if must_refresh else applicant.overlap
        decision, hashes = self._decide(request, overlap, now_s)
        load = self._load(request, decision, hashes)
        booking = self.sequences.book(applicant.request_id, decision.rank, load, now_s, registered_only=True)
        self.overlap.record(decision.rank, request.blocks, now_s)
        return Placement(applicant.request_id, decision, booking, self.clock, self._admission.drain)

    def _load(self, request: RouteRequest, decision: Decision, hashes: list[int]) -> SequenceLoad:
        isl_tokens, cached = decision.prompt.isl_tokens, decision.cached_tokens
        if not self._settings_for(request.override).track_prefill_tokens:
            return SequenceLoad(hashes)
        duration_s = None if self._duration is None else self._duration(decision.prompt, min(cached, isl_tokens))
        return SequenceLoad(hashes, max(0, isl_tokens - cached), duration_s)

    def _is_full(self, request: RouteRequest, class_index: int) -> bool:
        """Whether every rank that may take the request is busy; where none may, waiting would not help."""
        pool = self._pool.now()
        try:
            ranks = pool.candidates(request.rules(pool)).ranks
        except PenstockError:
            return False  # placing it will say why
        loads = self.sequences.project((), ranks, self.clock.now_s())
        return self._profile.classes[class_index].all_busy(ranks, loads.prefill_tokens, pool.configs)

    def _size(self, request: RouteRequest, overlap: Overlap) -> PromptSize:
        """The prompt and what the best of its workers has of it; with no worker, nothing."""
        pool, settings = self._pool.now(), self._settings_for(request.override)
        positions = pool.candidates(request.rules(pool)).positions
        cached = overlap.best_cached_tokens(positions, settings, self.block_size_tokens) if overlap.device else 0
        return PromptSize(len(request.blocks.token_ids), cached)

    def _hashes(self, blocks: PromptBlocks, settings: RequestSettings) -> list[int]:
        if settings.track_active_blocks and settings.assume_kv_reuse:
            return blocks.sequence_hashes
        return tracking_hashes(blocks.local_hashes, settings, self._rng)

    def _settings_for(self, override: RouterConfigOverride | None) -> RequestSettings:
        return self._settings if override is None else self.config.settings(override)


def _uncached(isl_tokens: int, overlap: Overlap, rank: WorkerRank, settings: RequestSettings, block_size: int) -> int:
    return max(0, isl_tokens - overlap.cached_tokens(rank, settings, block_size))
