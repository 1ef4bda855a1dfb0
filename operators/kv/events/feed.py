"""EventFeed: the events of many worker-ranks into one index, in order, with what was lost asked for again.

    event plane ──receive──► the next of its rank? ──yes──► index
                                └─ no: kept ──► recover(rank, from) ──► installed, then those kept meanwhile
       of an unknown publisher ─┴─ the answer names the one that is alive; events of others are dropped

Source: dynamo lib/llm/src/kv_router/worker_query.rs and lib/kv-router/src/recovery. Other than there, a rank keeps what
it is known to hold while its worker is asked, and loses it when the worker does not answer; and an event of an unknown
publisher, which may be a new life of the worker or a late word of an old one, changes nothing until the worker answers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import anyio
from attrs import define, frozen

from pipeline import ContractViolation
from pipeline.loop import Wakeup
from pipeline.protocols.kv import DumpFailed, RecoveryReply, RouterEvent

from ..index import KvIndex
from ..types import WorkerRank
from .rank import Counted, RankFeed, Sight

_log = logging.getLogger(__name__)

Recover = Callable[[WorkerRank, int | None], Awaitable[RecoveryReply | None]]
"""Asks a worker for a rank's events from an id on, None for everything. None as answer: this worker keeps nothing.

A reply names the publisher that is alive; without that name the publisher heard last is believed.
"""


@frozen
class RepairLimits:
    """Bounds of the repairs: events kept for a rank meanwhile, workers asked at once, and how long to try.

    An attempt may take `timeout_s`; after one that did not help the feed waits, at first `first_delay_s`, each time
    twice as long up to `longest_delay_s`. After so many `attempts` in a row that brought nothing new, the publisher
    heard last is believed: a rank that lacks events, or had another publisher, begins anew with what arrived of it, and
    events of other publishers are dropped. `kept_events` bounds those of the publisher and those of others, each for
    itself.
    """

    kept_events: int = 1024
    at_once: int = 16
    timeout_s: float = 10.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 10.0
    attempts: int = 8


@define
class _Progress:
    """What the attempts of one repair have brought: the publisher, its last event known, and how many failed since."""

    publisher_id: int | None
    reached: int
    failed: int = 0
    has_switched: bool = False

    def note(self, feed: RankFeed, has_helped: bool) -> bool:
        """Count an attempt; True for the first that found another publisher, which is to be asked at once."""
        reached = feed.cursor.last or 0
        if feed.publisher_id != self.publisher_id:
            is_first, self.has_switched = not self.has_switched, True
            self.publisher_id, self.reached = feed.publisher_id, reached
            return is_first
        self.failed = 0 if has_helped or reached > self.reached else self.failed + 1
        self.reached = max(reached, self.reached)
        return False


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
        self._wakeup: Wakeup | None = None

    @property
    def under_repair(self) -> list[WorkerRank]:
        """The ranks whose events wait for an answer, in order."""
        return sorted(feed.rank for feed in self._ranks.values() if feed.in_repair)

    @property
    def is_stalled(self) -> bool:
        """Whether workers are to be asked and `run` does not run: events of their ranks are kept and not applied."""
        return self._wakeup is None and bool(self._wanted)

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
        """Take an event as it arrived. Does nothing for a rank that was not added.

        An event of another publisher than the rank's changes nothing yet: the worker is asked which of its publishers
        is alive. The event counts if that is its own, also a second time, and is dropped if not.
        """
        feed = self._ranks.get(WorkerRank(event.worker_id, event.event.dp_rank))
        if feed is None:
            return
        if publisher_id is not None and feed.publisher_id is None and feed.in_order:
            # The worker has answered without a name. An event that was taken before is then of a new life of it; at
            # worst it was only late, and the rank is asked in vain.
            if feed.cursor.sight(event.event.event_id) is Sight.STALE:
                feed = self._begin(feed.rank)
            else:
                feed.publisher_id = publisher_id
        if not feed.receive(event, publisher_id):
            self._ask(feed)

    async def run(self) -> None:
        """Repairs what needs it, for ever. Cancelled, it leaves what it was at to the next run."""
        if self._wakeup is not None:
            raise ContractViolation("the feed runs already")
        self._wakeup = Wakeup()
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
        """Starts hearing the rank from nothing; what an older repair of it still brings is not for this one."""
        self._drop(rank)
        self.index.clear_rank(rank)
        kept = self._limits.kept_events
        feed = RankFeed(rank, self.index, self._counted, deque(maxlen=kept), deque(maxlen=kept))
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
            if self._wakeup is not None:
                self._wakeup.wake()

    async def _repair(self, feed: RankFeed, room: anyio.Semaphore) -> None:
        """Asks until nothing is left to ask about, the rank is dropped, or it has been asked often enough."""
        with anyio.CancelScope() as feed.scope:
            delay_s, progress = self._limits.first_delay_s, _Progress(feed.publisher_id, feed.cursor.last or 0)
            while self._ranks.get(feed.rank) is feed:
                has_helped = await self._one_attempt(feed, room)
                if feed.is_settled:
                    break
                may_hurry = progress.note(feed, has_helped)
                if progress.failed >= self._limits.attempts:
                    _log.warning("%s: no useful answer in %d attempts; what arrives counts", feed.rank, progress.failed)
                    feed.believe_last_heard()
                    break
                if not may_hurry:
                    await anyio.sleep(delay_s)
                    delay_s = min(2 * delay_s, self._limits.longest_delay_s)
            feed.in_repair = False

    async def _one_attempt(self, feed: RankFeed, room: anyio.Semaphore) -> bool:
        """Asks once and takes what came; False if it helped nothing."""
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
            _log.info("%s could not be asked for its blocks: %s", feed.rank, reply.answer.message)
        return feed.settle(reply, question)
