"""Plan: how the KV blocks of a prefill get to decode, and the two requests that one becomes.

    worker, its settings ──► topology: which decode workers its blocks can reach ──► bootstrap: where decode meets it
                         ──► prefill_request ──► its output or meeting point ──► decode_request

Decided once the prefill worker is reserved and before the prefill is sent.

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, resolve_prefill_worker; execution.rs, generate_bootstrap_room;
lib/llm/src/discovery/model_manager.rs, get_kv_transfer_routing_constraints. Other than there the worker is reserved
before, so that it is chosen once, every refusal for lack of room is backpressure, also that of a plain pool, the rank
of the prefill is also set under its own name, and the request that came in is left as it was.
"""

from __future__ import annotations

from random import Random
from typing import Any, TypeGuard
from uuid import UUID

from attrs import evolve, frozen

from pipeline.protocols import (
    BootstrapInfo,
    PrefillResult,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
)
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig, topology_taint

from ..pool import Configs
from ..records import shallow_copy
from .errors import TopologyError
from .output import PrefillOutput
from .pool import PrefillWorker

ROOM_BITS = 63
ROOM_MAX = 2**ROOM_BITS - 1
_PORT_MAX = 2**16 - 1
_U64_MAX = 2**64 - 1


@frozen
class Plan:
    """What is decided about a prefill before it is sent."""

    request: PreprocessedRequest
    """The prefill's request."""
    worker: PrefillWorker
    bootstrap: BootstrapInfo | None = None
    """Where decode meets the prefill worker; None if decode waits for its output instead."""
    constraints: RoutingConstraints | None = None
    """What the decode router must keep to."""
    stops_prefills: bool = False
    """Whether the worker may be sent a stop for a prefill it has."""


def resolve(request: PreprocessedRequest, worker: PrefillWorker, configs: Configs, rng: Random) -> Plan:
    """Return the plan for a prefill on that worker. Raise TopologyError if decode's constraints cannot be derived."""
    constraints = transfer_constraints(configs, worker.worker_id)
    config, bootstrap = configs.get(worker.worker_id), None
    if config is not None and (endpoint := bootstrap_endpoint(config)) is not None:
        room = bootstrap_room(worker.dp_rank, config.data_parallel_size, rng.getrandbits(ROOM_BITS))
        bootstrap = BootstrapInfo(*endpoint, room, UUID(int=rng.getrandbits(128), version=4))
    stops_prefills = config is not None and config.stops_prefills
    return Plan(prefill_request(request, worker, bootstrap), worker, bootstrap, constraints, stops_prefills)


# -- bootstrap


def bootstrap_room(dp_rank: int | None, dp_size: int | None, draw: int) -> int:
    """Return the room for a number drawn from 0 to ROOM_MAX.

    Where rank and size are known, room modulo size is the rank: engines find the rank that way. Never above ROOM_MAX.
    """
    if dp_rank is None or not dp_size:
        return draw
    rooms_of_rank = (ROOM_MAX - dp_rank) // dp_size + 1
    room: int = draw % rooms_of_rank * dp_size + dp_rank
    return room


def bootstrap_endpoint(config: ModelRuntimeConfig | None) -> tuple[str, int] | None:
    """Return host and port where that worker waits for decode; None unless its settings have both."""
    endpoint = config.disaggregated_endpoint if config is not None else None
    if not isinstance(endpoint, DisaggregatedEndpoint) or not endpoint.bootstrap_host:
        return None
    return None if endpoint.bootstrap_port is None else (endpoint.bootstrap_host, endpoint.bootstrap_port)


def bootstrap_from_params(params: Any) -> BootstrapInfo | None:
    """Return the meeting point in a prefill worker's parameters, if they have all of it."""
    if not isinstance(params, dict):
        return None
    host, port, room = params.get("bootstrap_host"), params.get("bootstrap_port"), params.get("bootstrap_room")
    if isinstance(host, str) and _is_up_to(port, _PORT_MAX) and _is_up_to(room, _U64_MAX):
        return BootstrapInfo(host, port, room)
    return None


def _is_up_to(value: Any, limit: int) -> TypeGuard[int]:
    """Whether it is a whole number from 0 to the limit."""
    return type(value) is int and 0 <= value <= limit


# -- topology


def transfer_constraints(configs: Configs, worker_id: int) -> RoutingConstraints | None:
    """Return what decode must keep to for blocks of that worker; None if nothing.

    Raise TopologyError if the worker's own settings are incomplete, and, if it has none, where the settings of any
    worker require its domain.
    """
    config = configs.get(worker_id)
    if config is not None:
        return _of_worker(config)
    if any(one.kv_transfer_enforcement == "required" for one in configs.values()):
        raise TopologyError(
            f"worker {worker_id} has published no settings, so the required KV transfer constraints cannot be derived"
        )
    return None


def _of_worker(config: ModelRuntimeConfig) -> RoutingConstraints | None:
    domain = config.kv_transfer_domain
    if domain is None:
        return None
    if (value := config.topology_domains.get(domain)) is None:
        raise TopologyError(f"KV transfer domain {domain!r} is configured but is not among the worker's domains")
    taint, weight = topology_taint(domain, value), config.kv_transfer_preferred_weight
    if config.kv_transfer_enforcement == "required":
        return RoutingConstraints(required_taints={taint})
    if config.kv_transfer_enforcement is None:
        raise TopologyError(f"KV transfer domain {domain!r} has no enforcement")
    if weight is None:
        raise TopologyError(f"KV transfer domain {domain!r} is preferred, by no weight")
    return RoutingConstraints(preferred_taints={taint: weight})


# -- the requests of both halves


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
        decode.prefill_result = PrefillResult(handed.params, handed.details)
        decode.migration_link = handed.link
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
