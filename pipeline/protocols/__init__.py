"""The records that flow through a graph and travel between processes: data only.

The most used ones are here; further faces are `openai`, `nvext`, `timing`, `card` and `runtime_config`.
"""

from __future__ import annotations

from .options import GuidedDecodingOptions, OutputOptions, SamplingOptions, StopConditions
from .output import BackendOutput, FinishReason, LLMEngineOutput, TopLogprob
from .request import BlockExtraInfo, BootstrapInfo, MmObject, PrefillResult, PreprocessedRequest
from .routing import MigrationState, RouterConfigOverride, RoutingConstraints, RoutingHints
from .timing import RequestPhase, RouterChoice, RoutingData, TraceLink, worker_label
from .tracker import PhasePermit, RequestTracker, worker_gauges
from .usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails

__all__ = [
    "BackendOutput",
    "BlockExtraInfo",
    "BootstrapInfo",
    "CompletionTokensDetails",
    "CompletionUsage",
    "FinishReason",
    "GuidedDecodingOptions",
    "LLMEngineOutput",
    "MigrationState",
    "MmObject",
    "OutputOptions",
    "PhasePermit",
    "PrefillResult",
    "PreprocessedRequest",
    "PromptTokensDetails",
    "RequestPhase",
    "RequestTracker",
    "RouterChoice",
    "RouterConfigOverride",
    "RoutingConstraints",
    "RoutingData",
    "RoutingHints",
    "SamplingOptions",
    "StopConditions",
    "TopLogprob",
    "TraceLink",
    "worker_gauges",
    "worker_label",
]
