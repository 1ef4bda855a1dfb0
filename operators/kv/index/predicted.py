"""PredictedIndex: which worker-rank should hold which prompts, because they were sent there, for a limited time.

    record(rank, prompt) ──► held for ttl_s, renewed by the next prompt with the same beginning ──► evicted

For engines that publish no events; and as prediction beside an event-fed index, for the time until the events arrive.
What a rank held before and what it evicts is unknown: the time limit estimates both.

A prompt is one entry of a tree, with one time for all its blocks. A block stays as long as some prompt goes through it.

Source: dynamo lib/kv-router/src/approx.rs and indexer/pruning.rs. Other than there, a prompt is recorded under the
same hashes by which it was looked up, adapter and media included.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from pipeline import InvalidArgument

from ..hash_arrays import Hashes, as_hashes
from ..numbers import Matches, RankNumbers
from ..prefix_tree import PrefixPart, PrefixTree
from ..types import WorkerRank

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
        self._numbers = RankNumbers() if numbers is None else numbers
        self._tree = PrefixTree()
        self._ranks: dict[WorkerRank, int] = {}
        """The number of each rank that anything was sent to since it was removed."""
        self._blocks: dict[int, int] = {}
        """The blocks each should hold, by number."""
        self._ends: OrderedDict[tuple[int, PrefixPart], int] = OrderedDict()
        """The step at which each prompt of a rank expires, by the rank's number and the prompt's end, in that order."""
        self._first_step = math.inf
        """Nothing expires before this step."""

    def record(self, rank: WorkerRank, local_hashes: Sequence[int], now_s: float) -> None:
        """Record that a prompt of these blocks was sent to the rank.

        Raises InvalidArgument for a hash that is not a u64.
        """
        self.expire(now_s)
        if not len(local_hashes) or self._ttl_s == 0:
            return
        prompt = _checked(local_hashes)
        if (number := self._ranks.get(rank)) is None:
            number = self._ranks[rank] = self._numbers.hold(rank)
            self._blocks[number] = 0
        step = math.ceil(_steps(now_s + self._ttl_s))
        known = self._tree.end_of(prompt)
        if known is not None and (before := self._ends.get((number, known))) is not None:
            end = number, known
            step = max(step, before)
        else:
            part, added = self._tree.hold(number, prompt)
            end = number, part
            self.held_blocks += added
            self._blocks[number] += added
        self._ends[end] = step
        self._ends.move_to_end(end)
        self._first_step = min(step, self._first_step)
        if self.held_blocks > self._limit_blocks:
            self._prune()

    def find_matches(self, local_hashes: Sequence[int], now_s: float) -> Matches:
        """How many blocks of the prompt each rank should hold, of what has not expired by now; without those that hold
        none. Raises InvalidArgument for a hash that is not a u64."""
        self.expire(now_s)
        return Matches(self._tree.find(_checked(local_hashes)), self._numbers.ranks)

    def blocks_of(self, rank: WorkerRank) -> int:
        """The number of blocks that the rank should hold, of what was not evicted yet. May be called in any thread."""
        number = self._ranks.get(rank)
        return 0 if number is None else self._blocks.get(number, 0)

    def expire(self, now_s: float) -> None:
        """Evict entries past their TTL."""
        if (now := _steps(now_s)) < self._first_step:
            return
        while self._ends and next(iter(self._ends.values())) <= now:
            self._evict_first()
        self._first_step = next(iter(self._ends.values()), math.inf)

    def remove_rank(self, rank: WorkerRank) -> None:
        """Remove the rank and everything that was sent to it."""
        if (number := self._ranks.pop(rank, None)) is None:
            return
        for end in [end for end in self._ends if end[0] == number]:
            self._evict(end)
        del self._blocks[number]
        self._numbers.let_go(number)

    def remove_worker(self, worker_id: int) -> None:
        """Remove all ranks of the worker."""
        for rank in [rank for rank in self._ranks if rank.worker_id == worker_id]:
            self.remove_rank(rank)

    def _evict_first(self) -> None:
        """Evict the oldest prompt: its last blocks, back to where another one continues or ends."""
        self._evict(next(iter(self._ends)))

    def _evict(self, end: tuple[int, PrefixPart]) -> None:
        number, part = end
        del self._ends[end]
        gone = self._tree.let_go(number, part)
        self.held_blocks -= gone
        self._blocks[number] -= gone

    def _prune(self) -> None:
        while self._ends and self.held_blocks > self._pruned_share * self._limit_blocks:
            self._evict_first()


def _steps(time_s: float) -> float:
    """The time in steps; without the rounding 0.3 s would be a little less than three."""
    return round(time_s / STEP_S, 6)


def _checked(local_hashes: Sequence[int]) -> Hashes:
    try:
        return as_hashes(local_hashes)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error
