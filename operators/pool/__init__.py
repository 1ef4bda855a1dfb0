"""A pool of workers: which are healthy, how loaded they are, and which one gets a request.

What is imported under its own name again is for sibling packages, or is offered by `operators`.
"""

from .assigned import Next as Next
from .assigned import Output as Output
from .assigned import assign_worker
from .busy import BusyWatch
from .errors import AllBusy as AllBusy
from .errors import AllCoolingDown as AllCoolingDown
from .health import COOLDOWN as COOLDOWN
from .health import InstanceHealth as InstanceHealth
from .load import WorkerLoads, load_reports
from .pickers import DEVICE_RATIO as DEVICE_RATIO
from .pickers import DeviceAware as DeviceAware
from .pickers import Loads
from .pickers import Picker as Picker
from .pickers import RoundRobin as RoundRobin
from .pickers import least_loaded as least_loaded
from .pickers import power_of_two as power_of_two
from .pickers import random_pick as random_pick
from .push_router import PushRouter as PushRouter
from .push_router import RouterMode as RouterMode
from .rejection import OVERLOAD_STATUS as OVERLOAD_STATUS
from .rejection import Rejection as Rejection
from .view import Adapters as Adapters
from .view import Configs as Configs
from .view import PoolCards, PoolView, cards_of
from .view import PoolViews as PoolViews

__all__ = [
    "BusyWatch",
    "Loads",
    "PoolCards",
    "PoolView",
    "WorkerLoads",
    "assign_worker",
    "cards_of",
    "load_reports",
]
