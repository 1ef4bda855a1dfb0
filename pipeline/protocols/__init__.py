"""The records that flow through a graph and travel between processes: data only.

The most used ones are here; further faces are `openai`, `nvext`, `timing`, `card` and `runtime_config`.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from __future__ import annotations

from .options import GuidedDecodingOptions, OutputOptions, SamplingOptions, StopConditions
from .output import BackendOutput, FinishReason, LLMEngineOutput, TopLogprob
from .request import BlockExtraInfo as BlockExtraInfo
from .request import BootstrapInfo, PrefillResult, PreprocessedRequest
from .request import MmObject as MmObject
from .routing import MigrationState as MigrationState
from .routing import RouterConfigOverride, RoutingConstraints, RoutingHints
from .timing import RequestPhase
from .timing import RouterChoice as RouterChoice
from .timing import RoutingData as RoutingData
from .timing import TraceLink as TraceLink
from .timing import worker_label as worker_label
from .tracker import PhasePermit as PhasePermit
from .tracker import RequestTracker
from .tracker import worker_gauges as worker_gauges
from .usage import CompletionTokensDetails as CompletionTokensDetails
from .usage import CompletionUsage, PromptTokensDetails

__all__ = [
    "BackendOutput",
    "BootstrapInfo",
    "CompletionUsage",
    "FinishReason",
    "GuidedDecodingOptions",
    "LLMEngineOutput",
    "OutputOptions",
    "PrefillResult",
    "PreprocessedRequest",
    "PromptTokensDetails",
    "RequestPhase",
    "RequestTracker",
    "RouterConfigOverride",
    "RoutingConstraints",
    "RoutingHints",
    "SamplingOptions",
    "StopConditions",
    "TopLogprob",
]
