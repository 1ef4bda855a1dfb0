"""Standard graphs, built from one config."""

from .announced import AnnouncedGraph, announced_graph
from .config import IGNORE_UNSUPPORTED, METRICS_PREFIX, GraphConfig, RouterName
from .engines import converted, engine_args_named, find_engine, hint_of
from .fleet import Fleet
from .graphs import HostOptions, OpenGraph, graphs_of, hosted_graph, standard_graph
from .kv_routing import SESSION_TTL, event_log, kv_router_config
from .routing import SILENCE, acts_on_tokens, routing_to
from .stages import StandardGraph, TokenGraph, line
from .supervisor import Retry, Supervisor
from .upstream_config import UpstreamConfig, UpstreamKind
from .upstream_graph import UpstreamGraph, open_graph, upstream_graph
from .upstream_hosting import upstream_workers

__all__ = [
    "IGNORE_UNSUPPORTED",
    "METRICS_PREFIX",
    "SESSION_TTL",
    "SILENCE",
    "AnnouncedGraph",
    "Fleet",
    "GraphConfig",
    "HostOptions",
    "OpenGraph",
    "Retry",
    "RouterName",
    "StandardGraph",
    "Supervisor",
    "TokenGraph",
    "UpstreamConfig",
    "UpstreamGraph",
    "UpstreamKind",
    "acts_on_tokens",
    "announced_graph",
    "converted",
    "engine_args_named",
    "event_log",
    "find_engine",
    "graphs_of",
    "hint_of",
    "hosted_graph",
    "kv_router_config",
    "line",
    "open_graph",
    "routing_to",
    "standard_graph",
    "upstream_graph",
    "upstream_workers",
]
