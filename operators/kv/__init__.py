"""KV-aware routing: which worker holds which blocks of a prompt, and what follows from it."""

from __future__ import annotations

from .config import (
    KvRouterConfig,
    config_from_environment,
    kv_router_variables,
)
from .errors import BookingError, QueueRejected
from .events import EngineSubscriber, EventLog, KvRecovery, WireLimits, recovery_workers
from .gauges import RouterGauges
from .index import KvIndex, KvIndexError, PredictedIndex
from .load import ACTIVE_REQUEST_EXPIRY, ActiveSequences, ReplicaSync, shared_bookings
from .lookup import kv_events
from .metrics import RouterMetrics
from .operator import KvPushRouter
from .prompt import PromptBlocks
from .queue import OVERLAP_REFRESH_AFTER, PolicyClass, PolicyDocument, PolicyProfile
from .rates import rate_reports
from .request import RouteRequest, hash_beside_the_loop, share_hashes
from .reservation import ends_badly
from .router import KvRouter, kv_router
from .selection import WorkerType
from .service import RouterService
from .session_peers import shared_sessions
from .types import PlacementRule, WorkerRank

__all__ = [
    "ACTIVE_REQUEST_EXPIRY",
    "OVERLAP_REFRESH_AFTER",
    "ActiveSequences",
    "BookingError",
    "EngineSubscriber",
    "EventLog",
    "KvIndex",
    "KvIndexError",
    "KvPushRouter",
    "KvRecovery",
    "KvRouter",
    "KvRouterConfig",
    "PlacementRule",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PredictedIndex",
    "PromptBlocks",
    "QueueRejected",
    "ReplicaSync",
    "RouteRequest",
    "RouterGauges",
    "RouterMetrics",
    "RouterService",
    "WireLimits",
    "WorkerRank",
    "WorkerType",
    "config_from_environment",
    "ends_badly",
    "hash_beside_the_loop",
    "kv_events",
    "kv_router",
    "kv_router_variables",
    "rate_reports",
    "recovery_workers",
    "share_hashes",
    "shared_bookings",
    "shared_sessions",
]
