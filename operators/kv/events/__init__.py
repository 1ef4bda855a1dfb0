"""KV events of workers: received in order, repaired and recovered; those of engines are `pipeline.llm.kv_events`."""

from pipeline.llm.kv_events import EngineSubscriber, WireLimits

from .feed import EventFeed, Recover, RepairLimits
from .log import EventLog, KvRecovery, recovery_workers
from .rank import Counted, EventCursor, Sight

__all__ = [
    "Counted",
    "EngineSubscriber",
    "EventCursor",
    "EventFeed",
    "EventLog",
    "KvRecovery",
    "Recover",
    "RepairLimits",
    "Sight",
    "WireLimits",
    "recovery_workers",
]
