"""The request plane: how a request reaches an instance and its items come back.

caller ──► AsyncEngine of an instance ──►  plane  ──► Serving ──► engine
caller ◄── items, stop, kill, close   ◄──►  ...  ◄──►         ◄── items

CallMeter: the component metrics of one instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anyio.lowlevel import checkpoint
from attrs import define, field

from pipeline import AsyncEngine, CannotConnect, Take
from pipeline.loop import clock
from pipeline.protocols import worker_label

from .names import Instance

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics


Out = TypeVar("Out")


class Serving(ABC):
    """An engine that takes requests of one instance, until it is cut."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that have not ended."""

    @abstractmethod
    def refuse(self) -> None:
        """Refuse new requests: callers get CannotConnect. Running requests continue."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait until no request is running."""

    @abstractmethod
    def cut(self) -> None:
        """Refuse new requests and end the running ones: the engine's are killed, callers get Disconnected."""


Connectivity = Literal["connected", "connecting", "unreachable"]
"""Whether there is a connection to a process. `connecting`: none yet, or it was lost, and nothing speaks against it;
`unreachable`: the process refused one, or has not answered for a while."""


class KeptConnection(ABC):
    """A connection to an instance's process that a request plane opens ahead of requests, and again after each loss."""

    @property
    @abstractmethod
    def state(self) -> Connectivity:
        """Whether it is there."""

    @property
    @abstractmethod
    def losses(self) -> int:
        """How often it was lost after it had been there. A request that was sent before the last loss may end by it."""

    def retry(self) -> None:  # noqa: B027  (some have nothing to try)
        """Have the next attempt without the pause before it, as far as one was not made a moment ago.

        Does nothing while there is a connection or an attempt, and where none can be made.
        """

    @abstractmethod
    def close(self) -> None:
        """Open it no more; one that is there stays. Does nothing the second time."""


class RequestPlane(ABC):
    """See the module."""

    async def open(self) -> None:
        """Listen for callers. Called once, before anything else. Raise CannotConnect if that is not possible."""
        await checkpoint()

    @abstractmethod
    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        """Take requests for the instance from now on. Return the instance with its `transport`.

        Payloads that cross as bytes are read as the type that the engine declares. Raise
        InvalidArgument if this process serves the instance already.
        """

    @abstractmethod
    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        """Return the instance as an engine, which holds the engine contract.

        Items that cross as bytes are read as the type.
        Stop, kill and close of the caller reach the instance's engine. An error comes back as its own class, foreign
        ones as `Unknown`. An instance that cannot be reached raises CannotConnect when it is called; one that is lost
        while it answers makes the read raise Disconnected, unless the caller has stopped the request. Only
        payload, id, metadata and trace of the context cross.
        """

    def keep_connected(self, instance: Instance, on_change: Callable[[], object]) -> KeptConnection | None:
        """Keep a connection to the instance's process until the result is closed; call `on_change` after each change.

        `on_change` raises nothing. Return None from a plane without connections, as this one.
        """
        return None

    @abstractmethod
    async def close(self) -> None:
        """Cut all requests that this process serves, and close every connection."""


def not_found(name: str, instance_id: int) -> CannotConnect:
    """Return the error for an absent instance."""
    return CannotConnect(f"instance_id={instance_id} not found for endpoint {name}")


TOKEN_BYTES = 4
"""Bytes counted for a token id: an unsigned 32-bit integer."""


@define(eq=False, slots=True)
class MeteredCall:
    """One call: when it began, by the loop's clock, and how many tokens have come back."""

    begun_s: float
    tokens: int = 0
    _take: Take | None = field(default=None, init=False)

    def relay(self, take: Take) -> Take:
        """Return what takes plain tokens and counts them: see `ResponseStream.feed`."""
        self._take = take
        return self._take_token

    def _take_token(self, *parts: Any) -> bool:
        take = self._take
        assert take is not None, "the stream is fed"
        if not take(*parts):
            return False
        self.tokens += 1
        return True


def count_taken(call: MeteredCall | None, take: Take) -> Take:
    """Return what takes plain tokens and counts those of a metered call."""
    return take if call is None else call.relay(take)


class CallMeter:
    """Counts the calls of an instance, in the `component` family. Made in the loop in which the calls end.

    Its counters are fields here, read when metrics are read: adding to a counter of OpenTelemetry costs much more. They
    are shown as long as the metrics exist.

    Bytes are those of token ids, 4 for each: the embedded runtime passes requests and items by reference, so they have
    no size on a wire. Payloads without token ids count as 0.

    Source: dynamo lib/runtime/src/pipeline/network/ingress, WorkHandlerMetrics.
    """

    def __init__(self, metrics: Metrics, instance: Instance) -> None:
        self._clock = clock()
        self._labels = labels = {
            "dynamo_namespace": instance.namespace,
            "dynamo_component": instance.component,
            "dynamo_endpoint": instance.endpoint,
            "worker_id": worker_label(instance.instance_id),
        }
        self._requests = self._request_tokens = self._response_tokens = 0
        metrics.observe_counter("requests_total", lambda: [(labels, self._requests)] if self._requests else [])
        self._inflight = metrics.recorder("inflight_requests", **labels)
        metrics.observe_counter("request_bytes_total", lambda: self._bytes(self._request_tokens))
        metrics.observe_counter("response_bytes_total", lambda: self._bytes(self._response_tokens))
        self._duration = metrics.recorder("request_duration_seconds", **labels)
        self._cancellations = metrics.recorder("cancellation_total", **labels)
        self._errors = metrics.recorder("errors_total", **labels, error_type="generate")

    def begun(self, payload: Any) -> MeteredCall:
        """Record the begin of a call with this payload. The result is passed to `ended`."""
        self._requests += 1
        self._inflight(1)
        if token_ids := getattr(payload, "token_ids", None):
            self._request_tokens += len(token_ids)
        return MeteredCall(self._clock())

    def ended(self, call: MeteredCall, *, cancelled: bool) -> None:
        """Record the end of the call; `cancelled` if its caller ended it."""
        self._inflight(-1)
        self._duration(self._clock() - call.begun_s)
        self._response_tokens += call.tokens
        if cancelled:
            self._cancellations(1)

    def _bytes(self, tokens: int) -> list[tuple[Mapping[str, str], float]]:
        return [(self._labels, TOKEN_BYTES * tokens)] if tokens else []

    def failed(self) -> None:
        """Record a failure of the engine, before or in its answer."""
        self._errors(1)
