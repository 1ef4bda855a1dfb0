"""TcpRequestPlane: engines reached over TCP, or over a unix socket on the same machine.

caller ──► engine of an instance ──► one connection for each other process ──► TcpServing ──► engine
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread
from attrs import evolve

from pipeline import AsyncEngine, Cancelled, CannotConnect, Context, InvalidArgument, ResponseStream, unless_killed
from pipeline.errors import InvalidMessage
from pipeline.rx import AnyIOScheduler

from ..log_limit import LogLimit
from ..names import Instance
from ..requests import CallMeter, KeptConnection, RequestPlane, Serving
from .calls import RemoteCall
from .connection import Connection
from .items import ItemReader, item_reader, payload_type
from .links import Address, Listener, Network
from .machine import machine_id
from .messages import CallHead
from .options import TcpOptions
from .peer import Peer
from .peers import Outgoing
from .service import ServedCall, ServedConnection
from .serving import TcpServing
from .shared import Shared
from .socket_folder import SOCKET_NAME, new_socket_folder
from .sockets import SocketNetwork

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics

Out = TypeVar("Out")

_log = logging.getLogger(__name__)
_FAULT_LINES = 10
"""Lines of log for connections closed for faults, in some seconds."""
_PROCESS_BYTES = 8
"""Random bytes of a process's name."""
_UNPROVED_MAX = 256
"""Connections that may be open at a time without having proved that they know the token."""


class TcpRequestPlane(RequestPlane):
    """Instances of this process for other processes, and the engines of theirs.

    `metrics`, of the component family, count the requests of each instance served here. `network` makes the
    connections: by default sockets. `scheduler` runs the calls.

    The instances it serves are announced with `transport` =
    `{"tcp": "host:port", "process": name, "unix": path, "host": machine}`; a caller on the same machine takes the unix
    socket. A process of another name at these addresses, as the next one at a fixed port, gets no calls of theirs:
    CannotConnect. One connection to each process carries all calls to it. It is made by the first one, and again after
    its loss; or ahead of calls where it is kept.
    """

    def __init__(
        self,
        scheduler: AnyIOScheduler,
        options: TcpOptions | None = None,
        metrics: Metrics | None = None,
        *,
        network: Network | None = None,
    ) -> None:
        self.options = options or TcpOptions()
        self._scheduler = scheduler
        self._metrics = metrics
        self._network = network or SocketNetwork(scheduler, self.options)
        faults = LogLimit(_log, lines=_FAULT_LINES)
        self._shared = Shared(scheduler, self.options, faults, process=token_hex(_PROCESS_BYTES))
        self._outgoing = Outgoing(self._shared, self._network)
        self.serving: dict[str, TcpServing] = {}
        """The instances served here, by key."""
        self._incoming: set[Connection] = set()
        self._listeners: list[Listener] = []
        self._folder: Path | None = None
        self._transport: dict[str, str] = {}
        self._is_closed = False

    @property
    def transport(self) -> dict[str, str]:
        """The addresses and the name of this process, as instances announce them. Empty before `open`."""
        return dict(self._transport)

    @property
    def open_calls(self) -> int:
        """Number of calls that are open, of both directions."""
        return sum(connection.calls for connection in (*self._incoming, *self._outgoing.connections()))

    async def open(self) -> None:
        self._is_closed = False
        options = self.options
        try:
            listener = await self._network.listen(Address(options.host, options.port), self._accept)
            self._listeners.append(listener)
            announced = Address(options.announced_host or listener.address.host, listener.address.port)
            self._transport = {"tcp": str(announced), "process": self._shared.process}
            if options.has_unix_socket:
                await self._listen_on_a_path()
        except OSError as error:
            await self.close()
            raise CannotConnect(f"cannot listen on {options.host}:{options.port}: {error}", cause=error) from error
        if not options.token and options.tls_ca_path is None and not _is_local(options.host):
            _log.warning("%s: every process that reaches this address is served; set a token", announced)

    async def _listen_on_a_path(self) -> None:
        self._folder = await to_thread.run_sync(new_socket_folder)
        path = str(self._folder / SOCKET_NAME)
        try:
            self._listeners.append(await self._network.listen(Address(path=path), self._accept))
        except OSError as error:  # such as a path too long for a socket: callers here take the address, then
            _log.warning("no unix socket at %s: %s", path, error)
        else:
            self._transport |= {"unix": path, "host": machine_id()}

    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        if instance.key in self.serving:
            raise InvalidArgument(f"{instance} is served already", field="instance_id")
        takes = payload_type(engine)
        meter = None if self._metrics is None else CallMeter(self._metrics, instance)
        reachable = evolve(instance, transport=self.transport)
        serving = self.serving[instance.key] = TcpServing(reachable, engine, takes, meter, self._forget)
        return reachable, serving

    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        return _RemoteEngine(self._outgoing, instance, item_reader(item_type, self.options.join_max_tokens))

    def keep_connected(self, instance: Instance, on_change: Callable[[], object]) -> KeptConnection:
        return self._outgoing.keep(instance, on_change)

    async def close(self) -> None:
        self._is_closed = True
        for serving in list(self.serving.values()):
            serving.cut()
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        await _close_all([*self._incoming, *self._outgoing.close()], self.options.close_timeout_s)
        if (folder := self._folder) is not None:
            self._folder = None
            shutil.rmtree(folder, ignore_errors=True)

    def _accept(self) -> ServedConnection:
        connection = ServedConnection(self._shared, self._serve, self._incoming.discard)
        if self._is_closed:  # it was on its way when the listener was closed
            connection.abort()
        elif sum(not one.is_open for one in self._incoming) >= _UNPROVED_MAX:
            connection.fail(InvalidMessage("too many connections have not proved yet that they know the token"))
        else:
            self._incoming.add(connection)
        return connection

    async def _serve(self, call: ServedCall, head: CallHead) -> None:
        if (serving := self.serving.get(head.instance)) is None:
            call.fail(CannotConnect(f"{head.instance} is not served here"))
        else:
            await serving.take(call, head)

    def _forget(self, serving: TcpServing) -> None:
        if self.serving.get(serving.instance.key) is serving:
            del self.serving[serving.instance.key]


async def _close_all(connections: list[Connection], timeout_s: float) -> None:
    """Close the connections once what waits has been sent, or after the time."""
    for end in (Connection.close, Connection.abort):
        for connection in connections:
            end(connection)
        with anyio.move_on_after(timeout_s):
            for connection in connections:
                await connection.closed()


def _is_local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


class _RemoteEngine(AsyncEngine[Any, Any]):
    """One instance, as an engine for its callers."""

    def __init__(self, outgoing: Outgoing, instance: Instance, reader: ItemReader) -> None:
        self._outgoing = outgoing
        self._instance = instance
        self._reader = reader
        self._peer: Peer | None = None

    def __str__(self) -> str:
        return str(self._instance)

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        if request.is_killed:
            raise Cancelled("killed before it was sent")
        connection = None if self._peer is None else self._peer.connection
        if connection is None:  # a process with a connection stays the same
            peer = self._peer = self._outgoing.peer(self._instance)
            if (connection := peer.connection) is None:
                connection = await unless_killed(peer.connect(), request)
        return await RemoteCall(connection, self._instance, request, self._reader).begin()
