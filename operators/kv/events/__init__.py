"""KV events of workers and engines: received in order, repaired and recovered."""

from .engine import AmbiguousNamespace, DuplicateFilter, EngineChange, EngineEvents, Filtered, Namespaces, merged
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
from .feed import EventFeed, Recover, RepairLimits
from .log import EventLog, KvRecovery, recovery_workers
from .rank import Counted, EventCursor, Sight
from .zmq import EngineSubscriber

__all__ = [
    "AmbiguousNamespace",
    "Counted",
    "DuplicateFilter",
    "EngineBatch",
    "EngineChange",
    "EngineCleared",
    "EngineEvents",
    "EngineIgnored",
    "EngineRemoved",
    "EngineStored",
    "EngineSubscriber",
    "EventCursor",
    "EventFeed",
    "EventLog",
    "Filtered",
    "KvRecovery",
    "Namespaces",
    "Origin",
    "Recover",
    "RepairLimits",
    "Sight",
    "Undecodable",
    "WireLimits",
    "decode_event",
    "decode_frames",
    "merged",
    "recovery_workers",
]
