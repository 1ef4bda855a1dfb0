"""EventLog: what a worker keeps of one rank's events, to answer a router that missed some.

    change ──record──► RouterEvent with the next id ──► published, and kept: the last 1,024
                                                              │
    recover(start, end) ◄── the events from start on, or the whole index as it is now

Source: dynamo lib/kv-router/src/indexer/local.rs, LocalKvIndexer. Other than there, the log gives the ids itself, so it
cannot have a gap, and a question waits for nothing: one task asks after the other, and the second finds the dump.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from pipeline import InvalidArgument
from pipeline.protocols.kv_events import KvCleared, KvEvent, KvEventData, RouterEvent, StorageTier
from pipeline.protocols.kv_recovery import (
    DumpFailed,
    InvalidRange,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    TooNew,
)

from .index import KvIndex
from .index_errors import KvIndexError
from .worker_rank import WorkerRank

KEPT_EVENTS = 1024


class EventLog:
    """See the module. Ids count from `first_id`; `newest` is one less until something is recorded. Waits for nothing.

    `index` holds what the events say; ranks of a worker may share one.
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
        """The change as the next event, to be published; what the index refuses of it is published all the same."""
        event = RouterEvent(self.rank.worker_id, KvEvent(self.newest + 1, change, self.rank.dp_rank), storage_tier)
        with suppress(KvIndexError):  # routers refuse the same part of it
            self.index.apply(event)
        self.newest += 1
        self._kept.append(event)
        if isinstance(change, KvCleared) or (self._dumped is not None and self._is_old(self._dumped)):
            self._dumped = None
        return event

    def recover(self, start: int | None = None, end: int | None = None) -> RecoveryAnswer:
        """What brings a router that needs the events from `start` on up to date; without a start, everything.

        The answer goes to the newest event whatever the end is.
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
        """The dump made last, with the events since, while these are few; else a new one."""
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
