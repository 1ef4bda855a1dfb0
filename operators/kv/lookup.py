"""PrefixLookup: how much of a prompt each rank has cached, by KV events, by what was routed there, or by both.

    use_kv_events        index, fed by the event feed       with a predicted time to live also what was routed
                         for workers without events what was routed, for router_ttl_secs
    otherwise            what was routed, for router_ttl_secs
    no credit            nothing is known, and nothing kept

Source: dynamo lib/llm/src/kv_router/indexer.rs. Other than there, workers with and without events may be in one pool.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
from anyio.abc import TaskStatus

from pipeline.network import EndpointId, Event, EventPlane, Missed, Scope
from pipeline.protocols.kv import KV_EVENTS_TOPIC, RecoveryReply, RouterEvent
from pipeline.rx import CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase

from .config import KvRouterConfig
from .events import Counted, EventFeed, Recover
from .index import KvIndex, Overlap, PredictedIndex
from .numbers import Matches, RankNumbers, deepest
from .prompt import PromptBlocks
from .types import WorkerRank

_log = logging.getLogger(__name__)

KvEvents: TypeAlias = Observable[RouterEvent] | Observable[Event[RouterEvent]] | Observable[Event[RouterEvent] | Missed]
"""KV events, plain, with their publishers, or with reports of losses."""
IndexKind = Literal["events", "approximate"]
"""How the router knows what a rank has cached: by its KV events, or by what was routed there."""

_NO_WORKERS: AbstractSet[int] = frozenset()
_NOTHING = Matches((), ())


class PrefixLookup:
    """The cached prefixes of one router's workers, and how their prompts are cut into blocks. See the module.

    `recover` requests lost events from a worker; without it every rank begins with what arrives. `on_event` is called
    with the type of each event and what became of it. `numbers` are those of the router's load book.
    """

    def __init__(
        self,
        config: KvRouterConfig,
        block_size_tokens: int,
        *,
        is_eagle: bool = False,
        recover: Recover | None = None,
        on_event: Counted | None = None,
        numbers: RankNumbers | None = None,
    ) -> None:
        numbers = RankNumbers() if numbers is None else numbers
        self.block_size_tokens, self.is_eagle = block_size_tokens, is_eagle
        self.has_index = config.has_index
        self.feed = None
        if config.has_index and config.use_kv_events:
            self.feed = EventFeed(KvIndex(numbers=numbers), recover or _keeps_nothing, counted=on_event)
        self._predicted = None if self.feed is None else _routed(config, config.router_predicted_ttl_secs, numbers)
        self._approximate = _routed(config, config.router_ttl_secs, numbers) if config.has_index else None
        self._without_events = _NO_WORKERS
        self._ranks: Mapping[int, range] = {}
        self._is_followed = self._has_warned = False

    def find(self, blocks: PromptBlocks, now_s: float) -> Overlap:
        """The device blocks of each rank that has some."""
        scores = _NOTHING
        if self.feed is not None:
            if self.feed.is_stalled:
                self._warn_of_stall()
            scores = self.feed.index.find_matches(blocks.local_hashes)
        if self._predicted is not None:
            scores = deepest(scores, self._predicted.find_matches(blocks.local_hashes, now_s))
        if self._approximate is not None and (self._without_events or self.feed is None):
            scores = deepest(scores, self._approximate.find_matches(blocks.local_hashes, now_s))
        return Overlap(device=scores) if scores.groups else Overlap()

    def kind_of(self, worker_id: int) -> IndexKind:
        """Return how the router knows what this worker has cached."""
        return "approximate" if self.feed is None or worker_id in self._without_events else "events"

    def held_blocks(self) -> Iterator[tuple[WorkerRank, IndexKind, int]]:
        """Yield each rank with its kind of index and its blocks there; nothing without an index. For any thread."""
        if (approximate := self._approximate) is None:
            return
        for worker_id, dp_ranks in self._ranks.items():
            kind = self.kind_of(worker_id)
            for rank in (WorkerRank(worker_id, dp_rank) for dp_rank in dp_ranks):
                if self.feed is not None and kind == "events":
                    yield rank, kind, self.feed.index.held_blocks(rank)
                else:
                    yield rank, kind, approximate.blocks_of(rank)

    def record(self, rank: WorkerRank, blocks: PromptBlocks, now_s: float) -> None:
        """Record that the prompt is sent there. A failure is logged: routing does not depend on it."""
        index = self._approximate if self.kind_of(rank.worker_id) == "approximate" else self._predicted
        if index is None:
            return
        try:
            index.record(rank, blocks.local_hashes, now_s)
        except Exception as error:
            _log.warning("what %s was given is not recorded: %s", rank, error)

    def expire(self, now_s: float) -> None:
        """Evict what was routed longer ago than its time to live."""
        for index in (self._predicted, self._approximate):
            if index is not None:
                index.expire(now_s)

    def set_workers(
        self, gone: Sequence[int], ranks: Mapping[int, range], without_events: AbstractSet[int] = _NO_WORKERS
    ) -> None:
        """Drop the workers that are gone and the ranks that no longer exist, and follow the others.

        What is known of a worker that has events now and had none before, or the other way round, is dropped too.
        """
        lost = [
            WorkerRank(worker_id, dp_rank)
            for worker_id, before in self._ranks.items()
            if worker_id not in gone
            for dp_rank in set(before).difference(ranks.get(worker_id, ()))
        ]
        changed = ((without_events ^ self._without_events) & self._ranks.keys()) - set(gone)
        for source in (self.feed, self._predicted, self._approximate):
            if source is not None:
                for worker_id in (*gone, *changed):
                    source.remove_worker(worker_id)
                for rank in lost:
                    source.remove_rank(rank)
        self._ranks, self._without_events = dict(ranks), without_events
        if self.feed is not None:
            for worker_id, dp_ranks in ranks.items():
                if worker_id not in without_events:
                    self.feed.add_worker(worker_id, dp_ranks)

    def follow(self, events: KvEvents) -> DisposableBase:
        """Take in events, plain or as the event plane brings them, and its reports of losses, until disposed.

        Without an index, or where routing is approximate, nothing is subscribed. Events are kept and not applied until
        their workers have reported to `run` what they hold: if events arrive, or overlap is looked up, while `run` does
        not run, a warning is logged, once.
        """
        if self.feed is None:
            return Disposable()
        self._is_followed = True
        following = events.subscribe(partial(self._receive, self.feed))
        self.feed.recheck()  # what was published since a worker's last answer has not come here
        return following

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Recover lost events from the workers, until cancelled; return at once without a feed."""
        if self.feed is None:
            task_status.started()
        else:
            await self.feed.run(task_status=task_status)

    def _receive(self, feed: EventFeed, event: RouterEvent | Event[RouterEvent] | Missed) -> None:
        if isinstance(event, Event):
            feed.receive(event.payload, event.publisher_id)
        elif isinstance(event, Missed):
            feed.recheck(event.publisher_id)
        else:
            feed.receive(event)
        if feed.is_stalled:
            self._warn_of_stall()

    def _warn_of_stall(self) -> None:
        if self._is_followed and not self._has_warned:
            self._has_warned = True
            _log.warning("KV events are kept and not applied while KvRouter.run does not run: start it in a task")


