"""The KV router as a service: messages, gauges, and the server side."""

from .gauges import ROUTER_GAUGES, RouterGauges
from .messages import (
    BackpressureResponse,
    FreeMarked,
    LoadsRequest,
    LoadsResponse,
    MarkFree,
    MarkPrefill,
    NewRequest,
    NewResponse,
    PrefillMarked,
    QueueRejectedResponse,
    QueueRejection,
    RouterRequest,
    RouterResponse,
)
from .service import RouterService

__all__ = [
    "ROUTER_GAUGES",
    "BackpressureResponse",
    "FreeMarked",
    "LoadsRequest",
    "LoadsResponse",
    "MarkFree",
    "MarkPrefill",
    "NewRequest",
    "NewResponse",
    "PrefillMarked",
    "QueueRejectedResponse",
    "QueueRejection",
    "RouterGauges",
    "RouterRequest",
    "RouterResponse",
    "RouterService",
]
