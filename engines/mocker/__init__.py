"""A simulated worker: batches, caches, pre-empts and takes time as a real engine does, without a model.

`MockEngine` is the engine. Its core is one in which nothing waits: `Scheduler` moves `Sequence`s over a `BlockPool`,
pass by pass, and says how long each pass takes.
"""

from .args import MockEngineArgs, ReasoningArgs, SglangArgs, TrtllmArgs
from .build import kv_bytes_per_token, make_policy, make_scheduler, make_timing, stagger_delay_s
from .engine import MODEL, MockEngine
from .request import RecordedOutputs
from .scheduling import (
    BlockPool,
    Burst,
    Load,
    NoEvictPolicy,
    Pass,
    Policy,
    Scheduler,
    Sequence,
    SglangPolicy,
    Stage,
    VllmPolicy,
)
from .timing import (
    ClassicTiming,
    InterpolatedTiming,
    PassTime,
    PolynomialTiming,
    PredictedTiming,
    Predictor,
    TimingModel,
)
from .tokens import Output
from .transfer import HandoffExchange, handoff_order

__all__ = [
    "MODEL",
    "BlockPool",
    "Burst",
    "ClassicTiming",
    "HandoffExchange",
    "InterpolatedTiming",
    "Load",
    "MockEngine",
    "MockEngineArgs",
    "NoEvictPolicy",
    "Output",
    "Pass",
    "PassTime",
    "Policy",
    "PolynomialTiming",
    "PredictedTiming",
    "Predictor",
    "ReasoningArgs",
    "RecordedOutputs",
    "Scheduler",
    "Sequence",
    "SglangArgs",
    "SglangPolicy",
    "Stage",
    "TimingModel",
    "TrtllmArgs",
    "VllmPolicy",
    "handoff_order",
    "kv_bytes_per_token",
    "make_policy",
    "make_scheduler",
    "make_timing",
    "stagger_delay_s",
]
