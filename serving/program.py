"""The programs behind the commands: serve a graph, host a worker, draw a graph. Their options are checked before."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from typing import Any, Literal

from attrs import evolve

from engines import LLMEngine, ShutdownTimes, SystemHealth, Worker
from engines.torch import ReportProgress, no_report
from engines.worker import ProcessWatch
from operators import Model
from pipeline import InvalidArgument
from pipeline.network import Runtime
from pipeline.telemetry import Tracer

from .access import Gate
from .deployment import (
    METRICS_PREFIX,
    GraphConfig,
    HostOptions,
    OpenGraph,
    StandardGraph,
    UpstreamGraph,
    event_log,
    line,
    open_graph,
    routing_to,
)
from .http import (
    STATUS_PORT,
    Access,
    Availability,
    HttpOptions,
    Telemetry,
    admin_app,
    app,
    served,
    status_app,
)
from .server import GRACE, HttpServer, Interrupts, listen, listening_after, running, serve, until_signalled
from .server_options import ServerOptions
from .terminal import echo

ShowLoading = Callable[[], AbstractContextManager[ReportProgress]]
"""Gives the function that shows how far a model is loaded, until its block ends."""

_STATUS_HOST = "0.0.0.0"
"""All addresses: probes come from outside the container."""

_CLOSE_S = 10.0
"""Time that the end of `serve` may take beside that of running requests and of its engines."""

_CUT_S = 3.0
"""Time that `serve` has to close everything after a second signal."""


async def serve_graph(front: Frontend) -> None:
    """Serve the standard graph until a signal; a line with the address and the models is printed.

    A signal while the engines start cancels that, and everything that is open is closed. Raise InvalidArgument, the
    error of an engine that cannot start, and the failure of the last engine that works, which ends it as a signal does.
    """
    config, watch = front.config, front.watch

    async def host(interrupts: Interrupts) -> None:
        bar = bars.enter_context(front.loading())
        async with open_graph(config, front.hosting(bar)) as opened:
            bars.close()
            front.telemetry.add_text(opened.native_metrics)
            front.telemetry.models.add(lambda: [worker.card for worker in opened.workers], config.migration_limit)
            server, beside = front.server(opened.graph), front.admin_servers(opened.graph, admin)
            _settle()
            echo(f"Serving {front.models or 'no model yet'} at {server.url}{_also_at('admin', beside)}")
            await _serve_while_engines_work(opened, server, beside, front, interrupts)
        if (failure := opened.failure) is not None:
            raise failure

    with listening_after(watch), front.admin_listener() as admin, ExitStack() as bars:
        await until_signalled(host, watch)


def serve_watch(environment: Mapping[str, str]) -> ProcessWatch:
    """Return the watch for `serve_graph`, not started. Its deadline covers draining, closing and the engines' ends."""
    times = ShutdownTimes.from_environment(environment)
    return ProcessWatch(GRACE.of(environment) + times.timeout_s + _CLOSE_S, second_s=_CUT_S)


def worker_watch(environment: Mapping[str, str]) -> ProcessWatch:
    """Return the watch for `host_worker`, not started."""
    return ProcessWatch(ShutdownTimes.from_environment(environment).deadline_s)


async def _serve_while_engines_work(
    opened: OpenGraph | UpstreamGraph,
    server: HttpServer,
    others: Sequence[HttpServer],
    front: Frontend,
    interrupts: Interrupts,
) -> None:
    async def end_without_engines() -> None:
        await opened.ended()
        await front.availability.drain(front.grace_s)
        server.stop()

    async with running(end_without_engines, front.gate.follow, *(other.run for other in others)):
        await serve(server, front.availability, interrupts, front.grace_s)
        for other in others:
            other.stop(at_once=True)


async def host_worker(front: Frontend) -> None:
    """Host one engine with the life-cycle of a worker, signals included, and a server beside it.

    Raise the error of a worker that cannot start. `Worker.run` describes the effect of signals; after the first one new
    requests are refused.
    """
    config, environment, watch = front.config, front.environment, front.watch
    health = SystemHealth.from_environment(environment)
    metrics, made = front.telemetry.component_metrics, list[tuple[Model, LLMEngine]]()

    async def make(_: Interrupts) -> None:
        model = await config.loaded_model()
        deployment = config.deployment(config.modes[0])
        deployment.report_loading = bar.enter_context(front.loading())
        (engine,) = await config.make_engines(1, deployment)
        made.append((model, engine))

    with _status_listener(environment) as status, front.admin_listener() as admin, ExitStack() as bar:
        async with Runtime.in_process(metrics=metrics) as runtime, AsyncExitStack() as opened:
            await until_signalled(make, watch)  # a factory may take long; later the worker handles signals itself
            if not made:
                return
            ((model, engine),) = made
            settings = config.worker_settings(model)
            worker = Worker(
                engine,
                settings,
                runtime=runtime,
                metrics=metrics,
                environment=environment,
                health=health,
                kv_event_log=event_log,
                tracer=front.tracer,
                watch=watch,
            )
            front.telemetry.add_text(worker.native_metrics)
            front.telemetry.models.add(lambda: [worker.card], config.migration_limit)
            routing = await opened.enter_async_context(routing_to(worker.endpoint, config, front.hosting(), runtime))
            graph = line(model, routing, config, front.hosting())
            server, beside = front.server(graph), front.admin_servers(graph, admin)
            states = [] if status is None else [front.plain(status_app(health, front.telemetry, environment), status)]

            async def announce() -> None:
                await routing.workers.wait_for_instances()
                bar.close()
                health.set_process_ready(True)
                _settle()
                where = f"{worker.endpoint.path}; serving {front.models} at {server.url}"
                echo(f"Hosting {config.engine} at {where}{_also_at('status', states)}{_also_at('admin', beside)}")

            async def refuse() -> None:
                await worker.wait()
                health.set_process_ready(False)
                await front.availability.drain(worker.times.deadline_s)

            servers = [server, *states, *beside]
            runs = (one.run for one in servers)
            with listening_after(watch):
                async with running(*runs, announce, refuse, front.gate.follow):
                    try:
                        await worker.run()
                    finally:
                        for one in servers:
                            one.stop()


