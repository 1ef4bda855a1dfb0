"""How a graph crosses processes: names, discovery, the request plane, the event plane, and `Runtime` over them."""

from .discovery import Added, Discovery, Lease, Model, Removed, TaintsUpdated
from .event_plane import Event, EventPlane, Publisher, Scope, Sequences
from .names import EndpointId, Instance, detect_device_type
from .request_plane import RequestPlane, Serving
from .runtime import Runtime
from .served import Served
from .store import Change, Gone, Put, Store, Written
from .workers import EndpointWorkers, Ids, Workers, static_workers

__all__ = [
    "Added",
    "Change",
    "Discovery",
    "EndpointId",
    "EndpointWorkers",
    "Event",
    "EventPlane",
    "Gone",
    "Ids",
    "Instance",
    "Lease",
    "Model",
    "Publisher",
    "Put",
    "Removed",
    "RequestPlane",
    "Runtime",
    "Scope",
    "Sequences",
    "Served",
    "Serving",
    "Store",
    "TaintsUpdated",
    "Workers",
    "Written",
    "detect_device_type",
    "static_workers",
]
