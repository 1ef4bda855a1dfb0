"""KV-aware routing: which worker holds which blocks of a prompt, and what follows from it."""

from __future__ import annotations

from .active_sequences import ActiveSequences
from .affinity import SessionAffinity
from .approx_index import ApproxIndex
from .block_hash import PromptBlocks
from .choose import Decision
from .chooser import KvRouter
from .config import KvRouterConfig
from .config_environment import active_request_expiry_s, config_from_environment, overlap_refresh_after_s
from .cost import WorkerType
from .eligibility import RoutingRules, WorkerPool
from .engine_events import EngineEvents
from .engine_wire import WireLimits, decode_frames
from .engine_zmq import EngineSubscriber
from .errors import BookingError, DuplicateRequest, QueueRejected, RequestNotFound, WorkerNotFound
from .event_feed import EventFeed, RepairLimits
from .event_log import EventLog
from .index import KvIndex
from .index_errors import KvIndexError
from .overlap import Overlap
from .queue_classes import PolicyClass, PolicyProfile
from .queue_profiles import PolicyDocument
from .recovery import KvRecovery, recovery_workers
from .replica_sync import ReplicaSync
from .router_gauges import RouterGauges
from .router_metrics import RouterMetrics
from .router_overlap import kv_events
from .router_placement import Placement
from .router_pool import adapters_of, configs_of
from .router_request import RouteRequest
from .router_service import RouterService
from .worker_rank import WorkerRank

__all__ = [
    "ActiveSequences",
    "ApproxIndex",
    "BookingError",
    "Decision",
    "DuplicateRequest",
    "EngineEvents",
    "EngineSubscriber",
    "EventFeed",
    "EventLog",
    "KvIndex",
    "KvIndexError",
    "KvRecovery",
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
    "ReplicaSync",
    "RequestNotFound",
    "RouteRequest",
    "RouterGauges",
    "RouterMetrics",
    "RouterService",
    "RoutingRules",
    "SessionAffinity",
    "WireLimits",
    "WorkerNotFound",
    "WorkerPool",
    "WorkerRank",
    "WorkerType",
    "active_request_expiry_s",
    "adapters_of",
    "config_from_environment",
    "configs_of",
    "decode_frames",
    "kv_events",
    "overlap_refresh_after_s",
    "recovery_workers",
]
