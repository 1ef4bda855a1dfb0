"""The programs behind the commands: serve a graph, host a worker, draw a graph. Their options are checked before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Literal, TypeVar

import anyio

from engines import ShutdownTimes
from engines.torch import ReportProgress
from engines.worker import ProcessWatch

from .deployment import (
    AnnouncedGraph,
    GraphConfig,
    HostOptions,
    OpenGraph,
    UpstreamGraph,
    announced_graph,
    engine_args_named,
    open_graph,
)
from .frontend import SHARED_HAND_OVER_S, Frontend, Host, ShowLoading, also_at, announce
from .garbage import settle
from .listeners import inherited_sockets, listen
from .server import (
    GRACE,
    HAND_OVER,
    HttpServer,
    Interrupts,
    listening_after,
    run,
    running,
    serve,
    until_signalled,
    watched,
)
from .settings import RuntimeOptions, ServerOptions
from .status import FRONTENDS_AT, serving_status
from .terminal import echo
from .trace_export import exporting

_CLOSE_S = 10.0
"""Time that the end of `serve` may take beside that of running requests and of its engines."""

_LOOK_EVERY_S = 0.1
"""Between two looks for the first model of a runtime."""

_FIRST_MODEL_S = 10.0
"""How long a front end on a shared port takes no connection before it has a model."""

_CUT_S = 3.0
"""Time that `serve` has to close everything after a second signal."""


def run_server(
    main: Callable[[Frontend], Awaitable[None]],
    watch_of: Callable[[Mapping[str, str]], ProcessWatch],
    config: GraphConfig,
    options: ServerOptions,
    environment: Mapping[str, str],
    loading: ShowLoading,
    runtime: RuntimeOptions | None = None,
    namespace: str | None = None,
) -> None:
    """Run a program that serves on an inherited socket, or on the address, watched to its end.

    Raise what keeps it from serving.
    """

    def frontend(opening: ExitStack, watch: ProcessWatch) -> Frontend:
        tracer = opening.enter_context(exporting(environment))
        sockets = opening.enter_context(inherited_sockets(environment))
        if (listener := sockets.get("http")) is None:
            listener = opening.enter_context(listen(options.listen.host, options.listen.port))
        return Frontend(config, listener, environment, watch, options, tracer, loading, sockets, runtime, namespace)

    _run(main, frontend, watch_of(environment), config)


def run_worker(
    main: Callable[[Host], Awaitable[None]],
    watch: ProcessWatch,
    config: GraphConfig,
    options: ServerOptions,
    environment: Mapping[str, str],
    loading: ShowLoading,
    runtime: RuntimeOptions,
) -> None:
    """Run a program of a runtime without a server for clients, watched to its end. Raise as `run_server`."""

    def host(opening: ExitStack, watch: ProcessWatch) -> Host:
        tracer = opening.enter_context(exporting(environment))
        sockets = opening.enter_context(inherited_sockets(environment))
        return Host(config, environment, watch, options, tracer, loading, sockets, runtime)

    _run(main, host, watch, config)


_Host = TypeVar("_Host", bound=Host)


def _run(
    main: Callable[[_Host], Awaitable[None]],
    open_host: Callable[[ExitStack, ProcessWatch], _Host],
    watch: ProcessWatch,
    config: GraphConfig,
) -> None:
    """Open the sockets first, so that their errors come at once; then run the program under the watch."""
    with ExitStack() as opening:
        host = open_host(opening, watch)
        opened = opening.pop_all()
    with watched(watch), opened, engine_args_named(config.engine_args):
        run(lambda: main(host), watch)


async def serve_graph(front: Frontend) -> None:
    """Serve the standard graph until a signal; a line with the address and the models is printed.

    The graph is that of the config, or with a runtime the one over the workers that announce themselves there. A signal
    while the engines start cancels that, and everything that is open is closed. Raise InvalidArgument, the error of an
    engine that cannot start, and the failure of the last engine that works, which ends it as a signal does.
    """
    config, watch = front.config, front.watch

    async def host(interrupts: Interrupts) -> None:
        bar = bars.enter_context(front.loading())
        async with _opened_graph(front, bar) as opened:
            bars.close()
            front.telemetry.add_text(opened.native_metrics)
            front.telemetry.models.add(lambda: [worker.card for worker in opened.workers], config.migration_limit)
            server, beside = front.server(opened.graph), front.admin_servers(opened.graph, admin)
            settle()
            if "http" in front.sockets and front.runtime is not None:
                with anyio.move_on_after(_FIRST_MODEL_S):  # others that share the port may have it already
                    await _first_model(front)
            also = also_at("admin", beside)
            if front.runtime is None or front.models:
                announce(f"Serving {front.model_names} at {server.url}{also}", front)
            else:
                echo(f"Serving {front.model_names} at {server.url}{also}")
            await _serve_while_engines_work(opened, server, beside, front, interrupts)
        if (failure := opened.failure) is not None:
            raise failure

    with listening_after(watch), front.admin_listener() as admin, ExitStack() as bars:
        await until_signalled(host, watch)


@asynccontextmanager
async def _opened_graph(
    front: Frontend, report_loading: ReportProgress
) -> AsyncIterator[OpenGraph | UpstreamGraph | AnnouncedGraph]:
    """Give the graph of the config, or with a runtime the one over its workers."""
    hosting = front.hosting(report_loading)
    if front.runtime is None:
        async with open_graph(front.config, hosting) as opened:
            yield opened
        return
    async with (
        front.open_runtime() as runtime,
        announced_graph(front.config, hosting, runtime, namespace=front.namespace) as announced,
        serving_status(runtime, FRONTENDS_AT, front.status),
    ):
        yield announced


async def _first_model(front: Frontend) -> None:
    """Return once there is a model: it comes with the first worker."""
    while not front.models:  # noqa: ASYNC110  (a graph without models has no event for the first one)
        await anyio.sleep(_LOOK_EVERY_S)


def serve_watch(environment: Mapping[str, str]) -> ProcessWatch:
    """Return the watch for `serve_graph`, not started. Its deadline covers draining, closing and the engines' ends."""
    times = ShutdownTimes.from_environment(environment)
    hand_over_s = HAND_OVER.of(environment) or SHARED_HAND_OVER_S
    return ProcessWatch(hand_over_s + GRACE.of(environment) + times.timeout_s + _CLOSE_S, second_s=_CUT_S)


async def _serve_while_engines_work(
    opened: OpenGraph | UpstreamGraph | AnnouncedGraph,
    server: HttpServer,
    others: Sequence[HttpServer],
    front: Frontend,
    interrupts: Interrupts,
) -> None:
    async def end_without_engines() -> None:
        await opened.ended()
        await front.availability.drain(front.grace_s)
        server.stop()

    async def announce_models() -> None:
        if front.runtime is not None and not front.models:
            await _first_model(front)
            announce(f"Serving {front.model_names} at {server.url}", front)

    beside = (end_without_engines, announce_models, front.gate.follow)
    async with running(*beside, *(other.run for other in others)):
        await serve(server, front.availability, interrupts, front.grace_s, hand_over_s=front.hand_over_s)
        for other in others:
            other.stop(at_once=True)


async def draw_graph(
    config: GraphConfig, form: Literal["text", "mermaid", "dot"], environment: Mapping[str, str]
) -> None:
    """Print the drawing of the standard graph."""
    async with open_graph(config, HostOptions(environment)) as opened:
        echo(opened.graph.draw(form))
