"""Host: what a program that serves has. Frontend: the server before a graph, and the one beside it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from attrs import evolve

from engines import SystemHealth
from engines.torch import ReportProgress, no_report
from engines.worker import ProcessWatch
from pipeline import InvalidArgument
from pipeline.network import Runtime
from pipeline.telemetry import Tracer

from .access import Gate
from .deployment import METRICS_PREFIX, GraphConfig, HostOptions, StandardGraph
from .http import STATUS_PORT, Access, Availability, HttpOptions, Telemetry, admin_app, app, served, status_app
from .listeners import listen, url_of
from .processes import notify_ready
from .runtimes import runtime_of
from .server import GRACE, HAND_OVER, HttpServer
from .settings import RuntimeOptions, ServerOptions
from .socket import PortShares
from .status import ProcessStatus
from .terminal import echo

ShowLoading = Callable[[], AbstractContextManager[ReportProgress]]
"""Gives the function that shows how far a model is loaded, until its block ends."""

_STATUS_HOST = "0.0.0.0"
"""All addresses: probes come from outside the container."""

SHARED_HAND_OVER_S = 1.0
"""By default, how long a front end that shares its port hands its connections over."""


class Host:
    """What every program that serves has: its config, metrics, sockets and signals.

    `watch` handles signals, and `loading` shows the progress of models that are loaded in its block. `sockets` are
    those that this process inherited, by name. `runtime` is where other processes are; None: this process is alone.
    """

    def __init__(
        self,
        config: GraphConfig,
        environment: Mapping[str, str],
        watch: ProcessWatch,
        options: ServerOptions,
        tracer: Tracer | None = None,
        loading: ShowLoading = lambda: nullcontext(no_report),
        sockets: Mapping[str, socket.socket] = MappingProxyType({}),
        runtime: RuntimeOptions | None = None,
    ) -> None:
        self.loading, self.sockets, self.runtime = loading, sockets, runtime
        self.config, self.environment, self.watch, self.tracer = config, environment, watch, tracer
        self.telemetry = Telemetry(prefix=METRICS_PREFIX.of(environment), environment=environment)
        self.http = evolve(
            HttpOptions.from_environment(environment),
            access_log=options.log.access_log,
            limits=options.limits,
            request_limits=options.request_limits,
        )

    def open_runtime(self) -> Runtime:
        """Return the runtime, not open."""
        metrics = self.telemetry.component_metrics
        if self.runtime is None:
            return Runtime.in_process(metrics=metrics)
        return runtime_of(self.runtime, self.environment, metrics=metrics)

    def plain(self, application: Any, listener: socket.socket, *, is_first: bool = False) -> HttpServer:
        """Return a server for every client, by default beside the first one of the process."""
        refused = self.telemetry.refusals.report_connection
        return HttpServer(application, listener, is_first=is_first, limits=self.http.limits, refused=refused)

    def status_servers(
        self, health: SystemHealth, listener: socket.socket | None, *, is_first: bool = False
    ) -> list[HttpServer]:
        """Return the server of the worker's status, if there is a socket for it."""
        if listener is None:
            return []
        return [self.plain(status_app(health, self.telemetry, self.environment), listener, is_first=is_first)]

    def status_listener(self) -> AbstractContextManager[socket.socket | None]:
        """Return the socket of the worker's status, if one is wanted. Raise InvalidArgument if it cannot listen."""
        if (inherited := self.sockets.get("status")) is not None:
            return inherited
        if (port := STATUS_PORT.of(self.environment)) is None:
            return nullcontext()
        try:
            return listen(_STATUS_HOST, port)
        except InvalidArgument as error:
            raise InvalidArgument(f"{STATUS_PORT.name}={port}: {error}") from error.__cause__


