"""The programs that a command starts: what they get of its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

from pipeline import InvalidArgument

from ..child_commands import command_of
from ..settings import EngineOptions, ModelOptions, ServedGraph, Settled, UpstreamOptions
from .commands import commands

if TYPE_CHECKING:
    from ..up import Plan

_OF_WORKERS = (
    *("engine", "engine_arg", "model", "model_path", "model_name", "lora", "workers", "prefill_workers"),
    *("upstream", "prefill_upstream", "upstream_kind", "kv_connector", "kv_lease_s", "upstream_model_path"),
)
"""Settings that the workers of a runtime have, not its front ends."""
_NOT_OF_FRONTENDS = (*_OF_WORKERS, "processes", "host", "port", "fd", "admin_host", "admin_port")
_NOT_OF_WORKERS = ("host", "port", "admin_host", "admin_port", "workers", "prefill_workers")


def check_of_workers(settled: Settled) -> None:
    """Raise InvalidArgument for an option that is for the workers of a runtime."""
    for name in _OF_WORKERS:
        if name in settled.options:
            raise InvalidArgument("the workers of a runtime have their own: an option of `penstock worker`", field=name)


def routed(graph: ServedGraph) -> ServedGraph:
    """Return the options without those of workers, which variables and settings files may have for all programs."""
    routing = evolve(graph.routing, prefill_workers=0)
    return evolve(graph, engine=EngineOptions(), model=ModelOptions(), upstream=UpstreamOptions(), routing=routing)


def check_engines(graph: ServedGraph, settled: Settled) -> None:
    """Raise InvalidArgument for what no graph can be made of, before any process is started."""
    graph.config(settled.environment)


def worker_values(graph: ServedGraph, settled: Settled) -> dict[str, Any]:
    """Return the settings of each worker of a graph in processes of their own, as fields of a Plan.

    Each server behind the graph has a worker.
    """
    if graph.upstream.upstream:
        workers: list[dict[str, Any]] = [{"upstream": (url,)} for url in graph.upstream.upstream]
        prefill: list[dict[str, Any]] = [{"upstream": (url,)} for url in graph.upstream.prefill_upstream]
    else:
        workers = [{"engine": graph.engine.engine}] * graph.pool.workers
        prefill = [{"engine": graph.engine.engine}] * graph.routing.prefill_workers
    if prefill:
        decode = {"disaggregation_mode": "decode", "may_prefill": not graph.routing.enforce_disagg}
        workers = [each | decode for each in workers]
    return {
        "worker_values": workers,
        "prefill_values": [each | {"disaggregation_mode": "prefill"} for each in prefill],
    }


def plan_of(
    settled: Settled,
    frontends: int,
    runtime: str | None,
    broker: Literal["file", "nats"] = "file",
    *,
    worker_values: Sequence[Mapping[str, Any]] = (),
    prefill_values: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """Return the plan of a deployment whose programs get the options that this command was given."""
    from ..up import Plan

    left_out = {"worker": _NOT_OF_WORKERS, "serve": _NOT_OF_FRONTENDS}

    def of_program(name: str, own: Mapping[str, Any]) -> list[str]:
        return command_of(name, commands[name].settings(), settled, own, leave_out=left_out[name])

    return Plan(frontends, of_program, worker_values, prefill_values, runtime, broker)
