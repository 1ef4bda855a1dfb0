"""Language models in this process, by torch and transformers. Importing this loads neither of them.

What an engine decides, `Batcher` and what it uses, knows no tensors.
"""

from .batching import Batcher
from .handover import HandoverTimes, PeerHandover
from .loading import (
    Dtype,
    LoadedModel,
    LoadedText,
    LoadingProgress,
    ModelFiles,
    ReportProgress,
    check_dtype,
    load_model,
    load_text,
    no_report,
)
from .order import ModelFacts, Order, order_of
from .planning import Chunk, Load, StepPlan, groups, share_budget
from .sampling import Limits, Sampling, sampling_of
from .settings import Role, TorchSettings
from .slots import Choice, Drawn, HeldBlocks, KvBytes, News, Stage
from .torch_engine import Handover, TorchEngine

__all__ = [
    "Batcher",
    "Choice",
    "Chunk",
    "Drawn",
    "Dtype",
    "Handover",
    "HandoverTimes",
    "HeldBlocks",
    "KvBytes",
    "Limits",
    "Load",
    "LoadedModel",
    "LoadedText",
    "LoadingProgress",
    "ModelFacts",
    "ModelFiles",
    "News",
    "Order",
    "PeerHandover",
    "ReportProgress",
    "Role",
    "Sampling",
    "Stage",
    "StepPlan",
    "TorchEngine",
    "TorchSettings",
    "check_dtype",
    "groups",
    "load_model",
    "load_text",
    "no_report",
    "order_of",
    "sampling_of",
    "share_budget",
]
