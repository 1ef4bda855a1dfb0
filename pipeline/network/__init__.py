"""How a graph crosses processes: names, discovery, the request plane, the event plane, and `Runtime` over them.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from .discovery import Added as Added
from .discovery import Model
from .discovery import Removed as Removed
from .discovery import TaintsUpdated as TaintsUpdated
from .events import Event, EventPlane, Missed, Scope
from .names import EndpointId, Instance
from .objects import ObjectName, Objects
from .objects import name_of as name_of
from .runtime import Runtime, Served
from .runtime import withdraw_all as withdraw_all
from .workers import EndpointWorkers, Workers, static_workers
from .workers import Ids as Ids
from .workers import Members as Members
from .workers import Reach as Reach

__all__ = [
    "EndpointId",
    "EndpointWorkers",
    "Event",
    "EventPlane",
    "Instance",
    "Missed",
    "Model",
    "ObjectName",
    "Objects",
    "Runtime",
    "Scope",
    "Served",
    "Workers",
    "static_workers",
]
