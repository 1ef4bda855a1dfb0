"""PredictedIndex: which worker-rank should hold which prompts, because they were sent there, for a limited time.

    record(rank, prompt) ──► held for ttl_s, renewed by the next prompt with the same beginning ──► evicted

For engines that publish no events; and as prediction beside an event-fed index, for the time until the events arrive.
What a rank held before and what it evicts is unknown: the time limit estimates both.

Source: dynamo lib/kv-router/src/approx.rs and indexer/pruning.rs. Other than there, a prompt is recorded under the
same hashes by which it was looked up, adapter and media included.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from pipeline import InvalidArgument

from ..numbers import Matches, RankNumbers
from ..types import WorkerRank
from .block_run import IndexerDroppedRequest
from .prefix_index import KvIndex

TTL_S = 120.0
STEP_S = 0.1
"""Expiry times are rounded up to this, so a block may stay that much longer."""
LIMIT_BLOCKS, PRUNED_SHARE = 2**20, 0.8


class PredictedIndex:
    """See the module. The caller passes the time: seconds that do not go back. `held_blocks` is the sum of all ranks.

    Over `limit_blocks`, of all ranks together, the prompts that would expire first are evicted, until `pruned_share` of
    the limit is left.
    """

    def __init__(
        self,
        ttl_s: float = TTL_S,
        *,
        limit_blocks: int = LIMIT_BLOCKS,
        pruned_share: float = PRUNED_SHARE,
        numbers: RankNumbers | None = None,
    ) -> None:
        if not (math.isfinite(ttl_s) and ttl_s >= 0):
            raise InvalidArgument(f"must be a finite number not below 0, got {ttl_s}", field="ttl_s")
        if not 0 <= pruned_share <= 1:
            raise InvalidArgument(f"must be from 0 to 1, got {pruned_share}", field="pruned_share")
        self._ttl_s, self._limit_blocks, self._pruned_share = ttl_s, limit_blocks, pruned_share
        self.held_blocks = 0
        self._index = KvIndex(moves=False, numbers=numbers)
        # The last block of each prompt and the step at which it expires, in that order. That is enough: a block stays
        # as long as some prompt that goes through it.
        self._ends: OrderedDict[tuple[WorkerRank, int], int] = OrderedDict()

    def record(
        self, rank: WorkerRank, local_hashes: Sequence[int], sequence_hashes: Sequence[int], now_s: float
    ) -> None:
        """Record that a prompt of these blocks was sent to the rank.

        Raises IndexerDroppedRequest for lists of different lengths, and as `KvIndex.store`: InvalidBlockSequence also
        for a sequence hash that stood for other blocks before.
        """
        if len(local_hashes) != len(sequence_hashes):
            lengths = f"{len(local_hashes)} local and {len(sequence_hashes)} sequence hashes"
            raise IndexerDroppedRequest(f"Indexer dropped the request: {lengths}")
        self.expire(now_s)
        if not sequence_hashes or self._ttl_s == 0:
            return
        before = self._index.held_blocks(rank)
        self._index.store(rank, None, sequence_hashes, local_hashes)
        self.held_blocks += self._index.held_blocks(rank) - before
        end = rank, sequence_hashes[-1]
        self._ends[end] = max(math.ceil(_steps(now_s + self._ttl_s)), self._ends.get(end, 0))
        self._ends.move_to_end(end)
        self._prune()

    def find_matches(self, local_hashes: Sequence[int], now_s: float) -> Matches:
        """`KvIndex.find_matches`, of what has not expired by now."""
        self.expire(now_s)
        return self._index.find_matches(local_hashes)

    def blocks_of(self, rank: WorkerRank) -> int:
        """The number of blocks that the rank should hold, of what was not evicted yet."""
        return self._index.held_blocks(rank)

    def expire(self, now_s: float) -> None:
        """Evict entries past their TTL."""
        now = _steps(now_s)
        while self._ends and next(iter(self._ends.values())) <= now:
            self._evict_first()

    def remove_rank(self, rank: WorkerRank) -> None:
        """Remove the rank and everything that was sent to it."""
        self.held_blocks -= self._index.held_blocks(rank)
        self._index.remove_rank(rank)
        self._ends = OrderedDict((end, step) for end, step in self._ends.items() if end[0] != rank)

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of the worker."""
        for rank in [rank for rank in self._index.ranks() if rank.worker_id == worker_id]:
            self.remove_rank(rank)

    def _evict_first(self) -> None:
        """Evict the oldest prompt: its last blocks, back to where another one continues or ends."""
        (rank, name), _ = self._ends.popitem(last=False)
        before = self._index.held_blocks(rank)
        self._index.remove_end(rank, name, lambda other: (rank, other) in self._ends)
        self.held_blocks -= before - self._index.held_blocks(rank)

    def _prune(self) -> None:
        if self.held_blocks > self._limit_blocks:
            while self._ends and self.held_blocks > self._pruned_share * self._limit_blocks:
                self._evict_first()


def _steps(time_s: float) -> float:
    """The time in steps; without the rounding 0.3 s would be a little less than three."""
    return round(time_s / STEP_S, 6)
