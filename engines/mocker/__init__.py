"""A simulated engine: batches, caches, preempts and takes time as a real engine does, without a model.

`MockEngine` is the engine. Nothing waits in its core: `Scheduler` moves `Sequence`s over a `BlockPool`, step by step,
and returns the time of each step.
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
    Policy,
    Scheduler,
    Sequence,
    SequenceState,
    SglangPolicy,
    StepResult,
    VllmPolicy,
)
from .timing import (
    ClassicTiming,
    InterpolatedTiming,
    PolynomialTiming,
    PredictedTiming,
    Predictor,
    StepTime,
    TimingModel,
)
from .tokens import Output
from .transfer import TransferExchange, transfer_order

__all__ = [
    "MODEL",
    "BlockPool",
    "Burst",
    "ClassicTiming",
    "InterpolatedTiming",
    "Load",
    "MockEngine",
    "MockEngineArgs",
    "NoEvictPolicy",
    "Output",
    "Policy",
    "PolynomialTiming",
    "PredictedTiming",
    "Predictor",
    "ReasoningArgs",
    "RecordedOutputs",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "SglangArgs",
    "SglangPolicy",
    "StepResult",
    "StepTime",
    "TimingModel",
    "TransferExchange",
    "TrtllmArgs",
    "VllmPolicy",
    "kv_bytes_per_token",
    "make_policy",
    "make_scheduler",
    "make_timing",
    "stagger_delay_s",
    "transfer_order",
]
