"""Client: the connections to one server, whose errors become those of the tree; and Address, the URL of a server.

Each concurrent request has a connection, which is kept for the next one. The first answer counts: the client follows no
redirect, uses no proxy, keeps no cookie, and reads neither `.netrc` nor the environment.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import lru_cache

import httpcore2
import httpx2
from attrs import frozen

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import CannotConnect, ConnectionTimeout, Disconnected, InvalidMessage, ResponseTimeout

from .transport import Http1Transport


@frozen
class Address:
    """The scheme, host and port of a server, and the path above its API."""

    url: httpx2.URL

    @classmethod
    def parse(cls, text: str, *, field: str = "upstream") -> Address:
        """Return the address in a URL, with or without `/v1` at its end.

        Raise InvalidArgument, which names the setting `field`, for any other text.
        """
        if "@" in text:  # no message shows a password
            raise InvalidArgument("a user and a password do not fit in the URL; the API key is sent", field=field)
        shown = text.partition("?")[0]  # nor a key behind it
        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL as error:
            raise InvalidArgument(f"{shown!r} is no URL: {error}", field=field) from error
        if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
            raise InvalidArgument(f"expected a URL such as http://127.0.0.1:8000, got {shown!r}", field=field)
        if url.query or url.fragment or not _is_plain(text):
            raise InvalidArgument(f"a scheme, a host, a port and a path are all that fit, got {shown!r}", field=field)
        return cls(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"), query=None, fragment=None))

    def __str__(self) -> str:
        return str(self.url).rstrip("/")


def _is_plain(text: str) -> bool:
    """Return whether the text can stand in the first line of a request unchanged."""
    return text.isascii() and text.isprintable() and " " not in text


Transport = httpx2.AsyncBaseTransport

IDLE_S = 4.0
"""How long a connection is kept for another request; the most common servers keep it for 5 s."""

CONNECT_S = 10.0

_ENDS = ("Server disconnected", "peer closed connection")
"""Beginnings of the message when the server closed the connection; httpx2 has the same class for invalid HTTP."""

_HEADERS = {"user-agent": "penstock", "accept-encoding": "identity"}  # compressed answers arrive late


class Client:
    """The connections to one server. Closing it closes every connection.

    `silence_s` is the longest wait for any byte, and for a connection no more than `CONNECT_S`. `transport` replaces
    the network.
    """

    def __init__(self, address: Address, silence_s: float, transport: Transport | None = None) -> None:
        self.address, self._silence_s = address, silence_s
        self._connect_s = min(CONNECT_S, silence_s)
        self.in_flight = 0
        """Number of requests that are sent, or whose answers are read, now."""
        self.is_closed = False
        self._transport = network() if transport is None else transport
        self._timeout_s = {"connect": self._connect_s, "read": silence_s, "write": silence_s, "pool": None}
        self._url = lru_cache(maxsize=64)(lambda path: httpx2.URL(f"{address}{path}"))

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> httpx2.Response:
        """Send a request to a path below the address, and return the response when its head is there."""
        extensions = {"timeout": self._timeout_s}
        request = httpx2.Request(
            method, self._url(path), headers={**_HEADERS, **headers}, content=body, extensions=extensions
        )
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        self.is_closed = True
        await self._transport.aclose()

    def problem(self, error: httpx2.TransportError) -> PenstockError:
        """Return the error of the tree: CannotConnect with the system's reason, ConnectionTimeout, ResponseTimeout,
        Disconnected, or InvalidMessage for invalid HTTP."""
        match error:
            case httpx2.ConnectTimeout():
                return ConnectionTimeout(f"{self.address} took no connection within {self._connect_s:g} s")
            case httpx2.ConnectError():
                return CannotConnect(f"no connection to {self.address}: {_reason(error)}")
            case httpx2.TimeoutException():
                return ResponseTimeout(f"the server sent nothing for {self._silence_s:g} s")
            case httpx2.NetworkError():
                return Disconnected("the connection broke")
            case _ if str(error).startswith(_ENDS):
                return Disconnected("the connection was closed before there was an answer")
        return InvalidMessage(f"the answer is no HTTP: {error}")


def network(backend: httpcore2.AsyncNetworkBackend | None = None) -> Transport:
    """Return a transport over TCP; with TLS for https, by the system's certificates. `backend` replaces TCP."""
    return Http1Transport(IDLE_S, backend)


def _reason(error: BaseException) -> str:
    """Return the system's own reason, which libraries wrap into errors of their own."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        below = error.__cause__ or (None if isinstance(error, OSError) else error.__context__)
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else below
    if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    # Errors of name resolution have numbers below zero; loops word the others differently.
    is_system = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if is_system else error.strerror or str(error)
