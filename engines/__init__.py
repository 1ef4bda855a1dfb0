"""What ends a graph: engines that answer requests in tokens."""

from .conformance import ConformanceFailure, run_conformance
from .echo import EchoEngine
from .kv_events import KvEventLog, KvEventPublisher, PushSource
from .llm import EngineConfig, GenerateContext, LLMEngine
from .metrics import ComponentSnapshot, MetricsBindings, MetricsContext, SnapshotPublisher
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
    "KvEventLog",
    "KvEventPublisher",
    "LLMEngine",
    "MetricsBindings",
    "MetricsContext",
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
