"""Standard graphs, built from one config."""

from .config import IGNORE_UNSUPPORTED, METRICS_PREFIX, GraphConfig, RouterName
from .engines import converted, find_engine, hint_of
from .fleet import Fleet
from .graphs import HostOptions, OpenGraph, StandardGraph, TokenGraph, hosted_graph, line, standard_graph
from .kv_routing import SESSION_TTL, event_log, kv_router_config
from .routing import SILENCE, routing_to

__all__ = [
    "IGNORE_UNSUPPORTED",
    "METRICS_PREFIX",
    "SESSION_TTL",
    "SILENCE",
    "Fleet",
    "GraphConfig",
    "HostOptions",
    "OpenGraph",
    "RouterName",
    "StandardGraph",
    "TokenGraph",
    "converted",
    "event_log",
    "find_engine",
    "hint_of",
    "hosted_graph",
    "kv_router_config",
    "line",
    "routing_to",
    "standard_graph",
]
