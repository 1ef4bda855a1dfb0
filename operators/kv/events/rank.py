"""RankFeed: one worker-rank's events on their way into the index: what is next, what waits, what an answer changes.

Plain calls that never wait; `EventFeed` queries the workers and passes the answers on.

The events that count are those of the publisher that the worker's last answer named. An event of any other publisher
waits as `foreign` until an answer to a later question decides: it is taken if that answer names its publisher, and
dropped otherwise. Where answers name no publisher, or none comes, the publisher of the last event is taken for it.

EventCursor: how far the events of one worker-rank were taken, and how the next one's id relates to that.
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
    """How an event relates to those taken before."""

    INITIAL = "initial"
    """The first one."""
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
"""Called for each event applied, with its type and the label of the outcome."""

_KINDS: dict[type[KvEventData], str] = {KvStored: "stored", KvRemoved: "removed", KvCleared: "cleared"}


@frozen
class ForeignEvent:
    """An event of a publisher that is not the rank's, and how many events of the rank had arrived with it."""

    number: int
    publisher_id: int
    event: RouterEvent


@frozen
class Question:
    """A query to a worker for the rank's events from `start_event_id` on, None for everything it holds.

    `arrived` events of the rank had arrived before, so an answer decides over these and not over later ones. Where it
    names no publisher, `last_publisher_id` is taken, the publisher of the last event by then.
    """

    start_event_id: int | None
    arrived: int
    last_publisher_id: int | None
    was_in_order: bool


@define(eq=False)
class RankFeed:
    """How far the rank was taken, and the events that wait; a full deque loses its oldest.

    `kept` are the publisher's own events that cannot be applied yet, `foreign` those of others. While the rank is
    `in_order` nothing of its publisher's is missing, and its events are applied as they arrive, also during a query
    about foreign ones. `in_repair` is set during a query, `scope` is that of its task.
    """

    rank: WorkerRank
    index: KvIndex
    counted: Counted | None
    kept: deque[RouterEvent]
    foreign: deque[ForeignEvent]
    cursor: EventCursor = field(factory=EventCursor)
    publisher_id: int | None = None
    """The publisher whose events count; None until one is known."""
    last_publisher_id: int | None = None
    """The publisher of the last event that arrived."""
    arrived: int = 0
    """How many events of the rank have arrived."""
    in_order: bool = False
    in_repair: bool = False
    is_doubted: bool = False
    """Whether the worker is to be queried again after the query that runs."""
    scope: anyio.CancelScope | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the worker needs no query."""
        return self.in_order and not self.foreign

    def receive(self, event: RouterEvent, publisher_id: int | None) -> bool:
        """Take in an event; return False if the worker must be queried first."""
        self.arrived += 1
        if publisher_id is not None:
            self.last_publisher_id = publisher_id
            if publisher_id != self.publisher_id:
                self.foreign.append(ForeignEvent(self.arrived, publisher_id, event))
                return False
        if self.in_order and self.take(event):
            return True
        self.in_order = False
        self.kept.append(event)
        return False

    def question(self) -> Question:
        """The query that the worker needs now."""
        last_publisher_id = self.last_publisher_id if self.foreign else self.publisher_id
        return Question(self.cursor.expected, self.arrived, last_publisher_id, self.in_order)

    def take(self, event: RouterEvent) -> bool:
        """Apply the next event, drop one that was taken before; return False if others are missing first."""
        event_id = event.event.event_id
        sight = self.cursor.sight(event_id)
        if sight is Sight.GAP or (sight is Sight.INITIAL and event_id > FIRST_EVENT_ID):
            return False
        if sight is not Sight.STALE:
            self._apply(event)
        return True

    def settle(self, reply: RecoveryReply | None, question: Question) -> bool:
        """Take in the answer; return False if it did not help. None is from a worker that keeps nothing.

        The publisher's own events are applied afterwards. If the worker could not answer, a rank in order stays as it
        is, and any other rank is forgotten.
        """
        if reply is None:
            self.believe_last_publisher()
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
        """Make the answer the rank's state; return False if nothing is known of the rank then."""
        if isinstance(answer, RecoveredTree):
            if self.in_order and answer.last_event_id < (self.cursor.expected or 0):
                return True  # what has arrived meanwhile was applied, and is newer
            self.forget()
            for event in self._own(answer.events):
                self._apply(event)
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

    def believe_last_publisher(self) -> None:
        """Decide without the worker: start over with the events of the last publisher, unless all is in order.

        Events of other publishers are dropped. If that is wrong, the next event of the publisher that is alive is
        foreign, and the worker is queried again.
        """
        if self.foreign and self.last_publisher_id != self.publisher_id:
            if self.publisher_id is not None:
                self.forget()
                self.kept.clear()
            self.publisher_id = self.last_publisher_id
            self._sort_foreign(self.arrived)
        self.foreign.clear()
        if not self.in_order:
            self.begin_with_kept()

    def take_kept(self) -> bool:
        """Take the kept events, in order; return False if some are missing before one, which is kept on."""
        waiting = sorted(self.kept, key=lambda event: event.event.event_id)
        taken = next((i for i, event in enumerate(waiting) if not self.take(event)), len(waiting))
        self.kept.clear()
        self.kept.extend(waiting[taken:])
        return taken == len(waiting)

    def begin_with_kept(self) -> None:
        """Start over with the kept events behind the last gap: what came before it cannot be recovered."""
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
        """Learn which publisher is alive; return True if the state was of another one, and is dropped."""
        living_id = question.last_publisher_id if named_id is None else named_id
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
        """The events of this rank: a worker may answer for all of its ranks."""
        return [e for e in events if (e.worker_id, e.event.dp_rank) == self.rank]

    def _apply(self, event: RouterEvent) -> None:
        kind = "unknown"
        try:
            kind = _KINDS[type(event.event.data)]
            status = self.index.apply(event).value
        except KvIndexError as error:
            status = error.status
            _log.debug("event %d of %s: %s", event.event.event_id, self.rank, error)
        except Exception:  # no worker may end the feed of the others
            status = "failed"
            _log.exception("event %d of %s makes no sense", event.event.event_id, self.rank)
        self.cursor = EventCursor(event.event.event_id)
        try:
            if self.counted is not None:
                self.counted(kind, status)
        except Exception:  # a failing counter does not end the feed
            _log.exception("an event of %s is not counted", self.rank)
