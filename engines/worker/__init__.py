"""A worker: one engine from start to cleanup, registered and served as an instance."""

from .config import ShutdownTimes, WorkerConfig
from .health import STARTING_HEALTH, SystemHealth
from .lifecycle import WorkerState
from .probe import PAYLOAD, IdleProbeSettings, health_payload
from .signals import ProcessWatch, termination_signals
from .worker import Worker

__all__ = [
    "PAYLOAD",
    "STARTING_HEALTH",
    "IdleProbeSettings",
    "ProcessWatch",
    "ShutdownTimes",
    "SystemHealth",
    "Worker",
    "WorkerConfig",
    "WorkerState",
    "health_payload",
    "termination_signals",
]
