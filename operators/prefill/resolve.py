"""Resolve: who prefills a request and how its blocks get to decode, decided before anything is done.

    not activated ──► NotActivated
    nobody found: refused ──► Backpressure, else ──► Unavailable
    found: no rendezvous ──► NoBootstrapEndpoint, else ──► Resolved

Source: dynamo lib/llm/src/kv_router/prefill_router.rs, resolve_prefill_worker. Other than there every refusal for lack
of room is backpressure, also that of a plain pool.

Where decode meets prefill: the rendezvous a router chooses, or one that a prefill worker has told.

Source: dynamo lib/llm/src/kv_router/prefill_router/execution.rs, generate_bootstrap_room.

Which decode workers the blocks of a prefill worker can reach, as constraints for the decode router.

Source: dynamo lib/llm/src/discovery/model_manager.rs, get_kv_transfer_routing_constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, TypeAlias
from uuid import UUID

from attrs import frozen

from pipeline import PenstockError, ResourceExhausted
from pipeline.protocols import BootstrapInfo, RoutingConstraints, RoutingHints
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig, topology_taint

from .errors import TopologyError

ROOM_BITS = 63
ROOM_MAX = 2**ROOM_BITS - 1
_PORT_MAX = 2**16 - 1
_U64_MAX = 2**64 - 1


def bootstrap_room(dp_rank: int | None, dp_size: int | None, draw: int) -> int:
    """The room for a number drawn from 0 to ROOM_MAX.

    Where rank and size are known, room modulo size is the rank: engines find the rank that way. Never above ROOM_MAX.
    """
    if dp_rank is None or not dp_size:
        return draw
    rooms_of_rank = (ROOM_MAX - dp_rank) // dp_size + 1
    room: int = draw % rooms_of_rank * dp_size + dp_rank
    return room


def bootstrap_endpoint(config: ModelRuntimeConfig | None) -> tuple[str, int] | None:
    """Host and port where that worker waits for decode; None if it does not say both."""
    endpoint = config.disaggregated_endpoint if config is not None else None
    if not isinstance(endpoint, DisaggregatedEndpoint) or not endpoint.bootstrap_host:
        return None
    return None if endpoint.bootstrap_port is None else (endpoint.bootstrap_host, endpoint.bootstrap_port)


def new_meeting(host: str, port: int, dp_rank: int | None, dp_size: int | None, rng: Random) -> BootstrapInfo:
    """A meeting of its own for one request."""
    room = bootstrap_room(dp_rank, dp_size, rng.getrandbits(ROOM_BITS))
    return BootstrapInfo(host, port, room, UUID(int=rng.getrandbits(128), version=4))


def told_meeting(params: Any) -> BootstrapInfo | None:
    """The meeting that a prefill worker's parameters name, if they name all of it."""
    if not isinstance(params, dict):
        return None
    found: list[Any] = [params.get(f"bootstrap_{part}") for part in ("host", "port", "room")]
    host, port, room = found
    if isinstance(host, str) and is_up_to(port, _PORT_MAX) and is_up_to(room, _U64_MAX):
        return BootstrapInfo(host, port, room)
    return None


def is_up_to(value: Any, limit: int) -> bool:
    """Whether it is a whole number from 0 to the limit."""
    return type(value) is int and 0 <= value <= limit


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


def transfer_constraints(configs: Mapping[int, ModelRuntimeConfig], worker_id: int | None) -> RoutingConstraints | None:
    """What decode must keep to for blocks of that worker; None if nothing.

    None stands for a worker that is not known before it has prefilled. Raises TopologyError where the worker's own
    settings are incomplete, and, of a worker nothing is known of, if any worker insists on its domain.
    """
    config = None if worker_id is None else configs.get(worker_id)
    if config is not None:
        return _of_worker(config)
    if any(one.kv_transfer_enforcement == "required" for one in configs.values()):
        who = "the prefill worker is not chosen yet" if worker_id is None else f"nothing is known of worker {worker_id}"
        raise TopologyError(f"{who}, so the required KV transfer constraints cannot be derived")
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


def merged(own: RoutingConstraints | None, topology: RoutingConstraints) -> RoutingConstraints:
    """Both together; the topology's weight counts where both have one for the same taint."""
    own = own or RoutingConstraints()
    return RoutingConstraints(
        own.required_taints | topology.required_taints, {**own.preferred_taints, **topology.preferred_taints}
    )
