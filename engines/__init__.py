"""What ends a graph: engines that answer requests in tokens."""

from .adapter import RequestAdapter
from .conformance import ConformanceFailure, run_conformance
from .echo import EchoEngine
from .engine_metrics import ComponentSnapshot, MetricsBindings, MetricsContext, SnapshotPublisher
from .generate_context import GenerateContext
from .health import SystemHealth
from .kv_sources import KvEventPublisher, PushSource
from .lifecycle import WorkerState
from .llm import EngineConfig, LLMEngine
from .roles import DisaggregationMode
from .shutdown_times import ShutdownTimes
from .standalone import as_engine
from .worker import Worker
from .worker_config import WorkerConfig

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
    "PushSource",
    "RequestAdapter",
    "ShutdownTimes",
    "SnapshotPublisher",
    "SystemHealth",
    "Worker",
    "WorkerConfig",
    "WorkerState",
    "as_engine",
    "run_conformance",
]
