"""How a graph crosses processes: names, discovery, the request plane, the event plane, and `Runtime` over them."""

from .discovery import Added, Change, Discovery, Gone, Lease, Model, Put, Removed, Store, TaintsUpdated, Written
from .events import Event, EventPlane, Publisher, Scope, Sequences
from .names import EndpointId, Instance, detect_device_type
from .requests import RequestPlane, Serving
from .runtime import Runtime, Served
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
