"""OpenRequests: counts the open requests, in all and of each client, and checks the time limits of each.

    admit(client) ──► OpenRequest, a context manager: counted, and checked now and then once `watched` is set

A request is open from its head to the end of its answer, so one whose body is still read is counted too. One timer
serves all requests of an app; it runs only while a request is open.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from types import TracebackType
from typing import Protocol, Self

from pipeline import ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.loop import clock

from ..limits import HttpLimits
from .problems import Refusal
from .side_task import call_later

RETRY_AFTER_S = 1.0
"""When a refused client may try again: requests end all the time."""


class TooManyOpen(ResourceExhausted):
    """As many requests are open as the server takes. `retry_after_s` is when to try again."""

    retry_after_s = RETRY_AFTER_S


class TooManyOfClient(Refusal):
    """As many requests of this client are open as it may have. `retry_after_s` is when to try again."""

    retry_after_s = RETRY_AFTER_S


class Watched(Protocol):
    """A request that can exceed a limit of time."""

    def check_time(self, now_s: float) -> None:
        """End the request if it is beyond a limit, by the loop's clock. Called in its loop; must not wait or raise."""


class OpenRequest:
    """Counts one request as open while its block runs."""

    __slots__ = ("_client", "_open", "watched")

    def __init__(self, open_requests: OpenRequests, client: str) -> None:
        self._open = open_requests
        self._client = client
        self.watched: Watched | None = None
        """Checked every period; None before there is an answer to watch."""

    def __enter__(self) -> Self:
        self._open._add(self, self._client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watched = None
        self._open._remove(self, self._client)


class OpenRequests:
    """The open requests of one app, within `max_open_requests` and `max_open_requests_per_client`.

    Watched requests are checked every `period_s`.
    """

    def __init__(self, limits: HttpLimits, period_s: float) -> None:
        self._limits = limits
        self._period_s = period_s
        self._requests: set[OpenRequest] = set()
        self._of_client: dict[str, int] = {}
        self._cancel_timer: Callable[[], object] | None = None
        self._now: Callable[[], float] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def of_client(self, client: str) -> int:
        """Return the number of open requests of this client."""
        return self._of_client.get(client, 0)

    def admit(self, client: str) -> OpenRequest:
        """Return a context manager that counts one more request of this client.

        Raise TooManyOpen (overload) or TooManyOfClient (429) if that would be too many.
        """
        found = len(self._requests) + 1
        if 0 < (limit := self._limits.max_open_requests) < found:
            raise TooManyOpen("too many open requests", exceeded=ExceededLimit("max_open_requests", found, limit))
        found = self._of_client.get(client, 0) + 1
        if 0 < (limit := self._limits.max_open_requests_per_client) < found:
            exceeded = ExceededLimit("max_open_requests_per_client", found, limit)
            raise TooManyOfClient(429, "Too many open requests of this client", exceeded=exceeded)
        return OpenRequest(self, client)

    def _add(self, request: OpenRequest, client: str) -> None:
        self._requests.add(request)
        self._of_client[client] = self._of_client.get(client, 0) + 1
        if self._cancel_timer is None and isfinite(self._period_s):
            self._now = clock()
            self._cancel_timer = call_later(self._period_s, self._check_all)

    def _remove(self, request: OpenRequest, client: str) -> None:
        self._requests.discard(request)
        if (left := self._of_client[client] - 1) > 0:
            self._of_client[client] = left
        else:
            del self._of_client[client]
        if not self._requests and self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None

    def _check_all(self) -> None:
        self._cancel_timer = call_later(self._period_s, self._check_all)
        assert self._now is not None, "set with the timer"
        now_s = self._now()
        for request in list(self._requests):
            if request.watched is not None:
                request.watched.check_time(now_s)
