"""A simulated worker: batches, caches, pre-empts and takes time as a real engine does, without a model.

`MockEngine` is the engine. Its core is one in which nothing waits: `Scheduler` moves `Sequence`s over a `BlockPool`,
pass by pass, and says how long each pass takes.
"""

from .args import MockEngineArgs, ReasoningArgs, SglangArgs, TrtllmArgs
from .assembly import make_policy, make_scheduler, make_timing
from .blocks import BlockPool
from .engine import MODEL, MockEngine
from .exchange import HandoffExchange
from .handoff import handoff_order
from .plan import Pass
from .policy import Load, Policy
from .policy_sglang import SglangPolicy
from .policy_trtllm import NoEvictPolicy
from .policy_vllm import VllmPolicy
from .profile import InterpolatedTiming
from .recorded import RecordedOutputs
from .scheduler import Scheduler
from .sequence import Sequence, Stage
from .sizing import kv_bytes_per_token, stagger_delay_s
from .speculative import Burst
from .timing import ClassicTiming, PassTime, PolynomialTiming, PredictedTiming, Predictor, TimingModel
from .tokens import Output

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
