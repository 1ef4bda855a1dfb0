"""What stands between a caller and an engine: each operator wraps the next stage."""

from .availability import AllBusy, AllExcluded, InstanceExcluded
from .busy import BusyThresholds, Capacity
from .busy_watch import BusyWatch, capacities_of
from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .detokenize import Detokenize
from .direct_router import DirectRouter
from .exclusion import exclusion_s
from .kv_push_router import ROUTER_DECISION, KvPushRouter
from .migration import Migration
from .migration_metrics import MigrationMetrics
from .model import LAST_USER_MESSAGE, WHOLE_CHAT, Model
from .pickers import (
    DeviceAware,
    Picker,
    RoundRobin,
    Uncharged,
    cuda_to_cpu_ratio,
    least_loaded,
    power_of_two,
    random_pick,
)
from .prefill import KvPrefill, PrefillError, PrefillRouter, PrefillSettings, PushPrefill
from .preprocess import PROMPT_TOKENS, Preprocess
from .push_router import PushRouter
from .rejection import Rejection, overload_status
from .request_size import check_counts
from .tokenizer import HuggingFaceTokenizer, Tokenizer
from .validation import keywords_of, validate
from .worker_load import WorkerLoad, WorkerLoads, load_reports

__all__ = [
    "LAST_USER_MESSAGE",
    "PROMPT_TOKENS",
    "ROUTER_DECISION",
    "WHOLE_CHAT",
    "AllBusy",
    "AllExcluded",
    "BusyThresholds",
    "BusyWatch",
    "ByteTokenizer",
    "Capacity",
    "ChatTemplate",
    "Detokenize",
    "DeviceAware",
    "DirectRouter",
    "HuggingFaceTokenizer",
    "InstanceExcluded",
    "KvPrefill",
    "KvPushRouter",
    "Migration",
    "MigrationMetrics",
    "Model",
    "Picker",
    "PrefillError",
    "PrefillRouter",
    "PrefillSettings",
    "Preprocess",
    "PushPrefill",
    "PushRouter",
    "Rejection",
    "RoundRobin",
    "Tokenizer",
    "Uncharged",
    "WorkerLoad",
    "WorkerLoads",
    "capacities_of",
    "check_counts",
    "cuda_to_cpu_ratio",
    "exclusion_s",
    "keywords_of",
    "least_loaded",
    "load_reports",
    "overload_status",
    "power_of_two",
    "random_pick",
    "validate",
]
