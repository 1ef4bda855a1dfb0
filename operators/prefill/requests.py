"""The two requests that one becomes: for the prefill worker, and for the decode worker.

Source: dynamo lib/llm/src/kv_router/prefill_router.rs. Other than there the rank of the prefill is also set under its
own name, and the request that came in is left as it was.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from pipeline.protocols import (
    BootstrapInfo,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
)

from ..records import shallow_copy
from .output import PrefillOutput
from .worker import PrefillWorker


def prefill_request(
    request: PreprocessedRequest, worker: PrefillWorker, bootstrap: BootstrapInfo | None = None
) -> PreprocessedRequest:
    """Return the request for its first token only, to that worker; `bootstrap` is where decode meets it."""
    prefill = shallow_copy(request)
    prefill.stop_conditions = shallow_copy(request.stop_conditions)
    prefill.stop_conditions.max_tokens = 1
    if bootstrap is not None:
        prefill.bootstrap_info = bootstrap
    # Of the two names of its rank the second is the one a worker reads.
    named = {"prefill_worker_id": worker.worker_id, "prefill_dp_rank": worker.dp_rank, "dp_rank": worker.dp_rank}
    prefill.routing = _with(request.routing, named)
    return prefill


def decode_request(
    request: PreprocessedRequest,
    worker_id: int,
    handed: BootstrapInfo | PrefillOutput,
    constraints: RoutingConstraints | None,
    *,
    keeps_overlap: bool = False,
) -> PreprocessedRequest:
    """Return the request with what the prefill worker hands over: where decode meets it, or its output.

    The decode router goes neither by cached prefixes (unless `keeps_overlap`) nor by prompt work, and counts the blocks
    as new: they come by transfer.
    """
    decode = shallow_copy(request)
    decode.router_config_override = _override(request.router_config_override, keeps_overlap)
    if isinstance(handed, BootstrapInfo):
        decode.bootstrap_info = handed
    else:
        decode.prefill_result, decode.migration_link = handed.result, handed.link
    known: dict[str, Any] = {"prefill_worker_id": worker_id}
    if constraints is not None and not constraints.is_empty:
        own = None if request.routing is None else request.routing.routing_constraints
        known["routing_constraints"] = merged(own, constraints)
    decode.routing = _with(request.routing, known)
    return decode


def merged(own: RoutingConstraints | None, topology: RoutingConstraints) -> RoutingConstraints:
    """Return both together; the topology's weight counts where both have one for the same taint."""
    own = own or RoutingConstraints()
    return RoutingConstraints(
        own.required_taints | topology.required_taints, {**own.preferred_taints, **topology.preferred_taints}
    )


def _with(own: RoutingHints | None, known: dict[str, Any]) -> RoutingHints:
    if own is None:
        return RoutingHints(**known)
    hints = shallow_copy(own)
    for name, value in known.items():
        setattr(hints, name, value)
    return hints


def _override(own: RouterConfigOverride | None, keeps_overlap: bool) -> RouterConfigOverride:
    """Return the request's own settings for the router, with those that a transfer of blocks needs."""
    needed: dict[str, Any] = {"assume_kv_reuse": False, "track_prefill_tokens": False}
    if not keeps_overlap:
        needed["overlap_score_credit"] = 0.0
    return RouterConfigOverride(**needed) if own is None else evolve(own, **needed)
