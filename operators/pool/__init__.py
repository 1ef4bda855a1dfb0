"""A pool of workers: which are healthy, how loaded they are, and which one gets a request."""

from pipeline.protocols.limits import BusyThresholds

from .assigned import DirectRouter, Next, Output, assign_worker
from .busy import BusyWatch, Capacity, capacities_of, is_rank_busy, is_worker_busy, latch
from .errors import AllBusy, AllCoolingDown
from .health import COOLDOWN, Cooldowns, cooldown_s, note_failure, without_failed
from .load import DeviceType, LoadChange, RankLoad, WorkerLoad, WorkerLoads, is_idle, load_reports
from .pickers import (
    DEVICE_RATIO,
    DeviceAware,
    Loads,
    Picker,
    RoundRobin,
    Uncounted,
    cuda_to_cpu_ratio,
    least_loaded,
    power_of_two,
    random_pick,
)
from .push_router import PushRouter, RouterMode
from .rejection import OVERLOAD_STATUS, Rejection, overload_status

__all__ = [
    "COOLDOWN",
    "DEVICE_RATIO",
    "OVERLOAD_STATUS",
    "AllBusy",
    "AllCoolingDown",
    "BusyThresholds",
    "BusyWatch",
    "Capacity",
    "Cooldowns",
    "DeviceAware",
    "DeviceType",
    "DirectRouter",
    "LoadChange",
    "Loads",
    "Next",
    "Output",
    "Picker",
    "PushRouter",
    "RankLoad",
    "Rejection",
    "RoundRobin",
    "RouterMode",
    "Uncounted",
    "WorkerLoad",
    "WorkerLoads",
    "assign_worker",
    "capacities_of",
    "cooldown_s",
    "cuda_to_cpu_ratio",
    "is_idle",
    "is_rank_busy",
    "is_worker_busy",
    "latch",
    "least_loaded",
    "load_reports",
    "note_failure",
    "overload_status",
    "power_of_two",
    "random_pick",
    "without_failed",
]
