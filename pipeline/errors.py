"""Every error of the project: one tree, and one table that says what each may lead to.

::

    PenstockError
    ├── Unknown                     a foreign exception, carried with its text and its causes
    ├── InvalidArgument             the caller's request is wrong; `field` names the offending place
    ├── Cancelled                   the caller stopped or killed the request before there was an answer
    ├── StatusError                 an engine asks for a certain HTTP status
    ├── TransportError              the other side broke it
    │   ├── CannotConnect           it never took the request
    │   ├── ConnectionTimeout       it did not take the request in time
    │   ├── Disconnected            it took the request and then vanished
    │   └── ResponseTimeout         it took the request and then fell silent
    ├── Refused                     the other side is there and says no
    │   ├── ResourceExhausted       every eligible worker is busy
    │   ├── WorkerOverloaded        this worker is busy
    │   └── Unavailable             there is no worker to ask
    ├── BackendError                raised by engine code; one subclass per kind, `Backend<Kind>` in text
    ├── StreamClosed                we closed it: a stream was used after its close
    │   └── StreamBusy              we are still reading it: a second reader, or a close during a read
    ├── BufferOverflow              a source pushed more than its reader took and its buffer holds
    ├── ContractViolation           a stage broke a numbered rule of its contract
    ├── RegistryError               a context registry entry is missing or of another type
    ├── CodecError                  bytes or values that cannot be translated
    │   ├── InvalidMessage, MessageTooLarge, ChecksumMismatch
    └── GraphError                  the graph is declared wrongly
        ├── LinkError               two stages do not fit: names both stages and both types
        ├── EdgeAlreadySet          a second engine was attached
        └── NoEdge                  a request reached an end where nothing is attached
            └── NoNetworkEdge       the same at a segment's exit to the network

A stream that simply ends raises none of these: it stops iterating.

Source: dynamo lib/runtime/src/error.rs, DynamoError and match_error_chain. Other than there, the error keeps its
class when it crosses a process, and the facts are one table instead of one list per caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from attrs import frozen

OVERLOADED = 529
"""HTTP status of overload (the original's default; 503 in its older releases)."""
CLIENT_CLOSED_REQUEST = 499
"""HTTP status of a request its client gave up on."""


@frozen
class ExceededLimit:
    """Why a limit refused a request: the setting's name, the value found, and the threshold it went beyond.

    Where the whole value would cost too much to find, `value` is as far as it was counted.
    """

    name: str
    value: float
    threshold: float


class PenstockError(Exception):
    """An error with a message, a stable type name and a chain of causes.

    `type_name` is what travels and what is shown; a subclass takes its class name unless it says otherwise.
    The cause is Python's own `__cause__` (`raise ... from ...`), or given as `cause`. `exceeded` is the limit that
    refused a request, where one did.
    """

    type_name: ClassVar[str] = "PenstockError"
    exceeded: ExceededLimit | None = None
    _by_name: ClassVar[dict[str, type[PenstockError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "type_name" not in cls.__dict__:
            cls.type_name = cls.__name__
        taken = PenstockError._by_name.get(cls.type_name)
        if taken is not None and taken.__module__ == __name__:
            raise TypeError(f"{cls.type_name} is the name of an error of the project; on the wire it would be that one")
        PenstockError._by_name[cls.type_name] = cls

    def __init__(self, message: str = "", *, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.message = message
        if cause is not None:
            self.__cause__ = cause

    def __str__(self) -> str:
        return self.message

    def render(self) -> str:
        """`<Type>: <message>` of this link of the chain only."""
        return f"{self.type_name}: {self.message}"

    @property
    def facts(self) -> Facts:
        """The row of `FACTS` that holds for this error: its class's, else its nearest base's."""
        return next(FACTS[cls] for cls in type(self).__mro__ if cls in FACTS)


class Unknown(PenstockError):
    """An exception from outside the tree, or an error of a type this process does not know."""


class InvalidArgument(PenstockError):
    """The request is wrong and will be wrong everywhere.

    `field` is the path of the offending place (`messages[2].content`), empty where there is none.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        exceeded: ExceededLimit | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.field = field
        self.exceeded = exceeded


class Cancelled(PenstockError):
    """The caller stopped or killed the request before or while we waited for an answer."""


class StatusError(PenstockError):
    """An engine asks for a certain HTTP status; 400 to 498 are shown to the client with their message."""

    def __init__(self, message: str = "", *, status: int = 500, cause: BaseException | None = None) -> None:
        super().__init__(message, cause=cause)
        self.status = status


class TransportError(PenstockError):
    """The other side broke it."""


class CannotConnect(TransportError):
    """The request could not be handed over."""


class ConnectionTimeout(TransportError):
    """The connection was not made in time."""


class Disconnected(TransportError):
    """A stream stopped without its end marker."""


class ResponseTimeout(TransportError):
    """An open stream brought nothing for too long."""


class Refused(PenstockError):
    """The other side answered, and refused."""

    def __init__(
        self, message: str = "", *, exceeded: ExceededLimit | None = None, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.exceeded = exceeded


class ResourceExhausted(Refused):
    """Every eligible worker is busy."""


class WorkerOverloaded(Refused):
    """One worker is busy; another may not be."""


class Unavailable(Refused):
    """No worker can be asked at all."""


class BackendError(PenstockError):
    """Raised by engine code. Each kind has its subclass, shown as `Backend<Kind>`."""

    kind: ClassVar[str] = "Unknown"

    def __init_subclass__(cls, *, kind: str, **kwargs: Any) -> None:
        cls.kind = kind
        cls.type_name = f"Backend{kind}"
        super().__init_subclass__(**kwargs)


class BackendUnknown(BackendError, kind="Unknown"):
    """The engine failed and did not say how."""


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


class StreamClosed(PenstockError):
    """We closed this stream ourselves; reading on is a mistake of this process."""


class StreamBusy(StreamClosed):
    """Another task is inside this stream now: read it from one task, and stop or kill its context to end it."""


class BufferOverflow(PenstockError):
    """A source pushed more than its reader took and its buffer holds."""


class ContractViolation(PenstockError):
    """A stage broke a numbered rule of its contract, named in `rule`."""

    def __init__(self, message: str = "", *, rule: str = "", cause: BaseException | None = None) -> None:
        super().__init__(message, cause=cause)
        self.rule = rule


class RegistryError(PenstockError, LookupError):
    """A registry entry is missing, or is not of the type asked for."""


class CodecError(PenstockError):
    """Bytes or values that cannot be translated."""


class InvalidMessage(CodecError):
    """Bytes that are not a message, or not a whole one."""


class MessageTooLarge(CodecError):
    """A message of `size_bytes` where at most `limit_bytes` may pass."""

    def __init__(
        self, message: str = "", *, size_bytes: int = 0, limit_bytes: int = 0, cause: BaseException | None = None
    ) -> None:
        super().__init__(message or f"message of {size_bytes} bytes exceeds the limit of {limit_bytes}", cause=cause)
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class ChecksumMismatch(CodecError):
    """A frame whose checksum is not that of its content."""


class GraphError(PenstockError):
    """The graph itself is declared wrongly."""


class LinkError(GraphError, TypeError):
    """Two neighbours do not fit."""


class EdgeAlreadySet(GraphError):
    """An end that takes one engine was given a second."""


class NoEdge(GraphError):
    """A request reached an end where no engine is attached."""


class NoNetworkEdge(NoEdge):
    """A request reached a segment's network exit and no engine is attached there."""


@frozen
class Facts:
    """What an error may lead to.

    `retry`: the same request may be sent again and may then succeed. `migrate`: a broken stream may go on elsewhere
    (None: never, whatever else stands in the chain). `blames_worker`: the worker is left out for a while.
    `status`: HTTP status before the first byte. `shown`: its message is meant for the client.
    """

    retry: bool
    migrate: bool | None
    blames_worker: bool
    status: int
    shown: bool = False


_NO = Facts(retry=False, migrate=False, blames_worker=False, status=500)
_BROKEN = Facts(retry=True, migrate=True, blames_worker=True, status=500)
_WRONG = Facts(retry=False, migrate=False, blames_worker=False, status=400, shown=True)

# Names without a row have their nearest base's.
FACTS: dict[type[PenstockError], Facts] = {
    PenstockError: _NO,
    InvalidArgument: _WRONG,
    Cancelled: Facts(retry=False, migrate=None, blames_worker=False, status=CLIENT_CLOSED_REQUEST),
    TransportError: _BROKEN,
    ResourceExhausted: Facts(retry=True, migrate=None, blames_worker=False, status=OVERLOADED),
    WorkerOverloaded: Facts(retry=True, migrate=True, blames_worker=False, status=OVERLOADED),
    Unavailable: Facts(retry=True, migrate=False, blames_worker=False, status=503),
    BackendInvalidArgument: _WRONG,
    EngineShutdown: _BROKEN,
    StreamIncomplete: _BROKEN,
}


def error_type(type_name: str) -> type[PenstockError] | None:
    """The class that is shown under this name, one of a user's own included; None if this process has none."""
    return PenstockError._by_name.get(type_name)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, outermost first; a cycle ends the walk."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def match_chain(
    error: BaseException,
    wanted: Sequence[type[BaseException]],
    excluded: Sequence[type[BaseException]] = (),
) -> bool:
    """Whether some link of the chain is `wanted` and no link at all is `excluded`."""
    links = list(chain(error))
    if any(isinstance(link, tuple(excluded)) for link in links):
        return False
    return any(isinstance(link, tuple(wanted)) for link in links)


def may_migrate(error: BaseException) -> bool:
    """Whether a request that failed with this chain may go on with another worker."""
    verdicts = [link.facts.migrate for link in chain(error) if isinstance(link, PenstockError)]
    return None not in verdicts and True in verdicts


def blames_worker(error: BaseException) -> bool:
    """Whether this chain says that the worker itself is at fault."""
    return any(link.facts.blames_worker for link in chain(error) if isinstance(link, PenstockError))


def described(error: BaseException) -> str:
    """The error's text, never empty. One that is no Exception carries its class: `SystemExit: 3`."""
    text, name = str(error), type(error).__name__
    if not text:
        return name
    return text if isinstance(error, Exception) else f"{name}: {text}"


def ungrouped(error: BaseException) -> BaseException:
    """Return the error that an exception group stands for, as one raised in a task group; any other error as it is.

    That is the only error in the group, however deeply nested, or the first of several that are all of one class of
    the tree. Errors that differ may lead to different things, so their group is returned itself.
    """
    errors = list(_leaves(error))
    first = errors[0]
    if len(errors) == 1 or (isinstance(first, PenstockError) and all(type(one) is type(first) for one in errors)):
        return first
    return error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group that are no groups, in order; the error itself if it is none."""
    todo = [error]
    while todo:
        one = todo.pop()
        if isinstance(one, BaseExceptionGroup):
            todo.extend(reversed(one.exceptions))
        else:
            yield one


def to_error(exception: BaseException) -> PenstockError:
    """The exception as one of the tree.

    One of ours is returned as it is, also out of an exception group, see `ungrouped`. Any other becomes `Unknown` with
    its text and, as cause, its own cause converted the same way.
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
