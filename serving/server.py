"""Running an app as a program: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, cast

import anyio
import uvicorn
from anyio.abc import TaskGroup

from engines.worker import ProcessWatch, termination_signals
from pipeline.settings import Variable, number, whole

from .http import Availability
from .limits import HttpLimits
from .listeners import BACKLOG
from .listeners import listen as listen
from .listeners import url_of as url_of
from .open_files import OpenFiles
from .problems import Problem
from .socket import AppHost, Connection, Connections, PortShares, SharedListener

_uvicorn_log = logging.getLogger("uvicorn.error")

GRACE = Variable(
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    5.0,
    "Seconds that running requests have after the first signal.",
    whole(0, 10**9, unit=1.0),
)

HAND_OVER: Variable[float | None] = Variable(
    "PENSTOCK_HTTP_HAND_OVER_SECS",
    None,
    "Seconds after the first signal in which requests are still taken; each answer closes its connection. 1 for a front"
    " end that shares its port with others, else 0.",
    number(0),
)

_FLUSH_S = 2
"""How long killed requests may send their last bytes."""

_CUT_OFF_S = 1
"""How long a cancelled request may take to end."""

_LOOK_EVERY_S = 0.05
"""Between two looks at the connections that are left."""

DEFAULT_LIMITS = HttpLimits()


_NEEDED_OF_SERVER = ("server_state", "started", "startup", "on_tick", "shutdown", "should_exit", "force_exit")


def _check_uvicorn() -> None:
    """Raise ImportError if uvicorn lacks what `_Uvicorn` needs of it."""
    server = uvicorn.Server(uvicorn.Config("", log_config=None, lifespan="off"))
    needed: list[tuple[object, str]] = [(server, name) for name in _NEEDED_OF_SERVER]
    needed += [(server.server_state, name) for name in ("connections", "tasks", "default_headers")]
    if lacking := [name for owner, name in needed if not hasattr(owner, name)]:
        raise ImportError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(lacking)}; see pyproject.toml for its range"
        )


_check_uvicorn()


class HttpServer:
    """uvicorn around an app, on a listening socket that it closes in the end.

    uvicorn starts and ends it; connections are ours, within `limits`.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        *,
        is_first: bool = True,
        is_shared: bool = False,
        shares: PortShares | None = None,
        limits: HttpLimits = DEFAULT_LIMITS,
        refused: Callable[[Problem, str], object] = lambda problem, client: None,
        trusted: Callable[[str], bool] = lambda address: False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`refused` gets each problem that ends a connection outside the app, and the client's address.

        `trusted` returns whether an address is a proxy's, which has no limit of connections per client. `tls`: None for
        plain HTTP. `is_first`: whether this server of the process's servers logs that no files are left. `is_shared`:
        whether other processes take connections from the listener too, which have those in `shares`.
        """
        self._listener = listener
        self.url = url_of(listener, "http" if tls is None else "https")
        config = uvicorn.Config(
            application,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        self._open_files = OpenFiles(listener.fileno()) if is_first else None
        self._is_over = False
        self._connections = Connections(limits, refused=refused, trusted=trusted)
        self._server = _Uvicorn(application, config, self._open_files, self._connections, tls, is_shared, shares)
        self._is_shared = is_shared

    async def run(self) -> None:
        """Serve until `stop`; asyncio only. Answers under way then get a short time before they are cut off."""
        level, loop = _uvicorn_log.level, asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        if self._open_files is not None:
            loop.set_exception_handler(self._open_files.handler(handler))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._server.stop_listening()
            self._listener.close()
            try:
                await self._cut_off()
            finally:
                self._is_over = True
                self._connections.abort()
                _uvicorn_log.setLevel(level)
                if self._open_files is not None:
                    loop.set_exception_handler(handler)

    async def hand_over(self, idle_s: float, longer_s: float) -> None:
        """Prepare an end that no client notices: each connection gets one more answer, whose head closes it.

        Clients then connect again, to another process. A connection is closed once it was without a request for
        `idle_s`; one whose answer began before, which allowed a further request, has that time after it. If the
        listener is shared, new connections are left to others at once, and this returns when no request can come any
        more, else not before `idle_s`. It takes at most `idle_s` and `longer_s` together.
        """
        host, began_s = self._server.host, anyio.current_time()
        if self._is_shared:
            self._server.stop_listening()
        host.is_draining = host.is_handing_over = True
        may_come = True
        with anyio.move_on_after(idle_s + longer_s):
            while may_come:
                await anyio.sleep(_LOOK_EVERY_S)
                since_s = anyio.current_time() - idle_s
                is_early = since_s < began_s
                coming = [each.end_if_idle(-math.inf if is_early else since_s) for each in self._connections.open_now]
                may_come = any(coming) or (is_early and not self._is_shared)
        host.is_handing_over = False
        for connection in self._connections.open_now:
            connection.shutdown()

    def count_connections(self) -> int:
        """Return the number of open connections. Any thread may call it."""
        return len(self._connections.open)

    def stop(self, *, at_once: bool = False) -> None:
        """End `run`; with `at_once`, without waiting for connections. Connections that are cut off are not logged."""
        if not self._is_over:
            _uvicorn_log.setLevel(logging.CRITICAL)
        self._server.should_exit = True
        if at_once:
            self._server.force_exit = True

    async def _cut_off(self) -> None:
        """Cancel the answers under way, so that their streams are closed before the graph is."""
        if answers := list(self._server.server_state.tasks):
            for answer in answers:
                answer.cancel()
            await asyncio.wait(answers, timeout=_CUT_OFF_S)


class _Uvicorn(uvicorn.Server):
    """uvicorn's start, clock and end around connections of our own; without its signal handling.

    It relies on undocumented parts: `servers` and `started`, which `startup` sets; `server_state`, whose `connections`
    its end lists and whose `tasks` it awaits; `server_state.default_headers`, renewed each second; `on_tick`, called
    ten times a second, and `shutdown`, called once. `_check_uvicorn` checks for all of them at import.
    """

    def __init__(
        self,
        application: Any,
        config: uvicorn.Config,
        open_files: OpenFiles | None,
        connections: Connections,
        tls: ssl.SSLContext | None,
        is_shared: bool,
        shares: PortShares | None,
    ) -> None:
        super().__init__(config)
        self.servers = []
        self._taking: list[SharedListener] = []
        self._is_shared, self._shares = is_shared, shares
        self._open_files = open_files
        self._tls = tls
        self.server_state.connections = cast("set[Any]", connections.open)
        self.host = AppHost(application, connections, tasks=self.server_state.tasks)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self._is_shared:
            taking = [
                SharedListener(each, self._connection, count=self._count, shares=self._shares) for each in sockets or ()
            ]
            self.servers = cast("list[asyncio.Server]", taking)
            self._taking = taking
            self.started = True
            return
        self.servers = [
            await loop.create_server(self._connection, sock=each, backlog=BACKLOG) for each in sockets or ()
        ]
        self.started = True

    def _connection(self) -> Connection:
        return Connection(self.host, self._tls)

    def _count(self) -> int:
        return len(self.host.connections.open)

    def stop_listening(self) -> None:
        """Close the listening sockets. A cancelled `serve` leaves them open."""
        for server in self.servers:
            server.close()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._open_files is not None and not self.should_exit:
            self._open_files.check()
        for each in self._taking:
            each.report()
        is_over = await super().on_tick(counter)
        self.host.set_defaults(self.server_state.default_headers)
        return is_over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.host.is_draining = True
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Interrupts:
    """The effects of signals: the first signal calls `first`, the second one `second`.

    Until the host sets `first`, the first signal cancels the host.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.first = cancel
        self.second: Callable[[], object] = lambda: None

    async def obey(self, signals: AsyncIterator[int], has_begun: bool = False) -> None:
        """Have the effects. `has_begun`: whether the first signal has come already."""
        if not has_begun:
            await anext(signals)
        self.first()
        await anext(signals)
        self.second()