class Frontend(Host):
    """The server before a graph: its availability, access and options.

    `listener` is its listening socket; with an inherited one others may share it. `namespace` is that of the workers
    that other processes announce; None: all. The others are those of `Host`. Raise InvalidArgument for wrong options of
    access.
    """

    def __init__(
        self,
        config: GraphConfig,
        listener: socket.socket,
        environment: Mapping[str, str],
        watch: ProcessWatch,
        options: ServerOptions,
        tracer: Tracer | None = None,
        loading: ShowLoading = lambda: nullcontext(no_report),
        sockets: Mapping[str, socket.socket] = MappingProxyType({}),
        runtime: RuntimeOptions | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__(config, environment, watch, options, tracer, loading, sockets, runtime)
        self.availability = Availability()
        self.models: Mapping[str, object] = {}
        """The models of the graph, once `server` was called."""
        self.namespace = namespace
        self.grace_s = GRACE.of(environment)
        hand_over_s = HAND_OVER.of(environment)
        self.hand_over_s = (SHARED_HAND_OVER_S if "http" in sockets else 0.0) if hand_over_s is None else hand_over_s
        self.gate = Gate(options.access, environment)
        self._listener = listener

    @property
    def model_names(self) -> str:
        """The names of the models that are served now, for people."""
        return ", ".join(self.models) or "no model yet"

    def status(self) -> ProcessStatus:
        """Return what this process answers about itself."""
        url = url_of(self._listener, "http" if self.gate.tls is None else "https")
        return ProcessStatus(self.availability.in_flight, list(self.models), url)

    def hosting(self, report_loading: ReportProgress = no_report) -> HostOptions:
        """Return how to host the graph behind the server."""
        metrics = self.telemetry.component_metrics
        return HostOptions(self.environment, metrics, report_loading=report_loading, tracer=self.tracer)

    def server(self, graph: StandardGraph) -> HttpServer:
        """Return the server of the graph, for the clients that the options admit."""
        self.models = served(graph)
        gate, listener = self.gate, self._listener
        gate.warn(listener)
        application = app(
            graph,
            options=evolve(self.http, shows_internals="admin" not in self.sockets and gate.shows_internals(listener)),
            availability=self.availability,
            telemetry=self.telemetry,
            tracer=self.tracer,
            access=Access(gate.keys, gate.proxies, gate.cors_origins),
        )
        server = HttpServer(
            application,
            listener,
            is_shared="http" in self.sockets,
            shares=PortShares.of(self.environment),
            limits=self.http.limits,
            refused=self.telemetry.refusals.report_connection,
            trusted=gate.proxies.trusted,
            tls=None if gate.tls is None else gate.tls.context,
        )
        self.telemetry.count_connections(server.count_connections)
        return server

    def admin_listener(self) -> AbstractContextManager[socket.socket | None]:
        """Return the socket of the admin server, if the options want one. Raise InvalidArgument if it cannot listen."""
        if (inherited := self.sockets.get("admin")) is not None:
            return inherited
        if (address := self.gate.admin_address(self._listener)) is None:
            return nullcontext()
        return admin_listener(*address)

    def admin_servers(self, graph: StandardGraph, listener: socket.socket | None) -> list[HttpServer]:
        """Return the server of metrics and of the workers' state, if there is a socket for it."""
        if listener is None:
            return []
        return [self.plain(admin_app(graph, self.http, self.availability, self.telemetry), listener)]


def admin_listener(host: str, port: int) -> socket.socket:
    """Return the socket of an admin server. Raise InvalidArgument, its field `admin_host` or `admin_port`."""
    try:
        return listen(host, port)
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=f"admin_{error.field}") from error.__cause__


def also_at(what: str, servers: Sequence[HttpServer]) -> str:
    """Return what a line about a program adds for servers beside the first one."""
    return "".join(f"; {what} at {server.url}" for server in servers)


def announce(line: str, host: Host) -> None:
    """Print the line that the program serves, and notify the process that started it."""
    echo(line)
    notify_ready(host.environment, line)
