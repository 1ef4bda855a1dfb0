"""How a graph crosses processes: names, discovery, the request plane, the event plane, and `Runtime` over them."""

from .discovery import Added, Change, Model, Put, Removed, TaintsUpdated
from .events import Event, EventPlane, Publisher, Scope, Sequences
from .names import EndpointId, Instance
from .requests import Serving
from .runtime import Runtime, Served
from .workers import EndpointWorkers, Ids, Workers, static_workers

__all__ = [
    "Added",
    "Change",
    "EndpointId",
    "EndpointWorkers",
    "Event",
    "EventPlane",
    "Ids",
    "Instance",
    "Model",
    "Publisher",
    "Put",
    "Removed",
    "Runtime",
    "Scope",
    "Sequences",
    "Served",
    "Serving",
    "TaintsUpdated",
    "Workers",
    "static_workers",
]
