"""Connections: the open connections of one server, their limits in common, and the clock of their time-outs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv6Address, ip_address
from itertools import islice
from typing import Any, Protocol

from attrs import evolve

from pipeline.errors import ExceededLimit

from ..limits import HttpLimits
from ..problems import Problem, Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

Refused = Callable[[Problem, str], object]
"""Called with each problem that ends a request or a connection here, and the address of its client."""

NEVER = math.inf

_SLOWEST_SWEEP_S = 1.0
_SWEEPS_PER_TIMEOUT = 8
_WRITE_CHECKS_PER_TIMEOUT = 4
_CUT_AT_ONCE = 100
"""Connections ended in one turn of the loop; each takes about 50 us."""
_IPV6_NETWORK_BITS = 64

_ANSWERED_BEYOND_LIMIT, _ANSWERED_BEYOND_CLIENT_LIMIT = 64, 16
"""Connections beyond a limit that still get an answer; each takes a file until its client has read it."""


class Sweepable(Protocol):
    """A connection for the sweep, which calls `overdue` once the deadline has passed."""

    deadline_s: float

    def overdue(self, now_s: float) -> None: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...

    def end_if_idle(self, since_s: float) -> bool: ...


class Connections:
    """The open connections of one server.

    One timer sweeps over all of them, instead of one timer each: `now_s` is the time of its last turn, and a time-out
    takes at least as long as its setting and up to two turns more. Connections are counted by address, with IPv6 by
    network of 64 bits; those of `trusted` peers, which are proxies, count only in all.
    """

    def __init__(
        self,
        limits: HttpLimits,
        *,
        refused: Refused = lambda problem, client: None,
        trusted: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self.limits = limits
        self.refused = refused
        self.now_s = 0.0
        self._trusted = trusted
        self.open: dict[Sweepable, str | None] = {}
        """Each connection with the client it is counted for, None if only in all."""
        self._by_client: dict[str, int] = {}
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        times_s = (
            limits.tls_handshake_timeout_s,
            limits.head_timeout_s,
            limits.body_timeout_s,
            limits.keep_alive_timeout_s,
            limits.write_timeout_s,
        )
        shortest_s = min((time_s for time_s in times_s if time_s), default=NEVER)
        self._period_s = min(_SLOWEST_SWEEP_S, shortest_s / _SWEEPS_PER_TIMEOUT)
        self.handshake_s, self.head_s, self.body_s, self.keep_alive_s, self.write_s = map(self._waiting_s, times_s)
        self.write_check_s = self.write_s / _WRITE_CHECKS_PER_TIMEOUT
        self.body_window_bytes = limits.min_body_bytes_per_s * limits.body_timeout_s

    def _waiting_s(self, timeout_s: float) -> float:
        """Return what to add to `now_s`, which may be a turn old, for the deadline of this time-out."""
        return timeout_s + self._period_s if timeout_s else NEVER

    @property
    def open_now(self) -> list[Sweepable]:
        """The connections that are open now; they may end while the list is read."""
        return list(self.open)

    # -- counting

    def add(self, connection: Sweepable, address: str | None) -> Problem | None:
        """Count a connection until `remove`. Return the problem that refuses it, if it is one too many."""
        client, of_client = self._client(address), 0
        self.open[connection] = client
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self.now_s = loop.time()
            self._timer = loop.call_later(self._period_s, self._sweep)
        if client is not None:
            of_client = self._by_client[client] = self._by_client.get(client, 0) + 1
        return self._too_many(len(self.open), of_client)

    def remove(self, connection: Sweepable) -> None:
        """Count the connection no longer."""
        client = self.open.pop(connection, None)
        if client is not None:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    def is_flooded(self, connection: Sweepable) -> bool:
        """Return whether so many are beyond a limit that this one should be cut without an answer."""
        limits, client = self.limits, self.open[connection]
        if 0 < limits.max_connections < len(self.open) - _ANSWERED_BEYOND_LIMIT:
            return True
        most = limits.max_connections_per_client
        return client is not None and 0 < most < self._by_client[client] - _ANSWERED_BEYOND_CLIENT_LIMIT

    def _client(self, address: str | None) -> str | None:
        """Return the client that this peer's connections are counted for, None if only in all."""
        if address is None or not self.limits.max_connections_per_client or self._trusted(address):
            return None
        return client_of(address)

    def _too_many(self, count: int, of_client: int) -> Problem | None:
        limits = self.limits
        if 0 < limits.max_connections < count:
            exceeded = ExceededLimit("max_connections", count, limits.max_connections)
            return _later(Refusal(503, "Too many connections are open", exceeded=exceeded))
        if 0 < limits.max_connections_per_client < of_client:
            exceeded = ExceededLimit("max_connections_per_client", of_client, limits.max_connections_per_client)
            return _later(Refusal(429, "This client has too many connections open", exceeded=exceeded))
        return None

    def abort(self) -> None:
        """Cut all connections."""
        for connection in self.open_now:
            connection.abort()

    # -- bodies

    def take_body(self, size_bytes: int) -> Problem | None:
        """Count bytes of a body. Return the problem that refuses its request if all bodies hold too many."""
        self._body_bytes += size_bytes
        limit_bytes = self.limits.max_body_bytes_in_flight
        if 0 < limit_bytes < self._body_bytes:
            exceeded = ExceededLimit("max_body_bytes_in_flight", self._body_bytes, limit_bytes)
            return _later(Refusal(503, "The requests that are open hold too many bytes", exceeded=exceeded))
        return None

    def give_back_body(self, size_bytes: int) -> None:
        """Stop counting the bytes: the answer is complete, or the request is dropped."""
        self._body_bytes -= size_bytes

    # -- time

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = self.now_s = loop.time()
        overdue = list(islice((each for each in self.open if each.deadline_s <= now_s), _CUT_AT_ONCE))
        for connection in overdue:
            connection.overdue(now_s)
        if not self.open:
            self._timer = None
            return
        pause_s = 0.0 if len(overdue) == _CUT_AT_ONCE else self._period_s
        self._timer = loop.call_later(pause_s, self._sweep)


def _later(refusal: Refusal) -> Problem:
    return evolve(refusal.problem, retry_after_s=1)


def client_of(address: str) -> str:
    """Return the client that connections of an address count for: the address, or the network of an IPv6 address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> _IPV6_NETWORK_BITS << _IPV6_NETWORK_BITS))