def _routed(config: KvRouterConfig, ttl_s: float | None, numbers: RankNumbers) -> PredictedIndex | None:
    """Return an index of what was routed; None without a time to live."""
    if ttl_s is None:
        return None
    limit_blocks, pruned_share = config.router_max_tree_size, config.router_prune_target_ratio
    return PredictedIndex(ttl_s, limit_blocks=limit_blocks, pruned_share=pruned_share, numbers=numbers)


async def _keeps_nothing(rank: WorkerRank, first_id: int | None) -> RecoveryReply | None:
    return None


def kv_events(events: EventPlane, endpoint: str | EndpointId) -> Observable[Event[RouterEvent] | Missed]:
    """The KV events of the workers of the endpoint's component, and where some may be lost, as the event plane has it.

    `KvRouter.follow` takes them, and requests from the workers what was lost.
    """
    where = EndpointId.parse(endpoint)
    scope = Scope(where.namespace, where.component)

    def subscribe(observer: ObserverBase[Event[RouterEvent] | Missed], _: Any = None) -> DisposableBase:
        losses = events.missed(scope, KV_EVENTS_TOPIC).subscribe(observer.on_next)
        following = events.subscribe(scope, KV_EVENTS_TOPIC, RouterEvent).subscribe(observer)
        return CompositeDisposable(losses, following)

    return Observable(subscribe)
