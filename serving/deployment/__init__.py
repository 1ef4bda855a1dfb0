"""Standard graphs, built from one config."""

from .config import IGNORE_UNSUPPORTED, METRICS_PREFIX, GraphConfig, RouterName
from .engines import Deployment, converted, find_engine, hint_of
from .fleet import Fleet
from .graphs import HostOptions, OpenGraph, StandardGraph, TokenGraph, hosted_graph, line, standard_graph, wall_ms
from .kv_routing import SESSION_TTL, event_log
from .routing import SILENCE, busy_thresholds, prefill_endpoint, prefill_stage, router_of, routing_to
from .settings import kv_router_config, policy_document, policy_profile

__all__ = [
    "IGNORE_UNSUPPORTED",
    "METRICS_PREFIX",
    "SESSION_TTL",
    "SILENCE",
    "Deployment",
    "Fleet",
    "GraphConfig",
    "HostOptions",
    "OpenGraph",
    "RouterName",
    "StandardGraph",
    "TokenGraph",
    "busy_thresholds",
    "converted",
    "event_log",
    "find_engine",
    "hint_of",
    "hosted_graph",
    "kv_router_config",
    "line",
    "policy_document",
    "policy_profile",
    "prefill_endpoint",
    "prefill_stage",
    "router_of",
    "routing_to",
    "standard_graph",
    "wall_ms",
]
