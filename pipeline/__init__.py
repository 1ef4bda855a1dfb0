"""The core of Penstock: contexts, streams, engines, operators, and linking them into graphs.

The errors listed here are those that stages usually raise or catch; all of them are in `pipeline.errors`.
"""

from .annotated import Annotated
from .cancellation import unless_killed, until_killed
from .cancellation import until_stopped as until_stopped
from .context import AnyContext, Context, Registry
from .control import KILLED as KILLED
from .control import RUNNING as RUNNING
from .control import Control, ReleaseOnce, State
from .engine import AsyncEngine, function_engine
from .errors import (
    BackendError,
    Cancelled,
    CannotConnect,
    ContractViolation,
    Disconnected,
    EngineShutdown,
    GraphError,
    InvalidArgument,
    LinkError,
    PenstockError,
    ResourceExhausted,
    ResponseTimeout,
    StreamClosed,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
    to_error,
)
from .graph import Segment, link
from .operator import Operator, identity, map_request, map_response
from .stage import Stage
from .stream import Gate as Gate
from .stream import ResponseStream
from .stream import Take as Take
from .stream import Watch as Watch

__all__ = [
    "Annotated",
    "AnyContext",
    "AsyncEngine",
    "BackendError",
    "Cancelled",
    "CannotConnect",
    "Context",
    "ContractViolation",
    "Control",
    "Disconnected",
    "EngineShutdown",
    "GraphError",
    "InvalidArgument",
    "LinkError",
    "Operator",
    "PenstockError",
    "Registry",
    "ReleaseOnce",
    "ResourceExhausted",
    "ResponseStream",
    "ResponseTimeout",
    "Segment",
    "Stage",
    "State",
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
