"""RankFeed: one worker-rank's events on their way into the index: what is next, what waits, what an answer changes.

Plain calls, none of them waits; `event_feed` asks the workers and gives the answers here.

Whose events count: those of the publisher that the worker's last answer named. An event of any other publisher waits as
`foreign` and changes nothing until an answer to a later question decides: it is taken if that answer names its
publisher, and dropped otherwise. Where answers name no publisher, or none comes, the publisher heard last is believed.

EventCursor: how far the events of one worker-rank were taken, and what the next one's id says.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

import anyio
from attrs import define, field, frozen

from pipeline.protocols.kv import (
    WORKER_DOMAIN,
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvEventData,
    KvRemoved,
    KvStored,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    RecoveryReply,
    RouterEvent,
    TooNew,
)

from ..index import KvIndex, KvIndexError
from ..types import WorkerRank


class Sight(Enum):
    """How an event stands to those taken before."""

    INITIAL = "initial"
    """Nothing was taken yet, so nothing can be said."""
    STALE = "stale"
    """Taken before."""
    CONTIGUOUS = "contiguous"
    GAP = "gap"
    """Those between were lost, or are still to come."""


@frozen
class EventCursor:
    """The id of the last event taken; None before the first. Source: dynamo lib/kv-router/src/recovery, EventCursor."""

    last: int | None = None

    @property
    def expected(self) -> int | None:
        """The id that would be contiguous; None where any is taken."""
        return None if self.last is None else self.last + 1

    def sight(self, event_id: int) -> Sight:
        if self.last is None:
            return Sight.INITIAL
        if event_id <= self.last:
            return Sight.STALE
        return Sight.CONTIGUOUS if event_id == self.last + 1 else Sight.GAP


_log = logging.getLogger(__name__)

FIRST_EVENT_ID = 1

Counted = Callable[[str, str], object]
"""Hears of each event applied: what it was, and the label of how that went."""

_KINDS: dict[type[KvEventData], str] = {KvStored: "stored", KvRemoved: "removed", KvCleared: "cleared"}


@frozen
class ForeignEvent:
    """An event of a publisher that is not the rank's, and how many events of the rank had arrived with it."""

    number: int
    publisher_id: int
    event: RouterEvent


@frozen
class Question:
    """What a worker is asked: the rank's events from `start_event_id` on, None for everything it holds.

    `arrived` events of the rank had arrived before, so an answer decides over these and not over later ones. Where it
    names no publisher, `last_heard_id` is believed, the publisher heard last by then.
    """

    start_event_id: int | None
    arrived: int
    last_heard_id: int | None
    was_in_order: bool


