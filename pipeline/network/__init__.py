"""How a graph crosses processes: names, discovery, the request plane, the event plane, and `Runtime` over them."""

from .discovery import Added, Model, Removed, TaintsUpdated
from .events import Event, EventPlane, Scope
from .names import EndpointId, Instance
from .runtime import Runtime, Served
from .workers import EndpointWorkers, Ids, Members, Workers, static_workers

__all__ = [
    "Added",
    "EndpointId",
    "EndpointWorkers",
    "Event",
    "EventPlane",
    "Ids",
    "Instance",
    "Members",
    "Model",
    "Removed",
    "Runtime",
    "Scope",
    "Served",
    "TaintsUpdated",
    "Workers",
    "static_workers",
]
