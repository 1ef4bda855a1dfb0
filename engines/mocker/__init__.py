"""A simulated engine: batches, caches, preempts and takes time as a real engine does, without a model.

`MockEngine` is the engine. Nothing waits in its core: `Scheduler` moves `Sequence`s over a `BlockPool`, step by step,
and returns the time of each step.
"""

from .args import MockEngineArgs, ReasoningArgs, SglangArgs, TrtllmArgs
from .engine import MODEL, MockEngine
from .horizon import Horizon, TimedOutput
from .request import RecordedOutputs
from .timing import ClassicTiming, InterpolatedTiming, PolynomialTiming, PredictedTiming, Predictor, TimingModel
from .transfer import TransferExchange, transfer_order

__all__ = [
    "MODEL",
    "ClassicTiming",
    "Horizon",
    "InterpolatedTiming",
    "MockEngine",
    "MockEngineArgs",
    "PolynomialTiming",
    "PredictedTiming",
    "Predictor",
    "ReasoningArgs",
    "RecordedOutputs",
    "SglangArgs",
    "TimedOutput",
    "TimingModel",
    "TransferExchange",
    "TrtllmArgs",
    "transfer_order",
]
