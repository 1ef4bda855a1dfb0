"""KvRouter: selects and reserves the best worker for a prompt, by cached prefixes and by load.

    KV events, own routing ──► lookup ──┐
    reservations ───────────► loads ────┼──► selector ──► Reservation ──► release
    instances, cards, faults ► pool ────┘       └─ all busy: queue

Source: dynamo lib/llm/src/kv_router.rs, KvRouter, and lib/kv-router/src/scheduling. Other than there the account of a
request is an object made with its booking, a query books and waits for nothing and so is a plain call, and a request
that names its worker goes the same way as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus

from pipeline import Context, Control
from pipeline.network import Workers
from pipeline.protocols import PreprocessedRequest, RouterConfigOverride
from pipeline.protocols.kv import RankRates
from pipeline.protocols.timing import RequestPhase
from pipeline.rx import CompositeDisposable, DisposableBase, Observable

from ..pool import PoolViews
from .config import KvRouterConfig, check_router
from .decision import Decision, Prompt
from .eligibility import Candidates, RoutingRules
from .events import Counted, Recover
from .index import CandidateOverlap, Overlap
from .load import EXPIRY_S, SWEEP_EVERY_S, PotentialLoad, ReplicaSync, SequenceLoad, tracking_hashes
from .lookup import KvEvents, PrefixLookup
from .metrics import UNTIMED, RoutingSteps
from .numbers import RankNumbers
from .pace import PaceMeter
from .pool import RouterPool
from .prompt import PromptBlocks
from .queue import OVERLAP_REFRESH_AFTER, AdmissionController, DepthTier, PolicyProfile, PromptSize, QueuedRequest
from .request import RouteRequest, with_shared_hashes
from .reservation import LoadBook, Reservation
from .search import FEW_CANDIDATES, cheapest_of_many
from .selection import WorkerSelector, WorkerType, select_worker
from .sessions import Sessions
from .types import RequestSettings, WorkerRank

MODELLED_DRAIN_EVERY_S = 0.1
"""How often the queue is drained where prompt work decreases by time alone."""

PrefillDuration = Callable[[Prompt, int], float]
"""Seconds a worker should take for a prompt of which so many tokens are cached."""


class KvRouter:
    """One router of one pool and model, used in one loop; `kv_router` makes it.

    `async with` runs it and closes it. Without `run` no KV event is applied, nothing lost is recovered, and only
    requests that come or end move the queue.
    """

    def __init__(
        self,
        pool: RouterPool,
        lookup: PrefixLookup,
        loads: LoadBook,
        queue: AdmissionController,
        selector: WorkerSelector,
        config: KvRouterConfig,
        *,
        sessions: Sessions | None = None,
        prefill_duration: PrefillDuration | None = None,
    ) -> None:
        self.pool, self.lookup, self.loads, self.queue, self.selector = pool, lookup, loads, queue, selector
        self.config, self.sessions = config, sessions
        self.block_size_tokens = lookup.block_size_tokens
        """The KV block size of the workers."""
        self.worker_type: WorkerType = selector.worker_type
        """What the workers of the pool do."""
        self.chains_hashes = loads.peers is not None
        """Whether prompts are counted by their sequence hashes, by which other routers know them."""
        self._duration = prefill_duration if config.router_prefill_load_model != "none" else None
        self._following = CompositeDisposable()
        self._tasks: TaskGroup | None = None
        loads.on_room = queue.drain
        pool.follow(self._on_workers)

    # -- requests

    def route_request(self, request: Context[PreprocessedRequest], phase: RequestPhase) -> RouteRequest:
        """Return what the request needs of this router, with the hashes of earlier routers, if they are shared."""
        size, is_eagle, payload = self.block_size_tokens, self.lookup.is_eagle, request.payload
        route = RouteRequest.of_request(payload, size, phase=phase, is_eagle=is_eagle, metadata=request.metadata)
        return with_shared_hashes(route, request)

    def advise(self, request: RouteRequest) -> Decision:
        """Select a worker without a reservation and without waiting. Raises as `reserve`."""
        candidates, now_s = self.pool.candidates(request), self.loads.now_s()
        settings, overlap = self.selector.settings(request.override), self.lookup.find(request.blocks, now_s)
        hashes = self._hashes(request.blocks, settings)
        return self._select(request, candidates, overlap, settings, hashes, now_s)

    async def reserve(
        self,
        request: RouteRequest,
        *,
        request_id: str,
        control: Control | None = None,
        steps: RoutingSteps = UNTIMED,
    ) -> Reservation:
        """Reserve the best worker for the request, in its turn if all are busy. The caller releases the reservation.

        Raises InvalidArgument for an empty prompt, or a pin that is not allowed or names no rank; Unavailable where no
        worker is there, ResourceExhausted where all are overloaded, WorkerOverloaded where the named one is;
        QueueRejected where no more may wait; DuplicateRequest for an id that is booked; Cancelled on a stop or kill of
        `control` while it waits. Nothing is booked then, nor if the task is cancelled. `steps` times what is done.
        """
        settings = self.selector.settings(request.override)
        overlap = self._look_up(request.blocks, settings, steps)
        steps.begin("scheduling")
        if self.loads.peers is not None and self.loads.peers.made_room():
            self.queue.drain()  # requests that wait already go first
        queued = QueuedRequest(request_id, request, settings, overlap, self._size, self._place)
        reservation = await self.queue.admit(queued, control)
        try:
            steps.end()
        except BaseException:
            reservation.release()
            raise
        return reservation

    def overlap_blocks(self, blocks: PromptBlocks, rank: WorkerRank) -> float:
        """The number of the prompt's blocks that are on the device of that rank."""
        return self._find(blocks).device.get(rank, 0)

    def potential_loads(
        self, blocks: PromptBlocks, override: RouterConfigOverride | None = None
    ) -> list[PotentialLoad]:
        """The load of every rank with this prompt added."""
        settings = self.selector.settings(override)
        ranks, overlap = self.pool.current().candidates(RoutingRules()).ranks, self._find(blocks)
        isl, size = len(blocks.token_ids), self.block_size_tokens
        new = [max(0, isl - overlap.cached_tokens(rank, settings, size)) for rank in ranks]
        hashes = self._hashes(blocks, settings)
        return self.loads.sequences.potential_loads(hashes, new, ranks, self.loads.now_s())

    def potential_decode_blocks(self, request: RouteRequest, decision: Decision) -> int:
        """The blocks in use on the chosen rank with the request there.

        Other than in `decision.report` and `potential_loads` all its blocks count, also those that are not tracked: its
        unfinished last one, or every one where blocks are not tracked.
        """
        chosen, settings = decision.chosen, self.selector.settings(request.override)
        tracked = len(request.blocks.local_hashes) if settings.track_active_blocks else 0
        return chosen.active_decode_blocks + chosen.additional_blocks + max(0, decision.prompt.blocks - tracked)

    # -- life

    def follow(self, events: KvEvents) -> DisposableBase:
        """Take in KV events of the workers, until disposed or closed; see `kv_events`.

        `run` must run, too: until a worker has reported what it holds, and while events of it are missing, its events
        are kept and not applied. A warning is logged where they arrive, or requests are routed, without it.
        """
        following = self.lookup.follow(events)
        self._following.add(following)
        return following

    def follow_rates(self, reports: Observable[RankRates]) -> DisposableBase:
        """Take in what ranks report of their passes, until disposed or closed; see `rate_reports`.

        Reports of ranks that are not there are ignored. By the cost they make no difference.
        """
        following = reports.subscribe(self._on_rates)
        self._following.add(following)
        return following

    def _on_rates(self, report: RankRates) -> None:
        rank = WorkerRank(report.worker_id, report.dp_rank)
        if self.pool.has_rank(rank):
            self.loads.reported(rank, report.rates)

    async def ready(self) -> None:
        """Return when as many workers are known as the configuration wants at the start.

        In a pool with cards a worker is known once its card is: without it no request goes there. Raise Unavailable
        if the router is closed before, or the pool ends.
        """
        await self.pool.ready(self.config.initial_workers)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Recover lost events, apply replicas' events, expire reservations and sessions, drain the queue; until
        cancelled. `TaskGroup.start` returns once events are applied."""
        every_s = SWEEP_EVERY_S if self._duration is None else MODELLED_DRAIN_EVERY_S
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.lookup.run)
            task_status.started()
            if self.sessions is not None:
                tasks.start_soon(self.sessions.run)
            if self.loads.peers is not None:
                tasks.start_soon(self.loads.peers.run, self.queue.drain)
            while True:
                await anyio.sleep(every_s)
                self.loads.sequences.expire(self.loads.now_s())
                self.lookup.expire(self.loads.clock())
                self.queue.drain()

    def close(self) -> None:
        """Follow nothing more; requests that wait, and all that come, get Unavailable. Reservations stay valid."""
        self.pool.close()
        self._following.dispose()
        self.loads.close()
        self.queue.close()

    def __enter__(self) -> Self:
        """Close it at the end of the block, without running it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            opened.callback(self.close)
            tasks = await opened.enter_async_context(anyio.create_task_group())
            await tasks.start(self.run, name="KvRouter")  # so that no event comes before it runs
            opened.pop_all()
        self._tasks = tasks
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.close()
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        tasks.cancel_scope.cancel()
        if isinstance(error, Exception):  # the block's own: it goes on as it is, not inside a group
            await tasks.__aexit__(None, None, None)
            return None
        return await tasks.__aexit__(kind, error, trace)

    # -- inside

    def _on_workers(self, gone: Sequence[int], ranks: Mapping[int, range]) -> None:
        self.loads.set_workers(gone, ranks)
        self.loads.set_limits(self.pool.cards)
        self.lookup.set_workers(gone, ranks, self.pool.without_events)
        self.queue.drain()

    def _find(self, blocks: PromptBlocks) -> Overlap:
        return self.lookup.find(blocks, self.loads.clock())

    def _look_up(self, blocks: PromptBlocks, settings: RequestSettings, steps: RoutingSteps) -> Overlap:
        """Look up the cached prefixes. The hashes are computed here, where they are timed; later steps find them."""
        if self.lookup.has_index or settings.track_active_blocks:
            steps.begin("block_hashing")
            _ = blocks.local_hashes
        if self.chains_hashes and settings.track_active_blocks and settings.assume_kv_reuse:
            steps.begin("seq_hashing")
            _ = blocks.sequence_hashes
        steps.begin("indexer_find_matches")
        return self.lookup.find(blocks, self.loads.clock())

    def _select(
        self,
        request: RouteRequest,
        candidates: Candidates,
        overlap: Overlap,
        settings: RequestSettings,
        hashes: Sequence[int],
        now_s: float,
    ) -> Decision:
        sequences, pace = self.loads.sequences, self.loads.pace(now_s)
        prompt = Prompt(len(request.blocks.token_ids), self.block_size_tokens)
        by = settings, self.selector.rng, self.worker_type, pace
        if len(candidates.ranks) <= FEW_CANDIDATES:
            columns = sequences.project(hashes, candidates.ranks, now_s)
        else:
            loads = sequences.field(hashes, candidates.ranks, now_s)
            found = cheapest_of_many(prompt, candidates, overlap, sequences, loads, *by)
            if found is not None:
                return found
            columns = loads.columns()
        return select_worker(prompt, candidates, overlap, columns, *by)

    def _place(self, queued: QueuedRequest, must_refresh: bool) -> Reservation:
        """Select a worker and book the request there."""
        request, settings, now_s = queued.request, queued.settings, self.loads.now_s()
        candidates = self.pool.candidates(request) if queued.candidates is None else queued.candidates
        overlap = self.lookup.find(request.blocks, now_s) if must_refresh else queued.overlap
        hashes = self._hashes(request.blocks, settings)
        decision = self._select(request, candidates, overlap, settings, hashes, now_s)
        reservation = Reservation(
            request_id=queued.request_id,
            book=self.loads,
            block_size_tokens=self.block_size_tokens,
            prompt_tokens=request.prompt_tokens,
            expected_output_tokens=request.expected_output_tokens,
            tracks_output_blocks=self.config.router_track_output_blocks,
        )
        load = self._load(decision, settings, hashes)
        self.loads.enter(reservation, decision, load, now_s)
        self.lookup.record(decision.rank, request.blocks, now_s)
        return reservation

    def _load(self, decision: Decision, settings: RequestSettings, hashes: Sequence[int]) -> SequenceLoad:
        isl_tokens, cached = decision.prompt.isl_tokens, decision.cached_tokens
        if not settings.track_prefill_tokens:
            return SequenceLoad(hashes)
        duration_s = None if self._duration is None else self._duration(decision.prompt, min(cached, isl_tokens))
        return SequenceLoad(hashes, max(0, isl_tokens - cached), duration_s)

    def _size(self, queued: QueuedRequest) -> PromptSize:
        """The prompt, and how much of it the best of its workers has cached."""
        candidates, cached = self.pool.candidates(queued.request), 0
        if queued.overlap.device:
            seen = CandidateOverlap(queued.overlap, candidates.zero_by_rank)
            cached = seen.best_cached_tokens(queued.settings, self.block_size_tokens)
        return PromptSize(len(queued.request.blocks.token_ids), cached)

    def _hashes(self, blocks: PromptBlocks, settings: RequestSettings) -> Sequence[int]:
        """The hashes by which the prompt's blocks are counted."""
        if settings.track_active_blocks and settings.assume_kv_reuse:
            return blocks.sequence_hashes if self.chains_hashes else blocks.local_hashes
        return tracking_hashes(blocks.local_hashes, settings, self.selector.rng)


