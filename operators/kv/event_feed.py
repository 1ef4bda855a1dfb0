"""EventFeed: the events of many worker-ranks into one index, in order, with what was lost asked for again.

    event plane ──receive──► the next of its rank? ──yes──► index
                                └─ no: kept ──► recover(rank, from) ──► installed, then those kept meanwhile

Source: dynamo lib/llm/src/kv_router/worker_query.rs and lib/kv-router/src/recovery. Other than there, a rank keeps what
it is known to hold while its worker is asked, and loses it when the worker does not answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import anyio
from attrs import frozen

from pipeline import ContractViolation
from pipeline.loop import Bell
from pipeline.protocols.kv_events import RouterEvent
from pipeline.protocols.kv_recovery import DumpFailed, RecoveryAnswer

from .event_cursor import EventCursor, Sight
from .event_rank import Counted, RankFeed
from .index import KvIndex
from .worker_rank import WorkerRank

_log = logging.getLogger(__name__)

Recover = Callable[[WorkerRank, int | None], Awaitable[RecoveryAnswer | None]]
"""Asks a worker for a rank's events from an id on, None for everything. None as answer: this worker keeps nothing."""


@frozen
class RepairLimits:
    """Bounds of the repairs: events kept for a rank meanwhile, workers asked at once, and how long to try.

    An attempt may take `timeout_s`; after one that did not help the feed waits, at first `first_delay_s`, each time
    twice as long up to `longest_delay_s`. After so many `attempts` in a row the rank begins anew with what arrived.
    """

    kept_events: int = 1024
    at_once: int = 16
    timeout_s: float = 10.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 10.0
    attempts: int = 8


def _ignore(kind: str, status: str) -> None:
    """Counts nothing."""


class EventFeed:
    """See the module. Only ranks that were added are heard: one not known, yet or any more, is asked when it comes.

    `run` asks the workers, until it is cancelled; all other calls wait for nothing, and may come while it does not run.
    All in one loop and thread.
    """

    def __init__(
        self, index: KvIndex, recover: Recover, *, limits: RepairLimits | None = None, counted: Counted = _ignore
    ) -> None:
        self.index = index
        self._recover = recover
        self._limits = limits or RepairLimits()
        self._counted = counted
        self._ranks: dict[WorkerRank, RankFeed] = {}
        self._wanted: deque[RankFeed] = deque()
        self._bell: Bell | None = None

    @property
    def under_repair(self) -> list[WorkerRank]:
        """The ranks whose events wait for an answer, in order."""
        return sorted(feed.rank for feed in self._ranks.values() if feed.in_repair)

    def add_worker(self, worker_id: int, dp_ranks: Iterable[int] = (0,)) -> None:
        """Hears these ranks and asks what each holds; those heard already go on."""
        for dp_rank in dp_ranks:
            rank = WorkerRank(worker_id, dp_rank)
            if rank not in self._ranks:
                self._begin(rank)

    def remove_rank(self, rank: WorkerRank) -> None:
        """Forgets the rank and what it holds; a repair under way is cut."""
        self._drop(rank)
        self.index.remove_rank(rank)

    def remove_worker(self, worker_id: int) -> None:
        """The same for all its ranks."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            self._drop(rank)
        self.index.remove_worker(worker_id)

    def receive(self, event: RouterEvent, publisher_id: int | None = None) -> None:
        """Takes an event as it arrived. Another publisher than before: the rank began anew, and is asked anew.

        So it is if the first publisher heard begins with an event taken before. At worst that one was late, and the
        rank is asked in vain.
        """
        feed = self._ranks.get(WorkerRank(event.worker_id, event.event.dp_rank))
        if feed is None or (publisher_id is not None and publisher_id == feed.former_publisher_id):
            return
        if publisher_id is not None and publisher_id != feed.publisher_id:
            former = feed.publisher_id
            if former is not None or feed.cursor.sight(event.event.event_id) is Sight.STALE:
                feed = self._begin(feed.rank)
            feed.publisher_id, feed.former_publisher_id = publisher_id, former
        if feed.in_repair or not feed.take(event):
            feed.kept.append(event)
            self._ask(feed)

    async def run(self) -> None:
        """Repairs what needs it, for ever. Cancelled, it leaves what it was at to the next run."""
        if self._bell is not None:
            raise ContractViolation("the feed runs already")
        self._bell = Bell()
        room = anyio.Semaphore(self._limits.at_once)
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    while self._wanted:
                        tasks.start_soon(self._repair, self._wanted.popleft(), room)
                    await self._bell.wait()
        finally:
            self._bell = None
            self._wanted = deque(feed for feed in self._ranks.values() if feed.in_repair)

    # -- inside

    def _begin(self, rank: WorkerRank) -> RankFeed:
        """Starts hearing the rank from nothing; what an older repair of it still brings is not for this one."""
        self._drop(rank)
        self.index.clear_rank(rank)
        feed = RankFeed(rank, self.index, self._counted, deque(maxlen=self._limits.kept_events))
        self._ranks[rank] = feed
        self._ask(feed)
        return feed

    def _drop(self, rank: WorkerRank) -> None:
        feed = self._ranks.pop(rank, None)
        if feed is not None and feed.scope is not None:
            feed.scope.cancel()

    def _ask(self, feed: RankFeed) -> None:
        if not feed.in_repair:
            feed.in_repair = True
            self._wanted.append(feed)
            if self._bell is not None:
                self._bell.ring()

    async def _repair(self, feed: RankFeed, room: anyio.Semaphore) -> None:
        """Asks until the rank is in order, is dropped, or has been asked often enough."""
        with anyio.CancelScope() as feed.scope:
            delay_s, failed = self._limits.first_delay_s, 0
            while self._ranks.get(feed.rank) is feed:
                before = feed.cursor
                if await self._one_attempt(feed, room):
                    feed.in_repair = False
                    return
                failed = failed + 1 if feed.cursor in (before, EventCursor()) else 0
                if failed >= self._limits.attempts:
                    _log.warning("%s does not say what it holds: it begins anew with what arrives", feed.rank)
                    feed.begin_with_kept()
                    feed.in_repair = False
                    return
                await anyio.sleep(delay_s)
                delay_s = min(2 * delay_s, self._limits.longest_delay_s)

    async def _one_attempt(self, feed: RankFeed, room: anyio.Semaphore) -> bool:
        """Asks once and takes what came; True when the rank is in order again."""
        answer: RecoveryAnswer | None
        try:
            async with room:
                with anyio.fail_after(self._limits.timeout_s):
                    answer = await self._recover(feed.rank, feed.cursor.expected)
        except Exception as error:
            answer = DumpFailed(f"{type(error).__name__}: {error}")
        if self._ranks.get(feed.rank) is not feed:
            return False
        if answer is None:
            feed.begin_with_kept()
            return True
        if isinstance(answer, DumpFailed):
            _log.info("%s could not be asked for its blocks: %s", feed.rank, answer.message)
        return feed.install(answer) and feed.take_kept()
