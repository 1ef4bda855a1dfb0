"""How the KV blocks of a prefill get to decode, decided once the prefill worker is known and before it is sent to.

    worker, its settings ──► topology: which decode workers its blocks can reach ──► bootstrap: where decode meets it

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, resolve_prefill_worker; execution.rs, generate_bootstrap_room;
lib/llm/src/discovery/model_manager.rs, get_kv_transfer_routing_constraints. Other than there the worker is reserved
before, so that it is chosen once, and every refusal for lack of room is backpressure, also that of a plain pool.
"""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from attrs import frozen

from pipeline.protocols import BootstrapInfo, PreprocessedRequest, RoutingConstraints
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig, topology_taint

from ..pool import Configs
from .errors import TopologyError
from .requests import prefill_request
from .worker import PrefillWorker

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


def resolve(request: PreprocessedRequest, worker: PrefillWorker, configs: Configs, rng: Random) -> Plan:
    """Return the plan for a prefill on that worker. Raise TopologyError if decode's constraints cannot be derived."""
    constraints = transfer_constraints(configs, worker.worker_id)
    config = configs.get(worker.worker_id)
    endpoint = bootstrap_endpoint(config)
    bootstrap = None
    if config is not None and endpoint is not None:
        bootstrap = new_bootstrap(*endpoint, worker.dp_rank, config.data_parallel_size, rng)
    return Plan(prefill_request(request, worker, bootstrap), worker, bootstrap, constraints)


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


def new_bootstrap(host: str, port: int, dp_rank: int | None, dp_size: int | None, rng: Random) -> BootstrapInfo:
    """Return a meeting point for one request only."""
    room = bootstrap_room(dp_rank, dp_size, rng.getrandbits(ROOM_BITS))
    return BootstrapInfo(host, port, room, UUID(int=rng.getrandbits(128), version=4))


def bootstrap_from_params(params: Any) -> BootstrapInfo | None:
    """Return the meeting point in a prefill worker's parameters, if they have all of it."""
    if not isinstance(params, dict):
        return None
    found: list[Any] = [params.get(f"bootstrap_{part}") for part in ("host", "port", "room")]
    host, port, room = found
    if isinstance(host, str) and _is_up_to(port, _PORT_MAX) and _is_up_to(room, _U64_MAX):
        return BootstrapInfo(host, port, room)
    return None


def _is_up_to(value: Any, limit: int) -> bool:
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
