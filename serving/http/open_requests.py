"""The requests of an app: whether they are taken, how many are open, and how long each may take.

    Availability.admit(context)      unless the program drains
    OpenRequests.admit(client)       within the limits in all and of each client ──► OpenRequest, a context manager
    RequestClock                     compares a request with its state at the last check: the limit it exceeded

A request is open from its head to the end of its answer, so one whose body is still read is counted too. One timer
checks all requests of an app; it runs only while a request is open.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from math import inf, isfinite
from typing import Self

import anyio
from attrs import define, field, frozen

from pipeline import AnyContext, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.loop import clock

from ..limits import HttpLimits
from ..problems import Refusal
from .options import HttpOptions
from .side_task import TIMER_ERROR_S, call_later


class Phase(StrEnum):
    """The phase of a program's life; it only moves forward."""

    READY = "ready"
    """Requests are taken."""
    HANDING_OVER = "handing_over"
    """Requests are still taken; probes are answered as while draining."""
    DRAINING = "draining"
    """No new request is taken; those that run may finish."""
    STOPPING = "stopping"
    """Requests that still run are killed."""


class Availability:
    """The phase of a program and its running requests."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self._running: dict[int, AnyContext] = {}
        self._idle = anyio.Event()

    @property
    def in_flight(self) -> int:
        """Number of requests that run now."""
        return len(self._running)

    def admit(self, context: AnyContext) -> None:
        """Count the request as running until `leave`. Raise Refusal (503) as `check` does."""
        self.check()
        self._running[id(context)] = context

    def leave(self, context: AnyContext) -> None:
        """Count the request no longer."""
        del self._running[id(context)]
        if self.phase not in (Phase.READY, Phase.HANDING_OVER) and not self._running:
            self._idle.set()

    def check(self) -> None:
        """Raise Refusal (503) once requests are not taken any more."""
        if self.phase not in (Phase.READY, Phase.HANDING_OVER):
            raise Refusal(503, "Service is not ready")

    def hand_over(self) -> None:
        """Begin the end for probes alone: clients go elsewhere while their requests are still taken."""
        if self.phase is Phase.READY:
            self.phase = Phase.HANDING_OVER

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; return once none runs. Requests that still run after `grace_s` are killed."""
        if self.phase in (Phase.READY, Phase.HANDING_OVER):
            self.phase = Phase.DRAINING
        if self._running:
            with anyio.move_on_after(grace_s):
                await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Kill the requests that still run."""
        self.phase = Phase.STOPPING
        for context in list(self._running.values()):
            context.kill()


RETRY_AFTER_S = 1.0
"""When a refused client may try again: requests end all the time."""


class TooManyOpen(ResourceExhausted):
    """As many requests are open as the server takes. `retry_after_s` is when to try again."""

    retry_after_s = RETRY_AFTER_S


class TooManyOfClient(Refusal):
    """As many requests of this client are open as it may have. `retry_after_s` is when to try again."""

    retry_after_s = RETRY_AFTER_S


@define(eq=False)
class OpenRequest:
    """Counts one request as open while its block runs."""

    _open: OpenRequests
    _client: str
    check_time: Callable[[float], object] | None = field(init=False, default=None)
    """Called every period with the loop's time; it ends a request that is beyond a limit, and must not wait or raise.

    None before there is an answer to watch.
    """

    def __enter__(self) -> Self:
        self._open._add(self, self._client)
        return self

    def __exit__(self, *_: object) -> None:
        self.check_time = None
        self._open._remove(self, self._client)


class OpenRequests:
    """The open requests of one app, within `max_open_requests` and `max_open_requests_per_client`.

    Their time is checked every `period_s`.
    """

    def __init__(self, limits: HttpLimits, period_s: float) -> None:
        self._limits = limits
        self._period_s = period_s
        self.open: set[OpenRequest] = set()
        self.by_client: dict[str, int] = {}
        """Number of open requests by client."""
        self._cancel_timer: Callable[[], object] | None = None
        self._now: Callable[[], float] | None = None

    def admit(self, client: str) -> OpenRequest:
        """Return a context manager that counts one more request of this client.

        Raise TooManyOpen (overload) or TooManyOfClient (429) if that would be too many.
        """
        found = len(self.open) + 1
        if 0 < (limit := self._limits.max_open_requests) < found:
            raise TooManyOpen("too many open requests", exceeded=ExceededLimit("max_open_requests", found, limit))
        found = self.by_client.get(client, 0) + 1
        if 0 < (limit := self._limits.max_open_requests_per_client) < found:
            exceeded = ExceededLimit("max_open_requests_per_client", found, limit)
            raise TooManyOfClient(429, "Too many open requests of this client", exceeded=exceeded)
        return OpenRequest(self, client)

    def _add(self, request: OpenRequest, client: str) -> None:
        self.open.add(request)
        self.by_client[client] = self.by_client.get(client, 0) + 1
        if self._cancel_timer is None and isfinite(self._period_s):
            self._now = clock()
            self._cancel_timer = call_later(self._period_s, self._check_all)

    def _remove(self, request: OpenRequest, client: str) -> None:
        self.open.discard(request)
        if (left := self.by_client[client] - 1) > 0:
            self.by_client[client] = left
        else:
            del self.by_client[client]
        if not self.open and self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None

    def _check_all(self) -> None:
        self._cancel_timer = call_later(self._period_s, self._check_all)
        assert self._now is not None, "set with the timer"
        now_s = self._now()
        for request in list(self.open):
            if request.check_time is not None:
                request.check_time(now_s)


_CHECKS_PER_LIMIT = 4
"""Checks within the shortest limit: a limit takes effect at most a quarter of it late."""


@frozen
class TimeLimits:
    """The limits of one app in seconds, infinite where there is none."""

    write_s: float = inf
    """One write to a client."""
    silence_s: float = inf
    """Without an item of the engine."""
    request_s: float = inf
    """The request as a whole."""

    @classmethod
    def of(cls, options: HttpOptions) -> TimeLimits:
        """Return the limits in the options. `silence_timeout_s` of the options overrides that of their `limits`."""
        limits, silence_s = options.limits, options.silence_timeout_s
        return cls(
            limits.write_timeout_s or inf,
            limits.silence_timeout_s or inf if silence_s is None else silence_s,
            limits.request_timeout_s or inf,
        )

    @property
    def period_s(self) -> float:
        """Seconds between two checks of a request; infinite if nothing is limited."""
        return min(self.write_s, self.silence_s, self.request_s) / _CHECKS_PER_LIMIT


@define(eq=False)
class RequestClock:
    """The state of one request at its last check, and since when it has been so. It only decides."""

    _limits: TimeLimits
    _began_s: float
    _items_s: float = field(init=False)
    _write_s: float = field(init=False)
    _items: int = field(init=False, default=0)
    _write: object = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._items_s = self._write_s = self._began_s

    def stalled_write(self, now_s: float, write: object) -> ExceededLimit | None:
        """Return the limit if the same write is under way for too long; None stands for no write."""
        if write is None or write is not self._write:
            self._write, self._write_s = write, now_s
            return None
        return _beyond("write_timeout_s", now_s - self._write_s, self._limits.write_s)

    def silence(self, now_s: float, items: int, *, is_excused: bool) -> ExceededLimit | None:
        """Return the limit if the number of items is unchanged for too long and no check found an excuse."""
        if items != self._items or is_excused:
            self._items, self._items_s = items, now_s
            return None
        return _beyond("silence_timeout_s", now_s - self._items_s, self._limits.silence_s)

    def lasted_too_long(self, now_s: float) -> ExceededLimit | None:
        """Return the limit if the request as a whole has taken too long."""
        return _beyond("request_timeout_s", now_s - self._began_s, self._limits.request_s)


def _beyond(name: str, value_s: float, limit_s: float) -> ExceededLimit | None:
    return ExceededLimit(name, round(value_s, 3), limit_s) if value_s > limit_s - TIMER_ERROR_S else None
