"""EventLog: what a worker keeps of one rank's events, to answer a router that missed some.

    change ──record──► RouterEvent with the next id ──► published, and kept: the last 1,024
                                                              │
    recover(start, end) ◄── the events from start on, or the whole index as it is now

Source: dynamo lib/kv-router/src/indexer/local.rs, LocalKvIndexer. Other than there, the log gives the ids itself, so it
cannot have a gap, and a query waits for nothing: queries run one after another, and the second finds the dump.

KvRecovery: requests the events a router missed from the workers, over the runtime.

    EventFeed ──rank, from──► KvRecovery ──RecoveryRequest──► the rank's endpoint at that worker
        ◄── answer; None where the worker keeps no events, by its card

Source: dynamo lib/llm/src/kv_router/worker_query.rs, WorkerQueryClient. Other than there, workers are known by
their own endpoint and card; these endpoints are followed from the first query of their rank on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from pipeline import Context, InvalidArgument, StreamClosed, Unavailable
from pipeline.errors import StreamIncomplete
from pipeline.network import EndpointId, EndpointWorkers, Runtime
from pipeline.protocols.kv import (
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvEvent,
    KvEventData,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    StorageTier,
    TooNew,
    recovery_endpoint,
)

from ...pool import PoolViews
from ..index import KvIndex, KvIndexError
from ..types import WorkerRank

KEPT_EVENTS = 1024


class EventLog:
    """See the module. Ids count from `first_id`; `newest` is one less until something is recorded. Waits for nothing.

    `index` holds the blocks by these events; ranks of a worker may share one.
    """

    def __init__(
        self, rank: WorkerRank, index: KvIndex | None = None, *, kept_events: int = KEPT_EVENTS, first_id: int = 1
    ) -> None:
        if kept_events < 1:
            raise InvalidArgument(f"must be at least 1, got {kept_events}", field="kept_events")
        self.rank = rank
        self.index = index if index is not None else KvIndex()
        self.newest = first_id - 1
        self._kept: deque[RouterEvent] = deque(maxlen=kept_events)
        self._dumped: RecoveredTree | None = None

    def record(self, change: KvEventData, storage_tier: StorageTier = "device") -> RouterEvent:
        """Return the change as the next event, to be published; also if the index refuses a part of it."""
        event = RouterEvent(self.rank.worker_id, KvEvent(self.newest + 1, change, self.rank.dp_rank), storage_tier)
        with suppress(KvIndexError):  # routers refuse the same part of it
            self.index.apply(event)
        self.newest += 1
        self._kept.append(event)
        if isinstance(change, KvCleared) or (self._dumped is not None and self._is_old(self._dumped)):
            self._dumped = None
        return event

    def recover(self, start: int | None = None, end: int | None = None) -> RecoveryAnswer:
        """Return what brings a router up to date that needs the events from `start` on; without a start, everything.

        The answer reaches to the newest event whatever the end is.
        """
        if start is not None and end is not None and end < start:
            return InvalidRange(start, end)
        if start is None or not self._kept or start < self._oldest:
            return self._tree()
        if start > self.newest:
            return TooNew(start, end, self.newest)
        suffix = self._since(start)
        clears = [i for i, event in enumerate(suffix) if isinstance(event.event.data, KvCleared)]
        return RecoveredEvents(suffix[clears[-1] if clears else 0 :])

    @property
    def _oldest(self) -> int:
        """Id of the oldest event kept."""
        return self.newest - len(self._kept) + 1

    def _since(self, start: int) -> list[RouterEvent]:
        return list(self._kept)[start - self._oldest :]

    def _tree(self) -> RecoveredTree | DumpFailed:
        """Return the last dump with the events since, while these are few; else a new one."""
        made = self._dumped
        if made is None:
            try:
                made = RecoveredTree(self.index.dump(self.rank), self.newest)
            except Exception as error:  # whatever index it was given
                return DumpFailed(str(error))
            self._dumped = made
        if made.last_event_id == self.newest:
            return made
        return RecoveredTree(made.events + self._since(made.last_event_id + 1), self.newest)

    def _is_old(self, made: RecoveredTree) -> bool:
        """Whether more events have come since than half of those that are kept."""
        assert self._kept.maxlen is not None
        return self.newest - made.last_event_id > self._kept.maxlen // 2


WorkersOf = Callable[[int], EndpointWorkers[Any, RecoveryReply]]
"""From a rank to the workers' endpoints that answer for it."""


class KvRecovery:
    """The `recover` of a KvRouter, until it is closed; a context manager. In one loop and thread.

    `health` has the workers' cards, as `PushRouter.health`; without cards every worker is queried. The caller that
    makes it closes it, after the router's `run` has ended.
    """

    def __init__(self, workers_of: WorkersOf, health: PoolViews | None = None) -> None:
        self._workers_of = workers_of
        self._pools: dict[int, EndpointWorkers[Any, RecoveryReply]] = {}
        self._health = health
        self._is_closed = False

    async def __call__(self, rank: WorkerRank, start_event_id: int | None) -> RecoveryReply | None:
        """Return the rank's events from the id on, without one everything; None for a worker that keeps nothing.

        Raises Unavailable for a worker that is not known here yet, or not any more; StreamIncomplete for an empty
        answer; StreamClosed after `close`; else the error of the answer. Waits as long as the worker takes.
        """
        if self._is_closed:
            raise StreamClosed("this recovery was closed")
        configs = None if self._health is None else self._health.view.cards.configs
        if configs is not None:
            if (config := configs.get(rank.worker_id)) is None:
                raise Unavailable(f"worker {rank.worker_id} has not published whether it keeps its events")
            if not config.enable_local_indexer:
                return None
        if (pool := self._pools.get(rank.dp_rank)) is None:
            pool = self._pools[rank.dp_rank] = self._workers_of(rank.dp_rank)
        if rank.worker_id not in pool.instance_ids():
            raise Unavailable(f"worker {rank.worker_id} cannot be reached at {pool}")
        request = Context(RecoveryRequest(rank.dp_rank, start_event_id))
        async with await pool.engine(rank.worker_id).generate(request) as stream:
            async for reply in stream:
                return reply
        raise StreamIncomplete(f"worker {rank.worker_id} sent no answer at {pool}")

    def close(self) -> None:
        """Follow nothing more. Idempotent."""
        self._is_closed = True
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recovery_workers(runtime: Runtime, endpoint: str | EndpointId) -> WorkersOf:
    """Return the endpoints that answer for the ranks of the endpoint's workers, as discovery knows them."""
    where = EndpointId.parse(endpoint)

    def workers_of(dp_rank: int) -> EndpointWorkers[Any, RecoveryReply]:
        name = EndpointId(where.namespace, where.component, recovery_endpoint(dp_rank))
        return runtime.workers(name, RecoveryReply)

    return workers_of
