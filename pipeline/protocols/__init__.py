"""The records that flow through a graph and travel between processes: data only.

The most used ones are here; further faces are `openai`, `nvext`, `timing`, `card` and `runtime_config`.
"""

from __future__ import annotations

from .field_rules import InvalidRecord
from .openai import AgentHints, NvExt, NvExtResponse
from .options import GuidedDecodingOptions, OutputOptions, SamplingOptions, StopConditions
from .output import (
    BackendOutput,
    EmbeddingsEngineOutput,
    FinishReason,
    LLMEngineOutput,
    PromptLogprobEntry,
    PromptLogprobs,
    TopLogprob,
)
from .request import (
    AgentContext,
    BlockExtraInfo,
    BootstrapInfo,
    MmObject,
    MmRoutingInfo,
    MultimodalData,
    PrefillResult,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
)
from .routing import MigrationState, RouterConfigOverride, RouterParams, RoutingConstraints, RoutingHints
from .timing import (
    LLM_METRICS_EVENT,
    METRIC_EVENTS,
    PAYLOAD_USAGE_EVENT,
    LLMMetricAnnotation,
    RequestPhase,
    RouterChoice,
    RouterDecision,
    RoutingData,
    TimingInfo,
    WorkerIdInfo,
    worker_label,
)
from .trace_link import TraceLink
from .tracker import PhasePermit, RequestTracker, worker_gauges
from .usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails

__all__ = [
    "LLM_METRICS_EVENT",
    "METRIC_EVENTS",
    "PAYLOAD_USAGE_EVENT",
    "AgentContext",
    "AgentHints",
    "BackendOutput",
    "BlockExtraInfo",
    "BootstrapInfo",
    "CompletionTokensDetails",
    "CompletionUsage",
    "EmbeddingsEngineOutput",
    "FinishReason",
    "GuidedDecodingOptions",
    "InvalidRecord",
    "LLMEngineOutput",
    "LLMMetricAnnotation",
    "MigrationState",
    "MmObject",
    "MmRoutingInfo",
    "MultimodalData",
    "NvExt",
    "NvExtResponse",
    "OutputOptions",
    "PhasePermit",
    "PrefillResult",
    "PreprocessedEmbeddingRequest",
    "PreprocessedRequest",
    "PromptLogprobEntry",
    "PromptLogprobs",
    "PromptTokensDetails",
    "RequestPhase",
    "RequestTracker",
    "RouterChoice",
    "RouterConfigOverride",
    "RouterDecision",
    "RouterParams",
    "RoutingConstraints",
    "RoutingData",
    "RoutingHints",
    "SamplingOptions",
    "StopConditions",
    "TimingInfo",
    "TopLogprob",
    "TraceLink",
    "WorkerIdInfo",
    "worker_gauges",
    "worker_label",
]
