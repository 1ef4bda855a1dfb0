"""Every error of the project: one tree, and one table of what each error may lead to.

::

    PenstockError
    ├── Unknown, InvalidArgument, Cancelled, StatusError
    ├── TransportError              the other side broke the request
    │   └── CannotConnect, ConnectionTimeout, Disconnected, ResponseTimeout
    ├── Refused                     the other side is reachable and refuses
    │   └── ResourceExhausted, WorkerOverloaded, Unavailable
    ├── BackendError                raised by engine code; one subclass per kind, `Backend<Kind>` in text
    ├── TransferFailed              KV blocks did not come from the worker that computed them
    ├── StreamClosed
    │   └── StreamBusy
    ├── BufferOverflow, ContractViolation, RegistryError
    ├── CodecError                  bytes or values that cannot be translated
    │   └── InvalidMessage, MessageTooLarge, ChecksumMismatch
    └── GraphError                  the graph is declared wrongly
        ├── LinkError, EdgeAlreadySet
        └── NoEdge
            └── NoNetworkEdge

A stream that ends normally raises none of these: iteration stops.

Source: dynamo lib/runtime/src/error.rs, DynamoError and match_error_chain. Other than there, an error keeps its class
when it crosses a process, and its facts are one table instead of one list per caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

from attrs import frozen

Cause: TypeAlias = BaseException | None

OVERLOADED = 529
"""HTTP status of overload (the original's default; 503 in its older releases)."""
CLIENT_CLOSED_REQUEST = 499
"""HTTP status of a request that its client has given up."""


@frozen
class ExceededLimit:
    """The limit that refused a request."""

    name: str
    """The setting's name."""
    value: float
    """The value of the request, counted at least to the threshold."""
    threshold: float


class PenstockError(Exception):
    """An error with a message, a stable type name and a chain of causes.

    The cause is Python's `__cause__` (`raise ... from ...`), or given as `cause`.
    """

    type_name: ClassVar[str] = "PenstockError"
    """The name on the wire and in texts. Default: the name of the class."""
    exceeded: ExceededLimit | None = None
    """The limit that refused the request, if there is one."""
    _by_name: ClassVar[dict[str, type[PenstockError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "type_name" not in cls.__dict__:
            cls.type_name = cls.__name__
        taken = PenstockError._by_name.get(cls.type_name)
        if taken is not None and taken.__module__ == __name__:
            raise TypeError(f"{cls.type_name} is the name of an error of the project; on the wire it would be that one")
        PenstockError._by_name[cls.type_name] = cls

    def __init__(self, message: str = "", *, exceeded: ExceededLimit | None = None, cause: Cause = None) -> None:
        super().__init__(message)
        self.message = message
        if exceeded is not None:
            self.exceeded = exceeded
        if cause is not None:
            self.__cause__ = cause

    def __str__(self) -> str:
        return self.message

    def render(self) -> str:
        """Return `<Type>: <message>` of this link of the chain only."""
        return f"{self.type_name}: {self.message}"

    @property
    def facts(self) -> Facts:
        """The row of `FACTS` for this error: that of its class, else of its nearest base."""
        return next(FACTS[cls] for cls in type(self).__mro__ if cls in FACTS)


class Unknown(PenstockError):
    """An exception from outside the tree, or an error of a type this process does not know."""


class InvalidArgument(PenstockError):
    """The request is wrong, and will be at every worker. `field`: the wrong place (`messages[2].content`), or empty."""

    def __init__(
        self, message: str = "", *, field: str = "", exceeded: ExceededLimit | None = None, cause: Cause = None
    ) -> None:
        super().__init__(message, exceeded=exceeded, cause=cause)
        self.field = field


class Cancelled(PenstockError):
    """The caller stopped or killed the request before there was an answer."""


class StatusError(PenstockError):
    """An engine requests a certain HTTP status. The message of 400 to 498 is shown to the client."""

    def __init__(self, message: str = "", *, status: int = 500, cause: Cause = None) -> None:
        super().__init__(message, cause=cause)
        self.status = status


class TransportError(PenstockError):
    """The other side broke the request."""


class CannotConnect(TransportError):
    """The other side never took the request."""


class ConnectionTimeout(TransportError):
    """The other side did not take the request in time."""


class Disconnected(TransportError):
    """The other side took the request and then vanished: its stream stopped without an end marker."""


class ResponseTimeout(TransportError):
    """The other side took the request and then sent nothing for too long."""


class Refused(PenstockError):
    """The other side is reachable and refuses the request."""


class ResourceExhausted(Refused):
    """Every eligible worker is busy."""


class WorkerOverloaded(Refused):
    """One worker is busy; another may not be."""


class Unavailable(Refused):
    """There is no worker that could take the request."""


class BackendError(PenstockError):
    """Raised by engine code. Each kind has a subclass, with the type name `Backend<Kind>`."""

    kind: ClassVar[str] = "Unknown"

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        cls.kind = kind
        cls.type_name = f"Backend{kind}"
        super().__init_subclass__(**kwargs)


class BackendUnknown(BackendError, kind="Unknown"):
    """The engine failed for an unknown reason."""


class BackendInvalidArgument(BackendError, kind="InvalidArgument"):
    """The engine refuses the request as wrong."""


class BackendCannotConnect(BackendError, kind="CannotConnect"):
    """The engine could not reach something it needs."""


class BackendDisconnected(BackendError, kind="Disconnected"):
    """The engine lost something it needs."""


class BackendConnectionTimeout(BackendError, kind="ConnectionTimeout"):
    """The engine waited too long for a connection of its own."""


class BackendResponseTimeout(BackendError, kind="ResponseTimeout"):
    """The engine waited too long for an answer of its own."""


class BackendCancelled(BackendError, kind="Cancelled"):
    """The engine gave the request up."""


class EngineShutdown(BackendError, kind="EngineShutdown"):
    """The engine shut down or crashed with requests in it."""


class StreamIncomplete(BackendError, kind="StreamIncomplete"):
    """The engine's stream ended without its terminal item."""


class TransferFailed(PenstockError):
    """The KV blocks of a prompt did not come from the worker that computed it; another start may succeed.

    Neither of the two workers is known to be at fault.
    """


class StreamClosed(PenstockError):
    """This process read a stream after closing it."""


class StreamBusy(StreamClosed):
    """Another task is reading this stream: read it from one task, and stop or kill its context to end it."""


class BufferOverflow(PenstockError):
    """A source pushed more than its reader took and its buffer holds."""


class ContractViolation(PenstockError):
    """A stage broke a numbered rule of its contract, named in `rule`."""

    def __init__(self, message: str = "", *, rule: str = "", cause: Cause = None) -> None:
        super().__init__(message, cause=cause)
        self.rule = rule


class RegistryError(PenstockError, LookupError):
    """A registry entry is missing, or not of the expected type."""


class CodecError(PenstockError):
    """Bytes or values that cannot be translated."""


class InvalidMessage(CodecError):
    """Bytes that are not a complete message."""


class MessageTooLarge(CodecError):
    """A message of `size_bytes`, more than the `limit_bytes` allowed."""

    def __init__(self, message: str = "", *, size_bytes: int = 0, limit_bytes: int = 0, cause: Cause = None) -> None:
        super().__init__(message or f"message of {size_bytes} bytes exceeds the limit of {limit_bytes}", cause=cause)
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class ChecksumMismatch(CodecError):
    """A frame whose checksum does not match its content."""


class GraphError(PenstockError):
    """The graph is declared wrongly."""


class LinkError(GraphError, TypeError):
    """Two neighbours do not fit."""


class EdgeAlreadySet(GraphError):
    """A second engine was attached to an end that takes one."""


class NoEdge(GraphError):
    """A request reached an end to which no engine is attached."""


class NoNetworkEdge(NoEdge):
    """A request reached a segment's network exit to which no engine is attached."""


@frozen
class Facts:
    """What an error may lead to."""

    retry: bool
    """The same request may be sent again and may then succeed."""
    migrate: bool | None
    """A broken stream may continue on another worker; None: never, whatever the other errors of the chain."""
    blames_worker: bool
    """The worker goes into cooldown."""
    status: int
    """HTTP status before the first byte."""
    shown: bool = False
    """The message is meant for the client."""


_NO = Facts(retry=False, migrate=False, blames_worker=False, status=500)
_BROKEN = Facts(retry=True, migrate=True, blames_worker=True, status=500)
_WRONG = Facts(retry=False, migrate=False, blames_worker=False, status=400, shown=True)

FACTS: dict[type[PenstockError], Facts] = {
    PenstockError: _NO,
    InvalidArgument: _WRONG,
    Cancelled: Facts(retry=False, migrate=None, blames_worker=False, status=CLIENT_CLOSED_REQUEST),
    TransportError: _BROKEN,
    ResourceExhausted: Facts(retry=True, migrate=None, blames_worker=False, status=OVERLOADED),
    WorkerOverloaded: Facts(retry=True, migrate=True, blames_worker=False, status=OVERLOADED),
    Unavailable: Facts(retry=True, migrate=False, blames_worker=False, status=503),
    BackendInvalidArgument: _WRONG,
    TransferFailed: Facts(retry=True, migrate=True, blames_worker=False, status=500),
    EngineShutdown: _BROKEN,
    StreamIncomplete: _BROKEN,
}
"""A class without a row has that of its nearest base."""


def error_type(type_name: str) -> type[PenstockError] | None:
    """Return the class with this type name, a user's own included; None if this process has none."""
    return PenstockError._by_name.get(type_name)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, outermost first. A cycle ends the iteration."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def match_chain(
    error: BaseException, wanted: Sequence[type[BaseException]], excluded: Sequence[type[BaseException]] = ()
) -> bool:
    """Return whether some link of the chain is `wanted` and none is `excluded`."""
    links = list(chain(error))
    if any(isinstance(link, tuple(excluded)) for link in links):
        return False
    return any(isinstance(link, tuple(wanted)) for link in links)


def may_migrate(error: BaseException) -> bool:
    """Return whether a request that failed with this chain may continue on another worker."""
    verdicts = [link.facts.migrate for link in chain(error) if isinstance(link, PenstockError)]
    return None not in verdicts and True in verdicts


def blames_worker(error: BaseException) -> bool:
    """Return whether the worker is at fault for this chain of errors."""
    return any(link.facts.blames_worker for link in chain(error) if isinstance(link, PenstockError))


def described(error: BaseException) -> str:
    """Return the error's text, never empty; with its class if it is not an Exception: `SystemExit: 3`."""
    text, name = str(error), type(error).__name__
    if not text:
        return name
    return text if isinstance(error, Exception) else f"{name}: {text}"


def ungrouped(error: BaseException) -> BaseException:
    """Return the error that represents an exception group, such as one of a task group; any other error unchanged.

    That is the only error in the group, however deeply nested, or the first of several of one class of this tree.
    Errors of different classes may lead to different things, so their group is returned.
    """
    errors = list(_leaves(error))
    first = errors[0]
    if len(errors) == 1 or (isinstance(first, PenstockError) and all(type(one) is type(first) for one in errors)):
        return first
    return error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, in order; of any other error the error itself."""
    todo = [error]
    while todo:
        one = todo.pop()
        if isinstance(one, BaseExceptionGroup):
            todo.extend(reversed(one.exceptions))
        else:
            yield one


def to_error(exception: BaseException) -> PenstockError:
    """Return the exception as an error of this tree.

    A PenstockError is returned unchanged, also from an exception group, see `ungrouped`. Any other exception becomes
    `Unknown` with its text and, as its cause, its own cause converted in the same way.
    """
    exception = ungrouped(exception)
    if isinstance(exception, PenstockError):
        return exception
    links = list(chain(exception))
    converted: PenstockError | None = None
    for link in reversed(links):
        converted = link if isinstance(link, PenstockError) else Unknown(described(link), cause=converted)
    assert converted is not None
    return converted