def kv_router(
    workers: Workers[Any, Any],
    config: KvRouterConfig | None = None,
    *,
    block_size_tokens: int,
    health: PoolViews | None = None,
    recover: Recover | None = None,
    peers: ReplicaSync | None = None,
    rng: Random | None = None,
    worker_type: WorkerType = "aggregated",
    is_eagle: bool = False,
    profile: PolicyProfile | None = None,
    tiers: Sequence[DepthTier] = (),
    prefill_duration: PrefillDuration | None = None,
    on_event: Counted | None = None,
    expiry_s: float = EXPIRY_S,
    refresh_after_s: float | None = OVERLAP_REFRESH_AFTER.default,
    session_ttl_s: float | None = None,
) -> KvRouter:
    """Make a KvRouter of these workers; enter it with `async with`, which runs it and closes it.

    Pool: `health` has the workers' cards, with their settings and adapters, and which cool down or are busy, as
    `PushRouter.health`; by default there are no cards, and none cools down or is busy.
    Lookup: `block_size_tokens` is the workers' KV block size, `is_eagle` whether blocks look a token ahead; `recover`
    requests lost KV events from a worker, `on_event` counts events.
    Load: `peers` shares the load with replicas of the router, as `router_replica_sync` needs; `prefill_duration` is the
    model that `router_prefill_load_model` needs; a reservation that is not released in `expiry_s` seconds is given up.
    Queue: `profile` holds the classes, default one by the settings; `tiers` limit the depth; a request that waited for
    `refresh_after_s` seconds has its cached prefixes looked up again, None for never.
    Selection: `rng` decides between equal workers, give a seeded one to repeat a run; `worker_type` is what the workers
    do. Sessions that are idle for `session_ttl_s` seconds are forgotten; None keeps none.

    Raises InvalidArgument for what is missing and for settings that are not offered, all of it at once.
    """
    config = KvRouterConfig() if config is None else config
    check_router(config, block_size_tokens, prefill_duration=prefill_duration, profile=profile, peers=peers)
    pool = RouterPool(workers, health)
    numbers = RankNumbers()
    meter = None if config.router_placement == "cost" else PaceMeter()
    shows_lately = config.router_placement == "marginal_delay"
    loads = LoadBook(expiry_s=expiry_s, peers=peers, numbers=numbers, meter=meter, shows_lately=shows_lately)
    lookup = PrefixLookup(
        config, block_size_tokens, is_eagle=is_eagle, recover=recover, on_event=on_event, numbers=numbers
    )
    classes = profile or PolicyProfile.from_config(config)
    return KvRouter(
        pool,
        lookup,
        loads,
        AdmissionController(pool, loads, classes, tiers, refresh_after_s=refresh_after_s),
        WorkerSelector(config, rng or Random(), worker_type),
        config,
        sessions=None if session_ttl_s is None else Sessions(session_ttl_s, loads.clock),
        prefill_duration=prefill_duration,
    )