@asynccontextmanager
async def running(*beside: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[TaskGroup]:
    """Give a task group in which the functions run beside the block; its end cancels them.

    The block's own error is raised as it is, not inside a group.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        for each in beside:
            tasks.start_soon(each)
        try:
            yield tasks
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def until_signalled(host: Callable[[Interrupts], Awaitable[None]], watch: ProcessWatch) -> None:
    """Run `host`, which sets the effects of signals; `watch` handles a second signal that the loop cannot handle.

    A signal that the watch has had before is the first one. Return when `host` has returned, or was cancelled by a
    signal. Raise its error.
    """
    with termination_signals() as signals, watch.listening() as has_begun:
        async with running() as tasks:
            interrupts = Interrupts(tasks.cancel_scope.cancel)
            tasks.start_soon(interrupts.obey, signals, has_begun)
            await host(interrupts)


@contextmanager
def watched(watch: ProcessWatch) -> Iterator[None]:
    """Have the watch over the block, which is a whole program, and have it receive signals from the start."""
    watch.start()
    watch.keep_listening()
    try:
        yield
    finally:
        watch.over()  # a thread that an engine left behind may still hold up the end


@contextmanager
def listening_after(watch: ProcessWatch) -> Iterator[None]:
    """Have the watch receive signals after the block, whose own receiver of signals removes the handlers."""
    try:
        yield
    finally:
        watch.keep_listening()  # the default handlers would end the process by the signal


async def serve(
    server: HttpServer,
    availability: Availability,
    interrupts: Interrupts,
    grace_s: float,
    *,
    hand_over_s: float = 0.0,
) -> None:
    """Serve until a signal: the first one drains, the second one ends at once.

    While draining, `/health` answers 503, new requests are refused, and running ones may go on for `grace_s` before
    they are killed. For `hand_over_s` before that, `/health` is 503 already and connections are handed over; that goes
    on while the next request may come on a connection whose answer began before, within the time of running requests.
    """

    async def drain() -> None:
        until_s = anyio.current_time() + hand_over_s + grace_s
        if hand_over_s:
            availability.hand_over()
            await server.hand_over(hand_over_s, grace_s)
        await availability.drain(min(max(until_s - anyio.current_time(), 0.0), grace_s))
        server.stop()

    def cut() -> None:
        availability.stop()
        server.stop(at_once=True)

    async with running() as tasks:
        interrupts.first, interrupts.second = (lambda: tasks.start_soon(drain)), cut
        await server.run()


def run(main: Callable[[], Awaitable[None]], watch: ProcessWatch | None = None) -> None:
    """Run the async function on uvloop if it is installed, else on asyncio. An interrupt during the start ends it.

    With a `watch` that is for the function to see: the watch receives signals until something else does.
    """

    async def listening() -> None:
        if watch is not None:
            watch.keep_listening()  # uvloop has just installed itself in its place
        await main()

    with suppress(KeyboardInterrupt):
        anyio.run(listening, backend_options={"use_uvloop": find_spec("uvloop") is not None})
