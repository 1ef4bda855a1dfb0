"""EventFeed: the events of many worker-ranks into one index, in order, with lost events recovered.

    event plane ──receive──► the next of its rank? ──yes──► index
                                └─ no: kept ──► recover(rank, from) ──► installed, then those kept meanwhile
       of an unknown publisher ─┴─ the answer names the one that is alive; events of others are dropped
    a loss that the event plane reports ──► recover

Source: dynamo lib/llm/src/kv_router/worker_query.rs and lib/kv-router/src/recovery. Other than there, a rank keeps what
it is known to hold during a recovery, and loses it when the worker does not answer; and an event of an unknown
publisher, which may be a restarted worker or a late event of an earlier one, changes nothing until the worker answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import anyio
from anyio.abc import TaskStatus
from attrs import define, frozen

from pipeline import ContractViolation
from pipeline.loop import Wakeup
from pipeline.protocols.kv import DumpFailed, RecoveryReply, RouterEvent

from ..index import KvIndex
from ..types import WorkerRank
from .rank import Counted, RankFeed, Sight

_log = logging.getLogger(__name__)

Recover = Callable[[WorkerRank, int | None], Awaitable[RecoveryReply | None]]
"""Requests a rank's events from an id on, None for everything. Returns None for a worker that keeps nothing.

