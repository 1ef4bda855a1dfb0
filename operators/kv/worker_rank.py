"""WorkerRank: the unit of caching, load and selection."""

from __future__ import annotations

from typing import NamedTuple


class WorkerRank(NamedTuple):
    """A data-parallel rank of a worker; sorts by worker, then rank, and equals the plain pair."""

    worker_id: int
    dp_rank: int = 0
