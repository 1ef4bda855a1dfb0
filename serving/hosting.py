"""Hosting: what the workers of a graph share beside its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import Factory, evolve, field, frozen

from engines import ShutdownTimes, SystemHealth

if TYPE_CHECKING:
    from engines.mocker import RecordedOutputs
    from pipeline.metrics import Metrics
    from pipeline.tracing import Tracer


@frozen
class Hosting:
    """How the workers of a graph are hosted.

    `environment` is where workers and the router find their settings; `metrics` are of the component family. `times`
    are those of each worker's end; by default the environment's without a grace period, for in one process nobody has
    to hear first that it is gone. `recorded` are answers that are known: mock engines give them. With a `tracer`
    each stage of the graph and each engine has its span.
    """

    environment: Mapping[str, str] = field(factory=dict)
    metrics: Metrics | None = None
    health: SystemHealth | None = None
    recorded: RecordedOutputs | None = None
    tracer: Tracer | None = None
    times: ShutdownTimes = field(default=Factory(lambda self: _without_grace(self.environment), takes_self=True))


def _without_grace(environment: Mapping[str, str]) -> ShutdownTimes:
    return evolve(ShutdownTimes.from_environment(environment), grace_s=0.0)
