"""BrokerSession: one connection to one NATS server, from its handshake to its loss. It is never connected again.

The door of nats-py. That client's own reconnect is not used: it sends what it has buffered without a word about what
was lost, ends for good at some errors of the server, and waits without bound for a server that has stopped reading.

Every call ends with `Unavailable` at the loss of the connection or at its deadline.
"""

from __future__ import annotations

import logging
import math
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import nats.errors
from anyio import CancelScope
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from pipeline import CannotConnect, PenstockError, Unavailable
from pipeline.errors import described
from pipeline.loop import Wakeup, clock

from .broker_messages import Messages
from .broker_streams import Streams
from .options import NatsOptions, ServerAddress

_log = logging.getLogger(__name__)

OLDEST_SERVER = (2, 11)
"""The first version with a time to live for each message."""
_END_TIMEOUT_S = 1.0
_CLOSED_TIMEOUT_S = 0.1
_NO_LIMIT_S = 3600.0
"""What nats-py is given as timeouts: the deadlines are those of `call`."""


class PermanentRefusal(CannotConnect):
    """The server cannot be used, however often it is tried."""


class _Transport(TcpTransport):
    """nats-py's, which can be cut, and whose failures to write are left to the reader of the same socket.

    Otherwise the client's `close` stops halfway: at a write that fails, or for ever at a server that reads nothing.
    """

    def __bool__(self) -> bool:
        return True  # otherwise the client makes one of its own

    def abort(self) -> None:
        """Cut the connection, whatever is still to be written."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()

    def write(self, payload: bytes) -> None:
        if not self._is_closing:
            super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: Iterable[bytes]) -> None:
        if not self._is_closing:
            super().writelines(payload)  # type: ignore[no-untyped-call]

    @property
    def _is_closing(self) -> bool:
        """Whether a write would raise: that of uvloop does."""
        return self._io_writer is None or self._io_writer.is_closing()

    async def drain(self) -> None:
        with suppress(OSError):
            await super().drain()  # type: ignore[no-untyped-call]

    async def wait_closed(self) -> None:
        with suppress(OSError), anyio.move_on_after(_CLOSED_TIMEOUT_S):  # it never comes after a failed handshake
            await super().wait_closed()  # type: ignore[no-untyped-call]


class BrokerSession(Messages):
    """See the module. `on_slow` is called for each message that was dropped because its reader was too slow."""

    def __init__(self, address: ServerAddress, options: NatsOptions, on_slow: Callable[[], None]) -> None:
        client, self._transport = Client(), _Transport()  # type: ignore[no-untyped-call]
        # The attribute has no public name.
        client._transport = self._transport
        super().__init__(client, address, options)
        self.lost = anyio.Event()
        self.loss = ""
        """Why the connection was lost."""
        self._on_slow, self._clock = on_slow, clock()
        self._scopes: set[CancelScope] = set()
        self._closed = anyio.Event()
        self._last_error: Exception | None = None
        self.streams: Streams
        """What the server stores."""
        self._answered_s = self.steady_since_s = self._clock()

    # -- connecting

    async def connect(self, timeout_s: float) -> None:
        """Connect and check the server. Raise PermanentRefusal for one that will not do, CannotConnect otherwise."""
        try:
            with anyio.fail_after(timeout_s):
                await self._client.connect(**self._arguments(timeout_s))
                self.streams = Streams(self, self._client.jetstream(timeout=_NO_LIMIT_S))
                self._check_version()
                if not await self.streams.account():
                    raise PermanentRefusal(f"{self.address} runs without JetStream: start it with --jetstream")
        except BaseException as error:
            await self.end()
            if isinstance(error, PenstockError) or not isinstance(error, Exception):
                raise
            raise self._translated(error) from None  # its text and its causes may hold the login
        self._answered_s = self.steady_since_s = self._clock()

    def _arguments(self, timeout_s: float) -> dict[str, Any]:
        options, address = self.options, self.address
        arguments: dict[str, Any] = {
            "servers": [str(address)],
            "name": options.name,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "connect_timeout": math.ceil(timeout_s),
            "ping_interval": _NO_LIMIT_S,  # the session has a heartbeat of its own
            "error_cb": self._failed,
            "closed_cb": self._ended,
        }
        if options.tls is not None:
            arguments["tls"] = options.tls
        if options.credentials_file is not None:
            arguments["user_credentials"] = str(options.credentials_file)
        elif options.token is not None or options.user is not None:
            arguments |= self._login(options.token, options.user, options.password)
        else:
            arguments |= self._login(address.token, address.user, address.password)
        return arguments

    def _login(self, token: str | None, user: str | None, password: str | None) -> dict[str, Any]:
        """Return the login as functions, called just before it is sent: never in the clear where TLS was ordered."""

        def sent(secret: str) -> Callable[[], str]:
            def checked() -> str:
                self._check_tls()
                return secret

            return checked

        found = {"token": token, "user": user, "password": None if user is None else password or ""}
        return {name: sent(secret) for name, secret in found.items() if secret is not None}

    def _check_tls(self) -> None:
        is_ordered = self.options.tls is not None or self.address.is_tls
        if is_ordered and not self._client._server_info.get("tls_required"):
            raise PermanentRefusal(f"{self.address} offers no TLS")

    def _check_version(self) -> None:
        self._check_tls()
        version = self._client.connected_server_version
        with suppress(ValueError):
            if (version.major, version.minor) >= OLDEST_SERVER:
                return
        wanted = ".".join(map(str, OLDEST_SERVER))
        raise PermanentRefusal(f"{self.address} is {version!r}; penstock needs nats-server {wanted} or newer")

    def _translated(self, error: Exception) -> CannotConnect:
        where, last = str(self.address), self._last_error
        reason = described(last if isinstance(error, nats.errors.NoServersError) and last is not None else error)
        if isinstance(error, TimeoutError):
            reason = "no answer in time"
        if isinstance(error, ssl.SSLError):
            return PermanentRefusal(f"{where} cannot be trusted: {reason}")
        if "authorization" in reason.lower() or "authentication" in reason.lower():
            return PermanentRefusal(f"{where} refuses the login: {reason}")
        return CannotConnect(f"{where} cannot be reached: {reason}")

    # -- its end

    def lose(self, reason: str) -> None:
        """Cut the connection: every call ends with Unavailable. A second loss does nothing."""
        if self.lost.is_set():
            return
        self.loss = reason
        self.lost.set()
        for scope in list(self._scopes):
            scope.cancel()
        self._transport.abort()

    async def end(self) -> None:
        """Close the connection, in order if the server still reads. A cancellation waits until this is done."""
        with CancelScope(shield=True):
            with anyio.move_on_after(_END_TIMEOUT_S / 2 if not self.lost.is_set() else 0) as patience:
                if not self._client.is_closed and self._client.is_connected:
                    await self._client.flush(math.ceil(_END_TIMEOUT_S))
            if patience.cancelled_caught:
                self._transport.abort()
            self.lose("closed")
            with anyio.move_on_after(_END_TIMEOUT_S):
                await self._client.close()
                await self._closed.wait()

    async def _failed(self, error: Exception) -> None:
        """Called by nats-py for every error that belongs to no call."""
        self._last_error = error
        if isinstance(error, nats.errors.SlowConsumerError):
            self._on_slow()
            self._dropped.get(error.sub, lambda: None)()
        elif isinstance(error, nats.errors.UnexpectedEOF):
            self.lose("the server closed it")
        else:
            _log.debug("%s: %s", self.address, type(error).__name__)

    async def _ended(self) -> None:
        """Called by nats-py once it has closed the connection."""
        self._closed.set()
        self.lose(described(self._client.last_error) if self._client.last_error is not None else "closed")

    async def beat(self) -> None:
        """Send the server a message to ourselves at each heartbeat, until the connection is lost.

        nats-py's pings will not do: one that is given up ends the client when its answer comes after all.
        """
        with suppress(Unavailable), self.call():
            inbox, heard = self.new_inbox(), Wakeup()
            await self.subscribe(inbox, lambda _: heard.wake(), messages=2, size_bytes=0)
            while True:
                await self._beat_once(inbox, heard)
                await anyio.sleep(self.options.heartbeat_s)

    async def _beat_once(self, inbox: str, heard: Wakeup) -> None:
        with anyio.move_on_after(self.options.lost_after_s) as patience:
            await self.publish(inbox, b"")
            await heard.wait()
        if patience.cancelled_caught:
            self.lose(f"no answer for {self.options.lost_after_s:g} s")
        was_steady, self._answered_s = self.is_steady, self._clock()
        if not was_steady:
            self.steady_since_s = self._answered_s

    @property
    def is_steady(self) -> bool:
        """Whether the last answered heartbeat is younger than two: neither the server nor this process has paused."""
        return self._clock() - self._answered_s <= 2 * self.options.heartbeat_s

    # -- calls

    @contextmanager
    def call(self, timeout_s: float = math.inf) -> Iterator[None]:
        """End the block with Unavailable at the loss of the connection, at the deadline and at errors of the server."""
        with CancelScope(deadline=self._clock() + timeout_s) as scope:
            self._scopes.add(scope)
            try:
                if self.lost.is_set():
                    raise self._unavailable()
                yield
            except PenstockError:
                raise
            except Exception as error:
                raise Unavailable(f"{self.address}: {described(error)}") from error
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            if self.lost.is_set():
                raise self._unavailable()
            raise Unavailable(f"{self.address} has not answered within {timeout_s:g} s")

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the connection to {self.address} is lost: {self.loss}")