class Frontend:
    """The server before a graph: its metrics, availability, access and options.

    `listener` is its listening socket, `watch` handles signals, and `loading` shows the progress of models that are
    loaded in its block. Raise InvalidArgument for wrong options of access.
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
    ) -> None:
        self.loading = loading
        self.config, self.environment, self.watch, self.tracer = config, environment, watch, tracer
        self.telemetry = Telemetry(prefix=METRICS_PREFIX.of(environment), environment=environment)
        self.availability = Availability()
        self.models = ""
        self.grace_s = GRACE.of(environment)
        self.gate = Gate(options.access, environment)
        self._listener = listener
        self._http = evolve(
            HttpOptions.from_environment(environment),
            access_log=options.log.access_log,
            limits=options.limits,
            request_limits=options.request_limits,
        )

    def hosting(self, report_loading: ReportProgress = no_report) -> HostOptions:
        """Return how to host the graph behind the server."""
        metrics = self.telemetry.component_metrics
        return HostOptions(self.environment, metrics, report_loading=report_loading, tracer=self.tracer)

    def server(self, graph: StandardGraph) -> HttpServer:
        """Return the server of the graph, for the clients that the options admit."""
        self.models = ", ".join(served(graph))
        gate, listener = self.gate, self._listener
        gate.warn(listener)
        application = app(
            graph,
            options=evolve(self._http, shows_internals=gate.shows_internals(listener)),
            availability=self.availability,
            telemetry=self.telemetry,
            tracer=self.tracer,
            access=Access(gate.keys, gate.proxies, gate.cors_origins),
        )
        server = HttpServer(
            application,
            listener,
            limits=self._http.limits,
            refused=self.telemetry.refusals.report_connection,
            trusted=gate.proxies.trusted,
            tls=None if gate.tls is None else gate.tls.context,
        )
        self.telemetry.count_connections(server.count_connections)
        return server

    def admin_listener(self) -> AbstractContextManager[socket.socket | None]:
        """Return the socket of the admin server, if the options want one. Raise InvalidArgument if it cannot listen."""
        if (address := self.gate.admin_address(self._listener)) is None:
            return nullcontext()
        try:
            return listen(*address)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field=f"admin_{error.field}") from error.__cause__

    def admin_servers(self, graph: StandardGraph, listener: socket.socket | None) -> list[HttpServer]:
        """Return the server of metrics and of the workers' state, if there is a socket for it."""
        if listener is None:
            return []
        return [self.plain(admin_app(graph, self._http, self.availability, self.telemetry), listener)]

    def plain(self, application: Any, listener: socket.socket) -> HttpServer:
        """Return a server beside the first one, for every client."""
        refused = self.telemetry.refusals.report_connection
        return HttpServer(application, listener, is_first=False, limits=self._http.limits, refused=refused)


def _also_at(what: str, servers: Sequence[HttpServer]) -> str:
    return "".join(f"; {what} at {server.url}" for server in servers)


def _status_listener(environment: Mapping[str, str]) -> AbstractContextManager[socket.socket | None]:
    """Return the socket of the worker's status, if the environment wants one. Raise InvalidArgument if it fails."""
    if (port := STATUS_PORT.of(environment)) is None:
        return nullcontext()
    try:
        return listen(_STATUS_HOST, port)
    except InvalidArgument as error:
        raise InvalidArgument(f"{STATUS_PORT.name}={port}: {error}") from error.__cause__


def _settle() -> None:
    """Exclude the objects of the start-up, which stay anyway, from every later garbage collection.

    A collection of all of them delays every stream by some 25 ms.
    """
    gc.collect()
    gc.freeze()


async def draw_graph(
    config: GraphConfig, form: Literal["text", "mermaid", "dot"], environment: Mapping[str, str]
) -> None:
    """Print the drawing of the standard graph."""
    async with open_graph(config, HostOptions(environment)) as opened:
        echo(opened.graph.draw(form))
