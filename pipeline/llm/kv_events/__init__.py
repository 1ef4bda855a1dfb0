"""KV events of engines: read off the wire, converted into changes that routers apply, and followed."""

from .engine_changes import (
    AmbiguousNamespace,
    DuplicateFilter,
    EngineChange,
    EngineEvents,
    Filtered,
    Namespaces,
    merged,
)
from .engine_wire import (
    EngineBatch,
    EngineCleared,
    EngineIgnored,
    EngineRemoved,
    EngineStored,
    Origin,
    Undecodable,
    WireLimits,
    decode_event,
    decode_frames,
)
from .follower import EngineFollower, ReplayLimits
from .subscriber import EngineSubscriber
from .zmq_sockets import EventSockets, Link

__all__ = [
    "AmbiguousNamespace",
    "DuplicateFilter",
    "EngineBatch",
    "EngineChange",
    "EngineCleared",
    "EngineEvents",
    "EngineFollower",
    "EngineIgnored",
    "EngineRemoved",
    "EngineStored",
    "EngineSubscriber",
    "EventSockets",
    "Filtered",
    "Link",
    "Namespaces",
    "Origin",
    "ReplayLimits",
    "Undecodable",
    "WireLimits",
    "decode_event",
    "decode_frames",
    "merged",
]
