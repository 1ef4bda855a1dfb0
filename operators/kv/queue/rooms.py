"""Rooms: which ranks each waiting request may use and which are free, as bits, so that one look compares two numbers.

    pool, adapters ──► Rooms: a bit for each rank ──► wanted(request)          once for each request and pool
    prompt tokens in flight ──────────────────────► free(class)                once for each look at the queue

A request may go where `wanted & free` is not 0: exactly where `PolicyClass.all_busy` is False for its ranks. A queue of
many partitions is looked at after each change of load, and nearly always none of its requests may go: 2,000 of them
with a choice of their own among 256 workers take 15 µs a look, and took 14 ms and more rank by rank
(`benchmarks.kv_queue`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from pipeline import PenstockError

from ...pool import Adapters
from ..eligibility import WorkerPool
from ..load import Column
from ..request import RouteRequest
from ..types import WorkerRank
from .policy import PolicyClass

REFUSED = 1
"""Wanted by requests that no rank may take: it is always free, because placing them raises what is wrong."""


class Rooms:
    """The ranks of one pool of workers. Make another one when the pool or the adapters are others."""

    def __init__(self, pool: WorkerPool, adapters: Adapters, classes: Sequence[PolicyClass]) -> None:
        self.ranks = tuple(WorkerRank(worker_id, rank) for worker_id, ranks in pool.ranks.items() for rank in ranks)
        self._pool, self._adapters = pool, adapters
        self._bits = {rank: 2 << position for position, rank in enumerate(self.ranks)}
        batched = [pool.configs[rank.worker_id].max_num_batched_tokens for rank in self.ranks]
        self._busy_above = [[one.busy_above(tokens) for tokens in batched] for one in classes]
        self._last: tuple[Sequence[WorkerRank], int] = (), 0

    def is_of(self, pool: WorkerPool, adapters: Adapters) -> bool:
        """Whether it was made for these."""
        return self._pool is pool and self._adapters is adapters

    def wanted(self, request: RouteRequest) -> int:
        """The ranks that may take the request; REFUSED if none may."""
        try:
            ranks = self._pool.candidates(request.rules(self._pool, self._adapters)).ranks
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


@frozen
class Room:
    """The ranks that are free at one moment, for each class of interest."""

    rooms: Rooms
    free: Mapping[int, int]


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

    def lasts(self, room: Room, version: int) -> bool:
        """Whether this is still so."""
        if self.rooms is not room.rooms or self.version != version:
            return False
        return not any(self.wanted.get(class_index, 0) & free for class_index, free in room.free.items())
