"""The core of Penstock: contexts, streams, engines, operators, and linking them into graphs.

Of the errors, those that the names here raise and those that operators and engines usually raise or catch; all of them
are in `pipeline.errors`.
"""

from .annotated import Annotated
from .cancellation import unless_killed, until_killed
from .context import AnyContext, Context, Registry
from .control import Control, ReleaseOnce, State
from .engine import AsyncEngine, ErasedEngine, function_engine
from .errors import (
    BackendError,
    Cancelled,
    CannotConnect,
    CodecError,
    ConnectionTimeout,
    ContractViolation,
    Disconnected,
    EdgeAlreadySet,
    EngineShutdown,
    GraphError,
    InvalidArgument,
    LinkError,
    NoEdge,
    PenstockError,
    RegistryError,
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
from .graph import Chain, LateEngine, Segment, SegmentSink, link
from .operator import Operator, identity, map_request, map_response
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
    "EdgeAlreadySet",
    "EngineShutdown",
    "ErasedEngine",
    "GraphError",
    "InvalidArgument",
    "LateEngine",
    "LinkError",
    "NoEdge",
    "Operator",
    "PenstockError",
    "Registry",
    "RegistryError",
    "ReleaseOnce",
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
    "unless_killed",
    "until_killed",
]
