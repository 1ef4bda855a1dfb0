"""Rooms: which ranks each waiting request may use and which are free, as bits, so that one look compares two numbers.

    pool ──► Rooms: a bit for each rank ──────────► wanted(request)            once for each request and pool
    prompt tokens in flight ──────────────────────► free(class)                once for each look at the queue

A request may go where `wanted & free` is not 0: exactly where `PolicyClass.all_busy` is False for its ranks. A queue of
many partitions is looked at after each change of load, and nearly always none of its requests may go: 2,000 of them
with a choice of their own among 256 workers take 15 µs a look, and took 14 ms and more rank by rank
(`benchmarks.kv_queue`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field

from pipeline import PenstockError

from ..eligibility import WorkerPool
from ..load import Column
from ..request import RouteRequest
from ..types import WorkerRank
from .policy import PolicyClass

REFUSED = 1
"""Wanted by requests that no rank may take: it is always free, because placing them raises what is wrong."""


class Rooms:
    """The ranks of one pool of workers. Make another one for another pool."""

    def __init__(self, pool: WorkerPool, classes: Sequence[PolicyClass]) -> None:
        self.ranks = tuple(WorkerRank(worker_id, rank) for worker_id, ranks in pool.ranks.items() for rank in ranks)
        self.pool = pool
        self._bits = {rank: 2 << position for position, rank in enumerate(self.ranks)}
        batched = [pool.configs[rank.worker_id].max_num_batched_tokens for rank in self.ranks]
        self._busy_above = [[one.busy_above(tokens) for tokens in batched] for one in classes]
        self._last: tuple[Sequence[WorkerRank], int] = (), 0

    def wanted(self, request: RouteRequest) -> int:
        """The ranks that may take the request; REFUSED if none may."""
        try:
            ranks = self.pool.candidates(request.rules(self.pool)).ranks
        except PenstockError:
            return REFUSED
        if ranks is not self._last[0]:  # those without rules of their own share one tuple
            bits = self._bits
            self._last = ranks, sum(bits[rank] for rank in ranks)
        return self._last[1]

    def free(self, class_index: int, prefill_tokens: Column) -> int:
        """The ranks that are not busy for a class with these prompt tokens in flight, and REFUSED."""
        free = REFUSED
        rows = zip(self._bits.values(), prefill_tokens, self._busy_above[class_index], strict=True)
        for bit, tokens, limit in rows:
            if tokens <= limit:
                free |= bit
        return free


@define
class Blocked:
    """No request could go at the last look: the ranks wanted by all that wait, by class, and the queue's version then.

    Until one of these ranks is free, or the queue or the pool has changed, the next look would find the same.
    """

    rooms: Rooms
    version: int
    wanted: dict[int, int] = field(factory=dict)

    def add(self, class_index: int, wanted: int) -> None:
        """Add a request that waits."""
        self.wanted[class_index] = self.wanted.get(class_index, 0) | wanted

    def lasts(self, rooms: Rooms, free: Mapping[int, int], version: int) -> bool:
        """Whether this is still so; `free` are the ranks that are free now for each class in which something waits."""
        if self.rooms is not rooms or self.version != version:
            return False
        return not any(self.wanted.get(class_index, 0) & ranks for class_index, ranks in free.items())