A reply names the publisher that is alive; without that name the publisher of the last event is taken for it.
"""


@frozen
class RepairLimits:
    """Bounds of the repairs."""

    kept_events: int = 1024
    """Events kept for a rank during its repair: so many of its publisher, and so many of others."""
    at_once: int = 16
    """Workers queried at the same time."""
    timeout_s: float = 10.0
    """Seconds for one attempt."""
    first_delay_s: float = 0.1
    """Seconds before the second attempt; twice as long after each that did not help."""
    longest_delay_s: float = 10.0
    """The longest wait between attempts, in seconds."""
    attempts: int = 8
    """After so many in a row without anything new, the publisher of the last event is taken for the one that is alive:
    a rank that lacks events, or had another publisher, starts over with that publisher's events, and others are
    dropped."""


@define
class _Progress:
    """What the attempts of one repair achieved: the publisher, its last known event, and how many failed since."""

    publisher_id: int | None
    reached: int
    failed: int = 0
    has_switched: bool = False

    def note(self, feed: RankFeed, has_helped: bool) -> bool:
        """Count an attempt; return True for the first that found another publisher, to be queried at once."""
        reached = feed.cursor.last or 0
        if feed.publisher_id != self.publisher_id:
            is_first, self.has_switched = not self.has_switched, True
            self.publisher_id, self.reached = feed.publisher_id, reached
            return is_first
        self.failed = 0 if has_helped or reached > self.reached else self.failed + 1
        self.reached = max(reached, self.reached)
        return False


class EventFeed:
    """See the module. Only events of ranks that were added count; a rank is recovered when it is added.

    `run` queries the workers, until it is cancelled; all other calls wait for nothing, and are allowed without it. Used
    in one loop and thread.
    """

    def __init__(
        self, index: KvIndex, recover: Recover, *, limits: RepairLimits | None = None, counted: Counted | None = None
    ) -> None:
        self.index = index
        self._recover = recover
        self._limits = limits or RepairLimits()
        self._counted = counted
        self._ranks: dict[WorkerRank, RankFeed] = {}
        self._wanted: deque[RankFeed] = deque()
        self._wakeup: Wakeup | None = None

    @property
    def under_repair(self) -> list[WorkerRank]:
        """The ranks whose events wait for an answer, in order."""
        return sorted(feed.rank for feed in self._ranks.values() if feed.in_repair)

    @property
    def is_stalled(self) -> bool:
        """Whether ranks need a recovery while `run` does not run: their events are kept and not applied."""
        return self._wakeup is None and bool(self._wanted)

    def add_worker(self, worker_id: int, dp_ranks: Iterable[int] = (0,)) -> None:
        """Take in the events of these ranks, and recover what each holds; ranks that were added before go on."""
        for dp_rank in dp_ranks:
            rank = WorkerRank(worker_id, dp_rank)
            if rank not in self._ranks:
                self._begin(rank)

    def remove_rank(self, rank: WorkerRank) -> None:
        """Drop the rank and what it holds; a repair in progress is cancelled."""
        self._drop(rank)
        self.index.remove_rank(rank)

    def remove_worker(self, worker_id: int) -> None:
        """Drop all ranks of the worker."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            self._drop(rank)
        self.index.remove_worker(worker_id)

    def recheck(self, publisher_id: int | None = None) -> None:
        """Query every worker once more: the answers so far may be from before its events arrived here.

        With a publisher, query those whose events it publishes, and those whose publisher is not known.
        """
        for feed in self._ranks.values():
            if publisher_id is None or feed.publisher_id in (publisher_id, None):
                feed.is_doubted = True
                self._want(feed)

    def receive(self, event: RouterEvent, publisher_id: int | None = None) -> None:
        """Take in an event. Does nothing for a rank that was not added.

        An event of another publisher than the rank's changes nothing until the worker names the publisher that is
        alive. It is applied if that is its own, and dropped otherwise.
        """
        feed = self._ranks.get(WorkerRank(event.worker_id, event.event.dp_rank))
        if feed is None:
            return
        if publisher_id is not None and feed.publisher_id is None and feed.in_order:
            # The worker answered without a name. An event id that was taken before then means that it restarted; at
            # worst the event was only late, and the recovery is superfluous.
            if feed.cursor.sight(event.event.event_id) is Sight.STALE:
                feed = self._begin(feed.rank)
            else:
                feed.publisher_id = publisher_id
        if not feed.receive(event, publisher_id):
            self._want(feed)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Repair ranks until cancelled; repairs in progress are left to the next run."""
        if self._wakeup is not None:
            raise ContractViolation("the feed runs already")
        self._wakeup = Wakeup()
        task_status.started()
        room = anyio.Semaphore(self._limits.at_once)
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    while self._wanted:
                        tasks.start_soon(self._repair, self._wanted.popleft(), room)
                    await self._wakeup.wait()
        finally:
            self._wakeup = None
            self._wanted = deque(feed for feed in self._ranks.values() if feed.in_repair)

    # -- inside

    def _begin(self, rank: WorkerRank) -> RankFeed:
        """Start the rank over; results of an older repair no longer count."""
        self._drop(rank)
        self.index.clear_rank(rank)
        kept = self._limits.kept_events
        feed = RankFeed(rank, self.index, self._counted, deque(maxlen=kept), deque(maxlen=kept))
        self._ranks[rank] = feed
        self._want(feed)
        return feed

    def _drop(self, rank: WorkerRank) -> None:
        feed = self._ranks.pop(rank, None)
        if feed is not None and feed.scope is not None:
            feed.scope.cancel()

    def _want(self, feed: RankFeed) -> None:
        if not feed.in_repair:
            feed.in_repair = True
            self._wanted.append(feed)
            if self._wakeup is not None:
                self._wakeup.wake()

    async def _repair(self, feed: RankFeed, room: anyio.Semaphore) -> None:
        """Query the worker until the rank is settled, dropped, or out of attempts."""
        with anyio.CancelScope() as feed.scope:
            delay_s, progress = self._limits.first_delay_s, _Progress(feed.publisher_id, feed.cursor.last or 0)
            while self._ranks.get(feed.rank) is feed:
                feed.is_doubted = False
                has_helped = await self._one_attempt(feed, room)
                if feed.is_settled and feed.is_doubted:
                    continue
                if feed.is_settled:
                    break
                may_hurry = progress.note(feed, has_helped)
                if progress.failed >= self._limits.attempts:
                    _log.warning("%s: no useful answer in %d attempts; what arrives counts", feed.rank, progress.failed)
                    feed.believe_last_publisher()
                    break
                if not may_hurry:
                    await anyio.sleep(delay_s)
                    delay_s = min(2 * delay_s, self._limits.longest_delay_s)
            feed.in_repair = False

    async def _one_attempt(self, feed: RankFeed, room: anyio.Semaphore) -> bool:
        """Query once and take in the answer; return False if it did not help."""
        reply: RecoveryReply | None
        async with room:
            question = feed.question()
            try:
                with anyio.fail_after(self._limits.timeout_s):
                    reply = await self._recover(feed.rank, question.start_event_id)
            except Exception as error:
                reply = RecoveryReply.of(DumpFailed(f"{type(error).__name__}: {error}"))
        if self._ranks.get(feed.rank) is not feed:
            return False
        if reply is not None and isinstance(reply.answer, DumpFailed):
            _log.info("blocks of %s could not be recovered: %s", feed.rank, reply.answer.message)
        return feed.settle(reply, question)
