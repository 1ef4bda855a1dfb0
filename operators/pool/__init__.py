"""A pool of workers: which are healthy, how loaded they are, and which one gets a request."""

from .assigned import Next, Output, assign_worker
from .busy import BusyWatch
from .errors import AllBusy, AllCoolingDown
from .health import COOLDOWN, InstanceHealth
from .load import WorkerLoads, load_reports
from .pickers import (
    DEVICE_RATIO,
    DeviceAware,
    Loads,
    Picker,
    RoundRobin,
    least_loaded,
    power_of_two,
    random_pick,
)
from .push_router import PushRouter, RouterMode
from .rejection import OVERLOAD_STATUS, Rejection
from .view import Adapters, Configs, PoolCards, PoolView, PoolViews, cards_of

__all__ = [
    "COOLDOWN",
    "DEVICE_RATIO",
    "OVERLOAD_STATUS",
    "Adapters",
    "AllBusy",
    "AllCoolingDown",
    "BusyWatch",
    "Configs",
    "DeviceAware",
    "InstanceHealth",
    "Loads",
    "Next",
    "Output",
    "Picker",
    "PoolCards",
    "PoolView",
    "PoolViews",
    "PushRouter",
    "Rejection",
    "RoundRobin",
    "RouterMode",
    "WorkerLoads",
    "assign_worker",
    "cards_of",
    "least_loaded",
    "load_reports",
    "power_of_two",
    "random_pick",
]
