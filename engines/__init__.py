"""What ends a graph: engines that answer requests in tokens."""

from .adapter import RequestAdapter
from .chunks import extract_logprobs
from .conformance import ConformanceFailure, cancelling_context, mock_context, run_conformance
from .echo import EchoEngine
from .kv_events import KvEventLog, KvEventPublisher, PushSource
from .llm import EngineConfig, GenerateContext, LLMEngine
from .metrics import ComponentSnapshot, MetricsBindings, MetricsContext, SnapshotPublisher
from .roles import (
    DisaggregationMode,
    encoder_terminal_chunk,
    forced_dp_rank,
    own_dp_rank,
    require_encoder_result,
    require_prefill_result,
)
from .standalone import as_engine
from .worker import (
    ProcessWatch,
    ShutdownTimes,
    SystemHealth,
    Worker,
    WorkerConfig,
    WorkerState,
    health_payload,
    is_probe,
    termination_signals,
)

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
