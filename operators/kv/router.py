"""KvRouter: which worker should take a prompt: what is cached, what is in flight, the choice and the queue, in one.

    KV events, own routing ──► overlap ┐
    bookings ──► active sequences ─────┼──► choose ──► book ──► Placement ──► release
    instances, cards, faults ──► pool ─┘      └─ all busy: wait

Source: dynamo lib/llm/src/kv_router.rs, KvRouter, and lib/kv-router/src/scheduling. Other than there the account of a
request is an object made with its booking, a query books and waits for nothing and so is a plain call, and a request
that names its worker goes the same way as all others.

What a router needs besides its settings, and the settings it does not offer, found all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Self

import anyio

from pipeline import Control, PenstockError
from pipeline.network import Event, Workers
from pipeline.protocols import PreprocessedRequest, RouterConfigOverride
from pipeline.protocols.kv import RouterEvent
from pipeline.protocols.timing import RequestPhase
from pipeline.rx import CompositeDisposable, DisposableBase, Observable

from .clock import LoopClock
from .config import KvRouterConfig, Problem, raise_problems
from .events import Counted, Recover
from .index import CandidateOverlap, Overlap
from .load import (
    EXPIRY_S,
    SWEEP_EVERY_S,
    ActiveSequences,
    PotentialLoad,
    RankLoad,
    ReplicaSync,
    SequenceLoad,
    tracking_hashes,
)
from .lookup import OverlapSource
from .metrics import RoutingSteps
from .pool import Adapters, Candidates, Configs, RouterPool, RoutingRules, WorkerPool
from .prompt import ChainedHashes, PromptBlocks
from .queue import Admission, Applicant, DepthTier, PolicyProfile, PromptSize, QueueUsage, Room, Rooms
from .request import RouteRequest
from .reservation import Placement
from .selection import Decision, Prompt, WorkerType, choose
from .sessions import Sessions
from .types import RequestSettings, WorkerRank


def check_router(
    config: KvRouterConfig, block_size_tokens: int, *, prefill_duration: object, profile: object, peers: object
) -> None:
    """Raise InvalidArgument that lists every problem; `field` names the first.

    The last three are what the router was given for `router_prefill_load_model`, `router_policy_config` and
    `router_replica_sync`, None for nothing. What no router of this kind offers at all is refused, not passed over.
    """
    raise_problems(
        [*_missing(config, block_size_tokens, prefill_duration, profile, peers), *_not_offered(config)],
    )


def _missing(
    config: KvRouterConfig, block_size_tokens: int, prefill_duration: object, profile: object, peers: object
) -> list[Problem]:
    checks: list[tuple[bool, str, str]] = [
        (block_size_tokens < 1, "block_size_tokens", f"must be at least 1, got {block_size_tokens}"),
        (
            config.router_prefill_load_model != "none" and prefill_duration is None,
            "prefill_duration",
            "router_prefill_load_model needs it, and it can only be given in code",
        ),
        (
            config.router_policy_config is not None and profile is None,
            "profile",
            "router_policy_config names a file whose profile is not given",
        ),
        (config.router_replica_sync and peers is None, "peers", "router_replica_sync needs them"),
        (peers is not None and not config.router_replica_sync, "router_replica_sync", "is off, but peers are given"),
    ]
    return [(name, message) for broken, name, message in checks if broken]


def _not_offered(config: KvRouterConfig) -> list[Problem]:
    checks: list[tuple[bool, str, str]] = [
        (config.use_remote_indexer, "use_remote_indexer", "a remote index is not offered"),
        (config.serve_indexer, "serve_indexer", "serving the index is not offered"),
        (config.shared_cache_type != "none", "shared_cache_type", "a shared cache is not offered"),
        (config.shared_cache_multiplier > 0, "shared_cache_multiplier", "a shared cache is not offered"),
        (config.router_prefill_policy is not None, "router_prefill_policy", "named selections are not offered"),
        (config.router_decode_policy is not None, "router_decode_policy", "named selections are not offered"),
    ]
    return [(name, message) for broken, name, message in checks if broken]


REFRESH_AFTER_S = 10.0
"""After how long a wait what is cached is looked up again."""
MODELLED_DRAIN_EVERY_S = 0.1
"""How often the queue is looked at where prompt work goes down by time alone."""

PrefillDuration = Callable[[Prompt, int], float]
"""Seconds a worker should take for a prompt of which so many tokens are cached."""


class KvRouter:
    """See the module. One for a pool and model, used in one loop; a context manager, or `close` it.

    `configs` are the workers' own settings and `adapters` what they have loaded (see `router_pool`), `routable` and
    `overloaded` who may be asked now and who is busy, as `PushRouter.standing.routable` and `BusyWatch.busy` tell.
    `peers` is its part in telling other routers of the same workers, with `router_replica_sync`. `recover` asks a
    worker for events that were lost; give the events themselves to `follow`. `counted` hears of each event what it was
    and what became of it. `profile` and `tiers` say who waits; the plain settings do by default. `prefill_duration` is
    the load model the configuration may ask for. `expiry_s` is when a booking that nobody released is given up. `run`
    belongs in a task: without it no event is applied, nothing lost is recovered, and only requests that come or end
    move the queue. Raises InvalidArgument for what is missing and for settings that are not offered, all of it at once.
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        config: KvRouterConfig | None = None,
        *,
        block_size_tokens: int,
        configs: Observable[Configs] | None = None,
        adapters: Observable[Adapters] | None = None,
        routable: Callable[[], Sequence[int]] | None = None,
        overloaded: Callable[[], AbstractSet[int]] | None = None,
        recover: Recover | None = None,
        peers: ReplicaSync | None = None,
        rng: Random | None = None,
        worker_type: WorkerType = "aggregated",
        is_eagle: bool = False,
        profile: PolicyProfile | None = None,
        tiers: Sequence[DepthTier] = (),
        prefill_duration: PrefillDuration | None = None,
        counted: Counted | None = None,
        expiry_s: float = EXPIRY_S,
        refresh_after_s: float | None = REFRESH_AFTER_S,
        session_ttl_s: float | None = None,
    ) -> None:
        self.config = KvRouterConfig() if config is None else config
        check_router(self.config, block_size_tokens, prefill_duration=prefill_duration, profile=profile, peers=peers)
        self.block_size_tokens, self.is_eagle = block_size_tokens, is_eagle
        self.worker_type: WorkerType = worker_type
        self.sequences = ActiveSequences(expiry_s)
        self.clock = LoopClock()
        self._peers = peers
        if peers is not None:
            peers.join(self.sequences, self.clock)
        self.sessions = None if session_ttl_s is None else Sessions(session_ttl_s, self.clock)
        self._workers, self._rng, self._settings = workers, rng or Random(), self.config.settings()
        self._duration = prefill_duration if self.config.router_prefill_load_model != "none" else None
        self._profile = profile or PolicyProfile.from_config(self.config)
        self._rooms: Rooms | None = None
        self._admission: Admission[Placement] = Admission(
            self._profile,
            tiers,
            place=self._place,
            is_full=self._is_full,
            room_now=self._room_now,
            workers=lambda: len(self._pool.now().ranks),
            now_s=self.clock.now_s,
            refresh_after_s=refresh_after_s or None,
        )
        self.overlap = OverlapSource(self.config, recover, counted)
        self._pool = RouterPool(
            workers, self._workers_changed, configs=configs, adapters=adapters, routable=routable, overloaded=overloaded
        )
        self._following = CompositeDisposable()

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
        now_s = self._now_s()
        return self._decide(request, self.overlap.find(request.blocks, now_s), now_s, books=False)[0]

    async def find_best_match(
        self,
        request: RouteRequest,
        *,
        request_id: str,
        control: Control | None = None,
        steps: RoutingSteps | None = None,
    ) -> Placement:
        """The request booked on the best worker for it, in its turn if all are busy.

        Raises InvalidArgument for an empty prompt, or a pin that is not allowed or names no rank; Unavailable where no
        worker can be asked, ResourceExhausted where all are overloaded, WorkerOverloaded where the named one is;
        QueueRejected where no more may wait; DuplicateRequest for an id that is booked; Cancelled on a stop or kill of
        `control` while it waits. Nothing is booked then, nor if the task is cancelled. `steps` times what is done.
        """
        steps = RoutingSteps(self.clock.now_s) if steps is None else steps
        overlap = self._look_up(request, steps)
        with steps.step("scheduling"):
            if self._peers is not None and self._peers.made_room():
                self._admission.drain()  # those that wait came first
            applicant: Applicant[Placement] = Applicant(
                request_id, request, partial(self._size, request, overlap), overlap
            )
            placement = await self._admission.admit(applicant, control)
        try:
            steps.end()
        except BaseException:
            placement.release()
            raise
        return placement

    def overlap_blocks(self, blocks: PromptBlocks, rank: WorkerRank) -> float:
        """How many of the prompt's blocks are on the device of that rank."""
        return self.overlap.find(blocks, self.clock.now_s()).device.get(rank, 0)

    def potential_loads(
        self, blocks: PromptBlocks, override: RouterConfigOverride | None = None
    ) -> list[PotentialLoad]:
        """The load of every rank with this prompt added."""
        now_s, settings = self._now_s(), self._settings_for(override)
        ranks, overlap = self._pool.now().candidates(RoutingRules()).ranks, self.overlap.find(blocks, now_s)
        new = [_uncached(len(blocks.token_ids), overlap, rank, settings, self.block_size_tokens) for rank in ranks]
        hashes = self._hashes(blocks, settings, whole=False)
        return self.sequences.potential_loads(hashes, new, ranks, now_s)

    def potential_decode_blocks(self, request: RouteRequest, decision: Decision) -> int:
        """The blocks in use on the chosen rank with the request there.

        Other than in `decision.report` and `potential_loads` all its blocks count, also those that are not tracked: its
        unfinished last one, or every one where blocks are not tracked.
        """
        chosen, settings = decision.chosen, self._settings_for(request.override)
        tracked = len(request.blocks.local_hashes) if settings.track_active_blocks else 0
        return chosen.active_decode_blocks + chosen.additional_blocks + max(0, decision.prompt.blocks - tracked)

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for room."""
        return len(self._admission)

    def waiting_by_class(self) -> Mapping[str, QueueUsage]:
        """What waits in each class of the queue. May be asked in any thread."""
        return self._admission.waiting_by_class()

    def worker_configs(self) -> Configs:
        """What the workers it may choose from say of themselves."""
        return self._pool.now().configs

    def loads(self) -> Sequence[RankLoad]:
        """What is in flight on every rank. May be asked in any thread."""
        return self.sequences.loads(self.clock.now_s())

    # -- being told

    def follow(self, events: Observable[RouterEvent] | Observable[Event[RouterEvent]]) -> DisposableBase:
        """Take in engines' events of their caches, until disposed or closed; see `router_overlap.kv_events`.

        `run` must run, too: until it has asked a worker what it holds, and while events of it are missing, its events
        are kept and not applied. A warning is logged where they arrive, or requests are routed, without it.
        """
        following = self.overlap.follow(events)
        self._following.add(following)
        return following

    async def ready(self) -> None:
        """Returns when as many workers are there as the configuration wants at the start."""
        await self._workers.wait_for_instances(self.config.initial_workers)

    async def run(self) -> None:
        """Recovers lost events, counts other routers' bookings, gives up lost ones and idle sessions, and looks after
        the queue, until cancelled."""
        every_s = SWEEP_EVERY_S if self._duration is None else MODELLED_DRAIN_EVERY_S
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.overlap.run)
            if self.sessions is not None:
                tasks.start_soon(self.sessions.run)
            if self._peers is not None:
                tasks.start_soon(self._peers.run, self._admission.drain)
            while True:
                await anyio.sleep(every_s)
                now_s = self._now_s()
                self.sequences.expire(now_s)
                self.overlap.expire(now_s)
                self._admission.drain()

    def close(self) -> None:
        """Follows nothing more; those that wait, and all that come, get Unavailable. Placements stay valid."""
        self._pool.close()
        self._following.dispose()
        if self._peers is not None:
            self._peers.close()
        self._admission.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _now_s(self) -> float:
        """The time of a decision or a change of load, with what the other routers told until then taken in."""
        if self._peers is not None:
            self._peers.take_in()
        return self.clock.now_s()

    def _candidates(self, request: RouteRequest, pool: WorkerPool) -> Candidates:
        return pool.candidates(request.rules(pool, self._pool.adapters))

    def _workers_changed(self, gone: Sequence[int], ranks: Mapping[int, range]) -> None:
        for worker_id in gone:
            self.sequences.remove_worker(worker_id)
        self.sequences.set_workers(ranks)
        self.overlap.set_workers(gone, ranks)
        self._admission.drain()

    def _look_up(self, request: RouteRequest, steps: RoutingSteps) -> Overlap:
        """Who has what of the prompt. The hashes are computed here, where they are timed; all later steps find them."""
        blocks, settings = request.blocks, self._settings_for(request.override)
        if self.config.has_index or settings.track_active_blocks:
            with steps.step("block_hashing"):
                _ = blocks.local_hashes
        if settings.track_active_blocks and settings.assume_kv_reuse:
            with steps.step("seq_hashing"):
                _ = blocks.sequence_hashes
        with steps.step("indexer_find_matches"):
            return self.overlap.find(blocks, self.clock.now_s())

    def _decide(
        self, request: RouteRequest, overlap: Overlap, now_s: float, *, books: bool
    ) -> tuple[Decision, Sequence[int]]:
        """The choice, and the hashes the prompt's blocks would be counted by."""
        settings, candidates = self._settings_for(request.override), self._candidates(request, self._pool.now())
        hashes = self._hashes(request.blocks, settings, whole=books)
        loads = self.sequences.project(hashes, candidates.ranks, now_s)
        decision = choose(request.prompt, candidates, overlap, loads, settings, self._rng, self.worker_type)
        return decision, hashes

    def _place(self, applicant: Applicant[Placement], must_refresh: bool) -> Placement:
        request, now_s = applicant.request, self._now_s()
        overlap = self.overlap.find(request.blocks, now_s) if must_refresh else applicant.overlap
        decision, hashes = self._decide(request, overlap, now_s, books=True)
        load = self._load(request, decision, hashes)
        booking = self.sequences.book(applicant.request_id, decision.rank, load, now_s, registered_only=True)
        self.overlap.record(decision.rank, request.blocks, now_s)
        told = None
        if self._peers is not None:
            told = self._peers.booked(applicant.request_id, decision.rank, load, request.blocks.lora_name)
        return Placement(applicant.request_id, decision, booking, self.clock, self._admission.drain, told)

    def _load(self, request: RouteRequest, decision: Decision, hashes: Sequence[int]) -> SequenceLoad:
        isl_tokens, cached = decision.prompt.isl_tokens, decision.cached_tokens
        if not self._settings_for(request.override).track_prefill_tokens:
            return SequenceLoad(hashes)
        duration_s = None if self._duration is None else self._duration(decision.prompt, min(cached, isl_tokens))
        return SequenceLoad(hashes, max(0, isl_tokens - cached), duration_s)

    def _is_full(self, request: RouteRequest, class_index: int) -> bool:
        """Whether every rank that may take the request is busy; where none may, waiting would not help."""
        pool = self._pool.now()
        try:
            ranks = self._candidates(request, pool).ranks
        except PenstockError:
            return False  # placing it will say why
        prefill_tokens = self.sequences.prefill_tokens(ranks, self._now_s())
        return self._profile.classes[class_index].all_busy(ranks, prefill_tokens, pool.configs)

    def _room_now(self, class_indexes: Sequence[int]) -> Room:
        pool, adapters = self._pool.now(), self._pool.adapters
        if self._rooms is None or not self._rooms.is_of(pool, adapters):
            self._rooms = Rooms(pool, adapters, self._profile.classes)
        rooms, now_s = self._rooms, self._now_s()
        tokens = self.sequences.prefill_tokens(rooms.ranks, now_s)
        return Room(rooms, {index: rooms.free(index, tokens) for index in class_indexes})

    def _size(self, request: RouteRequest, overlap: Overlap) -> PromptSize:
        """The prompt and what the best of its workers has of it; with no worker, nothing."""
        settings = self._settings_for(request.override)
        candidates, cached = self._candidates(request, self._pool.now()), 0
        if overlap.device:
            cached = CandidateOverlap(overlap, candidates.nothing).best_cached_tokens(settings, self.block_size_tokens)
        return PromptSize(len(request.blocks.token_ids), cached)

    def _hashes(self, blocks: PromptBlocks, settings: RequestSettings, *, whole: bool) -> Sequence[int]:
        """By what the prompt's blocks are counted. Unless the `whole` prompt is, they are chained as they are read."""
        if settings.track_active_blocks and settings.assume_kv_reuse:
            return blocks.sequence_hashes if whole else ChainedHashes(blocks.local_hashes)
        return tracking_hashes(blocks.local_hashes, settings, self._rng)

    def _settings_for(self, override: RouterConfigOverride | None) -> RequestSettings:
        return self._settings if override is None else self.config.settings(override)


def _uncached(isl_tokens: int, overlap: Overlap, rank: WorkerRank, settings: RequestSettings, block_size: int) -> int:
    return max(0, isl_tokens - overlap.cached_tokens(rank, settings, block_size))
