"""KV-aware routing: which worker holds which blocks of a prompt, and what follows from it."""

from __future__ import annotations

from .config import (
    ConditionalPolicy,
    KvRouterConfig,
    active_request_expiry_s,
    config_from_environment,
    kv_router_variables,
    overlap_refresh_after_s,
)
from .errors import BookingError, DuplicateRequest, QueueRejected, RequestNotFound, WorkerNotFound
from .events import (
    EngineEvents,
    EngineSubscriber,
    EventFeed,
    EventLog,
    KvRecovery,
    RepairLimits,
    WireLimits,
    recovery_workers,
)
from .factory import kv_router
from .index import KvIndex, KvIndexError, Overlap, PredictedIndex
from .load import ActiveSequences, ReplicaSync
from .lookup import kv_events
from .metrics import RouterMetrics
from .operator import ROUTER_DECISION, KvPushRouter
from .pool import RoutingRules, WorkerPool, adapters_of, configs_of
from .prompt import PromptBlocks
from .queue import PolicyClass, PolicyDocument, PolicyProfile
from .request import RouteRequest, hash_beside_the_loop, share_hashes, with_shared_hashes
from .reservation import Reservation, ends_badly
from .router import KvRouter
from .selection import Decision, WorkerType
from .service import RouterGauges, RouterService
from .types import WorkerRank

__all__ = [
    "ROUTER_DECISION",
    "ActiveSequences",
    "BookingError",
    "ConditionalPolicy",
    "Decision",
    "DuplicateRequest",
    "EngineEvents",
    "EngineSubscriber",
    "EventFeed",
    "EventLog",
    "KvIndex",
    "KvIndexError",
    "KvPushRouter",
    "KvRecovery",
    "KvRouter",
    "KvRouterConfig",
    "Overlap",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PredictedIndex",
    "PromptBlocks",
    "QueueRejected",
    "RepairLimits",
    "ReplicaSync",
    "RequestNotFound",
    "Reservation",
    "RouteRequest",
    "RouterGauges",
    "RouterMetrics",
    "RouterService",
    "RoutingRules",
    "WireLimits",
    "WorkerNotFound",
    "WorkerPool",
    "WorkerRank",
    "WorkerType",
    "active_request_expiry_s",
    "adapters_of",
    "config_from_environment",
    "configs_of",
    "ends_badly",
    "hash_beside_the_loop",
    "kv_events",
    "kv_router",
    "kv_router_variables",
    "overlap_refresh_after_s",
    "recovery_workers",
    "share_hashes",
    "with_shared_hashes",
]
