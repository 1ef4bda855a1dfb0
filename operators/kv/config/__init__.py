"""Settings of the KV router, their validation, and their environment variables."""

from pipeline.settings import Problem, is_finite

from .config import ConditionalPolicy, KvRouterConfig, QueuePolicy, raise_problems
from .environment import (
    active_request_expiry_s,
    config_from_environment,
    kv_router_variables,
    overlap_refresh_after_s,
    variable_of,
)

__all__ = [
    "ConditionalPolicy",
    "KvRouterConfig",
    "Problem",
    "QueuePolicy",
    "active_request_expiry_s",
    "config_from_environment",
    "is_finite",
    "kv_router_variables",
    "overlap_refresh_after_s",
    "raise_problems",
    "variable_of",
]
