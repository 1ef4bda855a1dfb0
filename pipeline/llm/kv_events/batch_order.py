"""BatchOrder: the place of each of an engine's batches among those that were taken.

    sequence, payload ──► NEXT │ LATER: some are missing │ TAKEN │ LATE: given up before │ OTHER: the engine restarted

An engine counts its batches from 0, and from 0 again when it restarts. A payload has the time it was made at, so the
payloads of two batches differ even where their sequences are equal.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto

REMEMBERED_BATCHES = 2**14
"""More than an engine replays, so that every batch of a replay is known again when it comes live."""
_NOT_TAKEN = 0


class Place(Enum):
    """Where a batch stands."""

    NEXT = auto()
    LATER = auto()
    """Batches before it are missing."""
    TAKEN = auto()
    """It was taken before."""
    LATE = auto()
    """A later one was taken without it."""
    OTHER = auto()
    """Another batch was taken under its sequence, or so long ago that it cannot be the same."""


class BatchOrder:
    """See the module. `next_sequence` is one more than the last that was taken, and 0 at first."""

    def __init__(self, remembered_batches: int = REMEMBERED_BATCHES) -> None:
        self.next_sequence = 0
        self._digests = array("q", bytes(8 * remembered_batches))

    def place(self, sequence: int, payload: bytes) -> Place:
        """Return the place of a batch; changes nothing."""
        if sequence >= self.next_sequence:
            return Place.NEXT if sequence == self.next_sequence else Place.LATER
        if sequence < self.next_sequence - len(self._digests):
            return Place.OTHER
        taken = self._digests[sequence % len(self._digests)]
        if taken == _NOT_TAKEN:
            return Place.LATE
        return Place.TAKEN if taken == _digest(payload) else Place.OTHER

    def take(self, sequence: int, payload: bytes) -> None:
        """Note the next batch or a later one; those between are given up."""
        size = len(self._digests)
        for skipped in range(max(self.next_sequence, sequence - size), sequence):
            self._digests[skipped % size] = _NOT_TAKEN
        self._digests[sequence % size] = _digest(payload)
        self.next_sequence = sequence + 1


def _digest(payload: bytes) -> int:
    return hash(payload) or 1
