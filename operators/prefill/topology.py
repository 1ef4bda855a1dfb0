"""Which decode workers the blocks of a prefill worker can reach, as constraints for the decode router.

Source: dynamo lib/llm/src/discovery/model_manager.rs, get_kv_transfer_routing_constraints.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.protocols import RoutingConstraints
from pipeline.protocols.runtime_config import ModelRuntimeConfig, topology_taint

from .errors import TopologyError


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
