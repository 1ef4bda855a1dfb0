"""The core of Penstock: contexts, streams, engines, operators, and linking them into graphs."""

from .annotated import Annotated
from .context import AnyContext, Context
from .control import Control, State
from .engine import AsyncEngine, ErasedEngine, function_engine
from .errors import (
    BackendError,
    Cancelled,
    CannotConnect,
    CodecError,
    ConnectionTimeout,
    ContractViolation,
    Disconnected,
    EngineShutdown,
    GraphError,
    InvalidArgument,
    LinkError,
    PenstockError,
    ResourceExhausted,
    ResponseTimeout,
    StatusError,
    StreamBusy,
    StreamClosed,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
    to_error,
)
from .once import Once
from .operator import Operator, identity, map_request, map_response
from .racing import until_killed
from .registry import Registry
from .segment import Chain, LateEngine, Segment, SegmentSink, link
from .stage import Stage
from .stream import ResponseStream

__all__ = [
    "Annotated",
    "AnyContext",
    "AsyncEngine",
    "BackendError",
    "Cancelled",
    "CannotConnect",
    "Chain",
    "CodecError",
    "ConnectionTimeout",
    "Context",
    "ContractViolation",
    "Control",
    "Disconnected",
    "EngineShutdown",
    "ErasedEngine",
    "GraphError",
    "InvalidArgument",
    "LateEngine",
    "LinkError",
    "Once",
    "Operator",
    "PenstockError",
    "Registry",
    "ResourceExhausted",
    "ResponseStream",
    "ResponseTimeout",
    "Segment",
    "SegmentSink",
    "Stage",
    "State",
    "StatusError",
    "StreamBusy",
    "StreamClosed",
    "StreamIncomplete",
    "Unavailable",
    "Unknown",
    "WorkerOverloaded",
    "function_engine",
    "identity",
    "link",
    "map_request",
    "map_response",
    "to_error",
    "until_killed",
]
