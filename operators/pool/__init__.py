"""A pool of workers: which are healthy, how loaded they are, and which one gets a request."""

from pipeline.protocols.limits import BusyThresholds

from .assigned import DirectRouter, Next, Output, assign_worker
from .busy import BusyWatch, Capacity, capacities_of, is_rank_busy, is_worker_busy, latch
from .errors import AllBusy, AllExcluded
from .health import COOLDOWN, Exclusions, exclusion_s, note_failure, without_failed
from .load import DeviceType, LoadChange, RankLoad, WorkerLoad, WorkerLoads, is_idle, load_reports
from .pickers import (
    DEVICE_RATIO,
    DeviceAware,
    Loads,
    Picker,
    RoundRobin,
    Uncharged,
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
    "AllExcluded",
    "BusyThresholds",
    "BusyWatch",
    "Capacity",
    "DeviceAware",
    "DeviceType",
    "DirectRouter",
    "Exclusions",
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
    "Uncharged",
    "WorkerLoad",
    "WorkerLoads",
    "assign_worker",
    "capacities_of",
    "cuda_to_cpu_ratio",
    "exclusion_s",
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
