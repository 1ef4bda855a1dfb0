"""EventCursor: how far the events of one worker-rank were taken, and what the next one's id says."""

from __future__ import annotations

from enum import Enum

from attrs import frozen


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
