"""What ends a graph: engines that answer requests in tokens."""

from .adapter import RequestAdapter
from .conformance import ConformanceFailure, cancelling_context, mock_context, run_conformance
from .dp_rank import forced_dp_rank, own_dp_rank
from .echo import EchoEngine
from .engine_metrics import ComponentSnapshot, MetricsBindings, MetricsContext, SnapshotPublisher
from .generate_context import GenerateContext
from .health import SystemHealth
from .kv_recovery import KvEventLog
from .kv_sources import KvEventPublisher, PushSource
from .lifecycle import WorkerState
from .llm import EngineConfig, LLMEngine
from .logprobs import extract_logprobs
from .probe import health_payload, is_probe
from .process_watch import ProcessWatch
from .roles import DisaggregationMode, encoder_terminal_chunk, require_encoder_result, require_prefill_result
from .shutdown_times import ShutdownTimes
from .standalone import as_engine
from .worker import Worker
from .worker_config import WorkerConfig
from .worker_signals import termination_signals

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
    "ProcessWatch",
    "PushSource",
    "RequestAdapter",
    "ShutdownTimes",
    "SnapshotPublisher",
    "SystemHealth",
    "Worker",
    "WorkerConfig",
    "WorkerState",
    "as_engine",
    "cancelling_context",
    "encoder_terminal_chunk",
    "extract_logprobs",
    "forced_dp_rank",
    "health_payload",
    "is_probe",
    "mock_context",
    "own_dp_rank",
    "require_encoder_result",
    "require_prefill_result",
    "run_conformance",
    "termination_signals",
]
