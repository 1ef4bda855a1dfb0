"""How requests of a standard graph find their worker, and when they are refused.

    environment, config ──► PushRouter ◄── busy? ── BusyWatch ◄── reports of the workers, their cards
                                └────────► Rejection, the gate at the top

Source: dynamo lib/llm/src/discovery/{model_manager,worker_monitor}.rs. Other than there, thresholds hold in every mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from random import Random
from typing import Any, Literal

from attrs import frozen

from operators import (
    BusyThresholds,
    BusyWatch,
    DeviceAware,
    PushRouter,
    Rejection,
    WorkerLoads,
    capacities_of,
    cuda_to_cpu_ratio,
    exclusion_s,
    load_reports,
    overload_status,
)
from pipeline import Annotated
from pipeline.network import EndpointId, Runtime, Workers
from pipeline.protocols import LLMEngineOutput

from .config import GraphConfig, RouterName
from .environment import fraction, integer

_MODES: Mapping[RouterName, Literal["round_robin", "random", "power_of_two_choices", "least_loaded", "direct"]] = {
    "round-robin": "round_robin",
    "random": "random",
    "p2c": "power_of_two_choices",
    "least-loaded": "least_loaded",
    "direct": "direct",
}


@frozen
class Routing:
    """Workers, the router to them that ends a graph, and what stands at its top where thresholds are set."""

    workers: Workers[Any, Any]
    router: PushRouter[Any, Any]
    rejection: Rejection | None = None


@contextmanager
def routing_to(
    endpoint: EndpointId, config: GraphConfig, environment: Mapping[str, str], runtime: Runtime
) -> Iterator[Routing]:
    """The routing to the workers at an endpoint of the runtime; what it listens to ends with the block.

    Without a threshold nobody listens to reports: no mode of routing goes by them.
    """
    workers = runtime.workers(endpoint, Annotated[LLMEngineOutput])
    thresholds = busy_thresholds(environment).updated(config.busy)
    if thresholds == BusyThresholds():
        yield Routing(workers, router_of(workers, config, environment))
        return
    loads, capacities = WorkerLoads(workers), capacities_of(runtime.discovery.watch_models(endpoint.path))
    with loads.follow(load_reports(runtime.events, endpoint)), BusyWatch(loads, thresholds, capacities) as watch:
        router = router_of(workers, config, environment, loads=loads, busy=watch.busy)
        yield Routing(workers, router, Rejection(router, status=overload_status(environment)))


def busy_thresholds(environment: Mapping[str, str]) -> BusyThresholds:
    """Those the environment sets; one that cannot be read, or is out of its range, counts as not set."""
    return BusyThresholds(
        fraction(environment.get("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD"), 1.0),
        integer(environment.get("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD"), 0, 2**64 - 1),
        fraction(environment.get("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC"), inf),
    )


def router_of(
    workers: Workers[Any, Any], config: GraphConfig, environment: Mapping[str, str], **judging: Any
) -> PushRouter[Any, Any]:
    """The router as configured; only what is not left to its defaults is said, for a graph prints it."""
    how: dict[str, Any] = judging | {"exclusion_s": exclusion_s(environment)}
    if config.seed is not None:
        how["rng"] = Random(config.seed)
    if config.router == "device-aware":
        return PushRouter(workers, pick=DeviceAware(cuda_to_cpu_ratio(environment)), **how)
    return PushRouter(workers, _MODES[config.router], **how)
