"""A worker: one engine from start to cleanup, registered and served as an instance."""

from .card import card_of
from .config import ShutdownTimes, WorkerConfig, parse_endpoint_types, served_name
from .health import STARTING_HEALTH, SystemHealth, is_healthy
from .lifecycle import TRANSITIONS, Background, Lifecycle, LifecycleEvent, WorkerState, after, owes_cleanup
from .probe import (
    PAYLOAD,
    IdleProbe,
    IdleProbeSettings,
    ProbeEngine,
    TrafficObserver,
    bos_token_id,
    choose_payload,
    health_payload,
    is_probe,
    payload_from_text,
    stamp,
)
from .process_watch import OVERDUE, SIGNALS, ProcessWatch
from .publishing import worker_labels
from .signals import Signals, run_until_signalled, termination_signals
from .worker import Worker

__all__ = [
    "OVERDUE",
    "PAYLOAD",
    "SIGNALS",
    "STARTING_HEALTH",
    "TRANSITIONS",
    "Background",
    "IdleProbe",
    "IdleProbeSettings",
    "Lifecycle",
    "LifecycleEvent",
    "ProbeEngine",
    "ProcessWatch",
    "ShutdownTimes",
    "Signals",
    "SystemHealth",
    "TrafficObserver",
    "Worker",
    "WorkerConfig",
    "WorkerState",
    "after",
    "bos_token_id",
    "card_of",
    "choose_payload",
    "health_payload",
    "is_healthy",
    "is_probe",
    "owes_cleanup",
    "parse_endpoint_types",
    "payload_from_text",
    "run_until_signalled",
    "served_name",
    "stamp",
    "termination_signals",
    "worker_labels",
]
