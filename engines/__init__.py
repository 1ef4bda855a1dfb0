"""What ends a graph: engines that answer requests in tokens."""

from .conformance import ConformanceFailure, run_conformance
from .echo import EchoEngine
from .llm import EngineConfig, GenerateContext, LLMEngine
from .pass_rates import PassMeter
from .peers import Peers
from .publishing import (
    ComponentSnapshot,
    KvEventPublisher,
    MetricsBindings,
    MetricsContext,
    PushSource,
    SnapshotPublisher,
)
from .roles import DisaggregationMode
from .standalone import as_engine
from .worker import ShutdownTimes, SystemHealth, Worker, WorkerConfig, WorkerState

__all__ = [
    "ComponentSnapshot",
    "ConformanceFailure",
    "DisaggregationMode",
    "EchoEngine",
    "EngineConfig",
    "GenerateContext",
    "KvEventPublisher",
    "LLMEngine",
    "MetricsBindings",
    "MetricsContext",
    "PassMeter",
    "Peers",
    "PushSource",
    "ShutdownTimes",
    "SnapshotPublisher",
    "SystemHealth",
    "Worker",
    "WorkerConfig",
    "WorkerState",
    "as_engine",
    "run_conformance",
]
