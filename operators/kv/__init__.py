"""KV-aware routing: which worker holds which blocks of a prompt, and what follows from it."""

from __future__ import annotations

from .active_sequences import ActiveSequences, Booking, SequenceLoad
from .active_sequences_events import ActiveSequenceEvent
from .affinity import SessionAffinity
from .approx_index import ApproxIndex
from .block_hash import PromptBlocks
from .choose import Decision
from .chooser import KvRouter
from .config import KvRouterConfig
from .config_environment import config_from_environment
from .eligibility import RoutingRules, WorkerPool
from .engine_events import EngineEvents
from .engine_wire import decode_frames
from .errors import BookingError, DuplicateRequest, QueueRejected, RequestNotFound, WorkerNotFound
from .event_feed import EventFeed, RepairLimits
from .event_log import EventLog
from .index import KvIndex
from .index_errors import KvIndexError
from .overlap import Overlap
from .queue import AdmissionQueue
from .queue_classes import PolicyClass, PolicyProfile
from .queue_profiles import PolicyDocument
from .router_metrics import RouterMetrics
from .router_overlap import kv_events
from .router_placement import Placement
from .router_pool import configs_of
from .router_request import RouteRequest
from .worker_rank import WorkerRank

__all__ = [
    "ActiveSequenceEvent",
    "ActiveSequences",
    "AdmissionQueue",
    "ApproxIndex",
    "Booking",
    "BookingError",
    "Decision",
    "DuplicateRequest",
    "EngineEvents",
    "EventFeed",
    "EventLog",
    "KvIndex",
    "KvIndexError",
    "KvRouter",
    "KvRouterConfig",
    "Overlap",
    "Placement",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PromptBlocks",
    "QueueRejected",
    "RepairLimits",
    "RequestNotFound",
    "RouteRequest",
    "RouterMetrics",
    "RoutingRules",
    "SequenceLoad",
    "SessionAffinity",
    "WorkerNotFound",
    "WorkerPool",
    "WorkerRank",
    "config_from_environment",
    "configs_of",
    "decode_frames",
    "kv_events",
]
