"""Plan: everything about a prefill that is decided before it is sent.

The two requests that one becomes: for the prefill worker, and for the decode worker. Functions of values.

Source: dynamo lib/llm/src/kv_router/prefill_router.rs. Other than there the rank of the prefill is also said under its
own name, and the request that came in is left as it was.
"""

from __future__ import annotations

from random import Random
from typing import Any

from attrs import evolve, frozen

from pipeline import Context, InvalidArgument
from pipeline.protocols import (
    BootstrapInfo,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
)

from ..records import copied
from .errors import backpressure
from .pool import Configs, PrefillPool
from .resolve import (
    Backpressure,
    NoBootstrapEndpoint,
    PrefillWorker,
    Resolved,
    merged,
    named_worker,
    new_meeting,
    resolve,
    transfer_constraints,
)
from .transfer import Prefilled


def prefill_request(
    request: PreprocessedRequest, worker: PrefillWorker | None = None, meeting: BootstrapInfo | None = None
) -> PreprocessedRequest:
    """The request for its first token only; to that worker and meeting, where they are known."""
    asked = copied(request)
    asked.stop_conditions = copied(request.stop_conditions)
    asked.stop_conditions.max_tokens = 1
    if meeting is not None:
        asked.bootstrap_info = meeting
    if worker is not None:  # of the two names of its rank the second is the one a worker reads
        named = {"prefill_worker_id": worker.worker_id, "prefill_dp_rank": worker.dp_rank, "dp_rank": worker.dp_rank}
        asked.routing = _with(request.routing, named)
    return asked


def decode_request(
    request: PreprocessedRequest,
    worker_id: int | None,
    handed: BootstrapInfo | Prefilled,
    constraints: RoutingConstraints | None,
    *,
    keeps_overlap: bool = False,
) -> PreprocessedRequest:
    """The request with what prefill hands over, that being a meeting or a result.

    The decode router is told to go neither by cached prefixes (unless `keeps_overlap`) nor by prompt work, and to count
    the blocks as new: they come by transfer.
    """
    asked = copied(request)
    asked.router_config_override = _override(request.router_config_override, keeps_overlap)
    if isinstance(handed, BootstrapInfo):
        asked.bootstrap_info = handed
    else:
        asked.prefill_result, asked.migration_link = handed.result, handed.link
    known: dict[str, Any] = {} if worker_id is None else {"prefill_worker_id": worker_id}
    if constraints is not None and not constraints.is_empty:
        own = None if request.routing is None else request.routing.routing_constraints
        known["routing_constraints"] = merged(own, constraints)
    if known:
        asked.routing = _with(request.routing, known)
    return asked


def _with(own: RoutingHints | None, known: dict[str, Any]) -> RoutingHints:
    if own is None:
        return RoutingHints(**known)
    hints = copied(own)
    for name, value in known.items():
        setattr(hints, name, value)
    return hints


def _override(own: RouterConfigOverride | None, keeps_overlap: bool) -> RouterConfigOverride:
    """The request's own settings for the router, with those that a transfer of blocks needs."""
    needed: dict[str, Any] = {"assume_kv_reuse": False, "track_prefill_tokens": False}
    if not keeps_overlap:
        needed["overlap_score_credit"] = 0.0
    return RouterConfigOverride(**needed) if own is None else evolve(own, **needed)


@frozen
class Plan:
    """The prefill's request; its worker, and where decode meets it, where they are known; what decode must keep to."""

    prefill: PreprocessedRequest
    worker: PrefillWorker | None = None
    meeting: BootstrapInfo | None = None
    constraints: RoutingConstraints | None = None
    was_chosen: bool = False
    """Whether the worker is our choice, not the caller's."""


def make_plan(
    request: Context[PreprocessedRequest], pool: PrefillPool, is_activated: bool, configs: Configs, rng: Random
) -> Plan:
    """Decides; of the pool, only whose turn it is may change, once, and only if nothing is raised.

    Where it cannot be said who prefills, the prefill router will say. Raises ResourceExhausted, TopologyError, and
    InvalidArgument for a request that has to name its worker and does not.
    """
    payload = request.payload
    named = named_worker(payload.routing)
    if pool.is_direct and named is None:
        raise InvalidArgument(
            "in direct mode a request names its prefill worker: whoever routes from outside sets prefill_worker_id "
            "(header x-dynamo-prefill-instance-id, formerly x-prefill-instance-id), and this request has none",
            field="routing.prefill_worker_id",
        )
    found = pool.find(request) if named is None else None
    resolution = resolve(is_activated, named, found, configs)
    if isinstance(resolution, Backpressure):
        raise backpressure(resolution.refusal)
    if not isinstance(resolution, Resolved | NoBootstrapEndpoint):
        return Plan(prefill_request(payload), constraints=transfer_constraints(configs, None))
    worker = resolution.worker
    constraints = transfer_constraints(configs, worker.worker_id)
    if named is None:
        pool.take(request)
    meeting = None
    if isinstance(resolution, Resolved):
        meeting = new_meeting(resolution.host, resolution.port, worker.dp_rank, resolution.dp_size, rng)
    return Plan(prefill_request(payload, worker, meeting), worker, meeting, constraints, was_chosen=named is None)
