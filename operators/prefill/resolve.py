"""Resolve: who prefills a request and how its blocks get to decode, decided before anything is done.

    not activated ──► NotActivated
    nobody found: refused ──► Backpressure, else ──► Unavailable
    found: no rendezvous ──► NoBootstrapEndpoint, else ──► Resolved

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, resolve_prefill_worker. Other than there every refusal for lack
of room is backpressure, also that of a plain pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import frozen

from pipeline import PenstockError, ResourceExhausted
from pipeline.protocols import RoutingHints
from pipeline.protocols.runtime_config import ModelRuntimeConfig

from .bootstrap import bootstrap_endpoint


@frozen
class PrefillWorker:
    """A worker, and its rank where that is decided."""

    worker_id: int
    dp_rank: int | None = None


@frozen
class NotActivated:
    """There is no prefill pool to ask."""


@frozen
class Backpressure:
    """Somebody could, but nobody has room: the request is refused, it does not fall back."""

    refusal: ResourceExhausted


@frozen
class Unavailable:
    """It cannot be said beforehand who prefills; the prefill router may still find somebody."""


@frozen
class NoBootstrapEndpoint:
    """It is known who prefills; decode has to wait for the result."""

    worker: PrefillWorker


@frozen
class Resolved:
    """It is known who prefills and where decode meets it, so both may begin at once."""

    worker: PrefillWorker
    host: str
    port: int
    dp_size: int


Resolution: TypeAlias = NotActivated | Backpressure | Unavailable | NoBootstrapEndpoint | Resolved
Found: TypeAlias = PrefillWorker | PenstockError | None
"""Whom the pool would take, or why it takes nobody; None where it cannot say."""


def resolve(
    is_activated: bool, named: PrefillWorker | None, found: Found, configs: Mapping[int, ModelRuntimeConfig]
) -> Resolution:
    """The first that holds, from left to right: see the module. A worker the request names needs no finding.

    A pool that was deactivated since the request came is asked all the same, and finds nobody.
    """
    if not is_activated:
        return NotActivated()
    worker = found if named is None else named
    if isinstance(worker, ResourceExhausted):
        return Backpressure(worker)
    if not isinstance(worker, PrefillWorker):
        return Unavailable()
    config = configs.get(worker.worker_id)
    endpoint = bootstrap_endpoint(config)
    if config is None or endpoint is None:
        return NoBootstrapEndpoint(worker)
    return Resolved(worker, *endpoint, config.data_parallel_size)


def named_worker(hints: RoutingHints | None) -> PrefillWorker | None:
    """The worker a request names for its prefill, with the rank it names for that, else for all."""
    if hints is None or hints.prefill_worker_id is None:
        return None
    rank = hints.dp_rank if hints.prefill_dp_rank is None else hints.prefill_dp_rank
    return PrefillWorker(hints.prefill_worker_id, rank)