@define(eq=False)
class RankFeed:
    """How far the rank was taken, and the events that wait; a full deque loses its oldest.

    `kept` are the publisher's own events that cannot be applied yet, `foreign` those of others. While the rank is
    `in_order` nothing of its publisher's is missing, and its events are applied as they arrive, also while the worker
    is asked about foreign ones. `in_repair` says that the worker is being asked, `scope` is the task that does.
    """

    rank: WorkerRank
    index: KvIndex
    counted: Counted
    kept: deque[RouterEvent]
    foreign: deque[ForeignEvent]
    cursor: EventCursor = field(factory=EventCursor)
    publisher_id: int | None = None
    """The publisher whose events count; None until one is known."""
    last_heard_id: int | None = None
    """The publisher of the last event that arrived."""
    arrived: int = 0
    """How many events of the rank have arrived."""
    in_order: bool = False
    in_repair: bool = False
    scope: anyio.CancelScope | None = None

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to ask the worker about."""
        return self.in_order and not self.foreign

    def receive(self, event: RouterEvent, publisher_id: int | None) -> bool:
        """Take an event as it arrived; False if the worker has to be asked first."""
        self.arrived += 1
        if publisher_id is not None:
            self.last_heard_id = publisher_id
            if publisher_id != self.publisher_id:
                self.foreign.append(ForeignEvent(self.arrived, publisher_id, event))
                return False
        if self.in_order and self.take(event):
            return True
        self.in_order = False
        self.kept.append(event)
        return False

    def question(self) -> Question:
        """What to ask the worker now."""
        last_heard_id = self.last_heard_id if self.foreign else self.publisher_id
        return Question(self.cursor.expected, self.arrived, last_heard_id, self.in_order)

    def take(self, event: RouterEvent) -> bool:
        """Applies the event if it is the next, drops it if it was taken before; False if others are missing first."""
        event_id = event.event.event_id
        sight = self.cursor.sight(event_id)
        if sight is Sight.GAP or (sight is Sight.INITIAL and event_id > FIRST_EVENT_ID):
            return False
        if sight is not Sight.STALE:
            self._apply(event)
        return True

    def settle(self, reply: RecoveryReply | None, question: Question) -> bool:
        """Take the answer to the question; False if it helped nothing. None is of a worker that keeps nothing.

        What the publisher has sent is applied afterwards. A worker that could not answer leaves a rank in order as it
        is; of any other rank nothing is known then.
        """
        if reply is None:
            self.believe_last_heard()
            return True
        if isinstance(reply.answer, DumpFailed | InvalidRange):
            if not self.in_order:
                self.forget()
            return False
        switched = self._identify(reply.publisher_id, question)
        if not isinstance(reply.answer, RecoveredTree) and switched and question.start_event_id is not None:
            return False  # the answer continues events that were another publisher's
        self.in_order = self.install(reply.answer, question) and self.take_kept()
        return self.in_order

    def install(self, answer: RecoveryAnswer, question: Question | None = None) -> bool:
        """Make what the worker answered the rank's state; False if nothing is known of the rank then."""
        if isinstance(answer, RecoveredTree):
            if self.in_order and answer.last_event_id < (self.cursor.expected or 0):
                return True  # what has arrived meanwhile was applied, and is newer
            self.forget()
            self._apply_all(answer.events)
            self.cursor = EventCursor(answer.last_event_id)
            return True
        if isinstance(answer, RecoveredEvents):
            events = self._own(answer.events)
            if events and self._is_fresh_clear(events[0]):
                self._apply(events.pop(0))  # makes those before it void, so nothing is lost with them
            if all(self.take(event) for event in events):
                return True
        if isinstance(answer, TooNew) and question is not None and question.was_in_order:
            is_all_known = answer.newest_available + 1 == question.start_event_id
            if is_all_known:
                return True
        self.forget()
        return False

    def believe_last_heard(self) -> None:
        """Decide without the worker: begin anew with the events of the publisher heard last, unless all is in order.

        Events of other publishers are dropped. If that belief is wrong, the next event of the publisher that is alive
        is foreign, and the worker is asked again.
        """
        if self.foreign and self.last_heard_id != self.publisher_id:
            if self.publisher_id is not None:
                self.forget()
                self.kept.clear()
            self.publisher_id = self.last_heard_id
            self._sort_foreign(self.arrived)
        self.foreign.clear()
        if not self.in_order:
            self.begin_with_kept()

    def take_kept(self) -> bool:
        """Takes the events kept, in order; False if some are missing before one, which is still kept then."""
        waiting = sorted(self.kept, key=lambda event: event.event.event_id)
        taken = next((i for i, event in enumerate(waiting) if not self.take(event)), len(waiting))
        self.kept.clear()
        self.kept.extend(waiting[taken:])
        return taken == len(waiting)

    def begin_with_kept(self) -> None:
        """Begins anew with the events kept, from behind the last gap on: what was before cannot be learned."""
        self.forget()
        for event in sorted(self.kept, key=lambda event: event.event.event_id):
            sight = self.cursor.sight(event.event.event_id)
            if sight is Sight.GAP:
                self.forget()
            if sight is not Sight.STALE:
                self._apply(event)
        self.kept.clear()
        self.in_order = True

    def forget(self) -> None:
        """Drop all that is known of the rank."""
        self.index.clear_rank(self.rank)
        self.cursor = EventCursor()
        self.in_order = False

    def _identify(self, named_id: int | None, question: Question) -> bool:
        """Learn from an answer which publisher is alive; True if what was known was of another one, and is dropped."""
        living_id = question.last_heard_id if named_id is None else named_id
        switched = living_id != self.publisher_id and (self.publisher_id is not None or self.cursor.last is not None)
        if switched:
            self.forget()
            self.kept.clear()
        self.publisher_id = living_id
        self._sort_foreign(question.arrived)
        return switched

    def _sort_foreign(self, arrived: int) -> None:
        """Keep the foreign events that are the publisher's now, and drop others that had `arrived` by then."""
        waiting, dropped = list(self.foreign), 0
        self.foreign.clear()
        for one in waiting:
            if one.publisher_id == self.publisher_id:
                self.kept.append(one.event)
                self.in_order = False
            elif one.number > arrived:
                self.foreign.append(one)
            else:
                dropped += 1
        if dropped:
            _log.info("%d events of %s are dropped: their publisher is not the one that is alive", dropped, self.rank)

    def _is_fresh_clear(self, event: RouterEvent) -> bool:
        is_clear = isinstance(event.event.data, KvCleared) and event.residency_domain == WORKER_DOMAIN
        return is_clear and self.cursor.sight(event.event.event_id) is not Sight.STALE

    def _own(self, events: Iterable[RouterEvent]) -> list[RouterEvent]:
        """Those of this rank: a worker may answer for all of its ranks."""
        return [e for e in events if (e.worker_id, e.event.dp_rank) == self.rank]

    def _apply_all(self, events: Iterable[RouterEvent]) -> None:
        for event in self._own(events):
            self._apply(event)

    def _apply(self, event: RouterEvent) -> None:
        kind = "unknown"
        try:
            kind = _KINDS[type(event.event.data)]
            status = self.index.apply(event).value
        except KvIndexError as error:
            status = error.status
            _log.debug("event %d of %s: %s", event.event.event_id, self.rank, error)
        except Exception:  # no worker may end what is heard of the others
            status = "failed"
            _log.exception("event %d of %s makes no sense", event.event.event_id, self.rank)
        self.cursor = EventCursor(event.event.event_id)
        self._count(kind, status)

    def _count(self, kind: str, status: str) -> None:
        try:
            self.counted(kind, status)
        except Exception:  # events go on whoever counts them
            _log.exception("an event of %s is not counted", self.rank)
