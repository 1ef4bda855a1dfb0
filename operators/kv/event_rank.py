"""RankFeed: one worker-rank's events on their way into the index: what is next, what waits, what an answer changes.

Plain calls, none of them waits; `event_feed` asks the workers and gives the answers here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import anyio
from attrs import define, field

from pipeline.protocols.kv_events import KvCleared, KvEventData, KvRemoved, KvStored, RouterEvent
from pipeline.protocols.kv_recovery import RecoveredEvents, RecoveredTree, RecoveryAnswer

from .event_cursor import EventCursor, Sight
from .index import KvIndex
from .index_errors import KvIndexError
from .worker_rank import WorkerRank

_log = logging.getLogger(__name__)

FIRST_EVENT_ID = 1

Counted = Callable[[str, str], object]
"""Hears of each event applied: what it was, and the label of how that went."""

_KINDS: dict[type[KvEventData], str] = {KvStored: "stored", KvRemoved: "removed", KvCleared: "cleared"}


@define(eq=False)
class RankFeed:
    """How far the rank was taken, and the events `kept` while it is under repair; a full deque loses its oldest.

    `scope` is that of the repair under way. What the publisher before this one said late is not heard.
    """

    rank: WorkerRank
    index: KvIndex
    counted: Counted
    kept: deque[RouterEvent]
    cursor: EventCursor = field(factory=EventCursor)
    publisher_id: int | None = None
    former_publisher_id: int | None = None
    in_repair: bool = False
    scope: anyio.CancelScope | None = None

    def take(self, event: RouterEvent) -> bool:
        """Applies the event if it is the next, drops it if it was taken before; False if others are missing first."""
        event_id = event.event.event_id
        sight = self.cursor.sight(event_id)
        if sight is Sight.GAP or (sight is Sight.INITIAL and event_id > FIRST_EVENT_ID):
            return False
        if sight is not Sight.STALE:
            self._apply(event)
        return True

    def install(self, answer: RecoveryAnswer) -> bool:
        """Makes what the worker answered the rank's state; if that says nothing, nothing is known of it: False."""
        if isinstance(answer, RecoveredTree):
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
        self.forget()
        return False

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

    def forget(self) -> None:
        """Nothing is known of the rank."""
        self.index.clear_rank(self.rank)
        self.cursor = EventCursor()

    def _is_fresh_clear(self, event: RouterEvent) -> bool:
        return isinstance(event.event.data, KvCleared) and self.cursor.sight(event.event.event_id) is not Sight.STALE

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
