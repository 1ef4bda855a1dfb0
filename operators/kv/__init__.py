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
from .errors import BookingError, QueueRejected
from .events import EngineSubscriber, EventLog, KvRecovery, WireLimits, recovery_workers
from .factory import kv_router
from .index import KvIndex, KvIndexError, PredictedIndex
from .load import ActiveSequences, ReplicaSync
from .lookup import kv_events
from .metrics import RouterMetrics
from .operator import KvPushRouter
from .pool import adapters_of, configs_of
from .prompt import PromptBlocks
from .queue import PolicyClass, PolicyDocument, PolicyProfile
from .request import RouteRequest, hash_beside_the_loop, share_hashes, with_shared_hashes
from .reservation import Reservation, ends_badly
from .router import KvRouter
from .selection import WorkerType
from .service import RouterGauges, RouterService
from .types import WorkerRank

__all__ = [
    "ActiveSequences",
    "BookingError",
    "ConditionalPolicy",
    "EngineSubscriber",
    "EventLog",
    "KvIndex",
    "KvIndexError",
    "KvPushRouter",
    "KvRecovery",
    "KvRouter",
    "KvRouterConfig",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PredictedIndex",
    "PromptBlocks",
    "QueueRejected",
    "ReplicaSync",
    "Reservation",
    "RouteRequest",
    "RouterGauges",
    "RouterMetrics",
    "RouterService",
    "WireLimits",
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
