"""PrefillWorker: a worker that prefills a request, and the one a request names itself."""

from __future__ import annotations

from attrs import frozen

from pipeline.protocols import RoutingHints


@frozen
class PrefillWorker:
    """A prefill worker and its rank."""

    worker_id: int
    dp_rank: int | None = None
    """None where the worker itself decides."""


def named_worker(hints: RoutingHints | None) -> PrefillWorker | None:
    """Return the worker a request names for its prefill, with the rank it names for that, else for all phases."""
    if hints is None or hints.prefill_worker_id is None:
        return None
    rank = hints.dp_rank if hints.prefill_dp_rank is None else hints.prefill_dp_rank
    return PrefillWorker(hints.prefill_worker_id, rank)
