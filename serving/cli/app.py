"""The commands `penstock serve`, `worker`, `up`, `status`, `graph` and `key`, and the program of all commands.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version

from cyclopts import App

from pipeline import InvalidArgument

from ..settings import (
    DrawOptions,
    EngineOptions,
    FrontendOptions,
    HostedEngine,
    HostedUpstream,
    KeyOptions,
    LogLevelOption,
    ModelOptions,
    QuietLogOption,
    RegisteredOptions,
    RuntimeOptions,
    ServedGraph,
    ServerOptions,
    Settled,
    StatusOptions,
    UpOptions,
    WorkerOptions,
    graph_config,
)
from ..terminal import echo
from .commands import command, run_program
from .effective import config_app
from .help import PlainHelp
from .replay import replay
from .started_programs import check_engines, check_of_workers, plan_of, routed, worker_values

program = App(
    name="penstock",
    help="Typed, composable request pipelines in front of an inference engine.",
    help_format="plaintext",
    help_formatter=PlainHelp(),
    version=partial(version, "penstock"),
)


@command(program)
def serve(
    graph: ServedGraph, frontend: FrontendOptions, runtime: RuntimeOptions, server: ServerOptions, settled: Settled
) -> None:
    """Serve a model over the OpenAI API until interrupted; with --runtime those of its workers."""
    environment, url = settled.environment, runtime.url
    if url is not None:
        check_of_workers(settled)
    if frontend.processes > 1:
        check_engines(graph, settled)
        from ..up import run_up

        workers = {} if url is not None else worker_values(graph, settled)
        run_up(plan_of(settled, frontend.processes, url, **workers), server, environment)
        return
    if url is None:
        config = graph.config(environment, **server.graph_fields())
    else:
        of_workers = routed(graph)
        config = of_workers.config(environment, has_replicas=True, is_announced=True, **server.graph_fields())
    from ..program import run_server, serve_graph, serve_watch
    from .progress import loading_bar

    loading = partial(loading_bar, sys.stderr)
    joined = None if url is None else runtime
    run_server(serve_graph, serve_watch, config, server, environment, loading, joined, frontend.namespace)


@command(program)
def worker(
    engine: HostedEngine,
    model: ModelOptions,
    upstream: HostedUpstream,
    registered: WorkerOptions,
    runtime: RuntimeOptions,
    server: ServerOptions,
    settled: Settled,
) -> None:
    """Host an engine, or servers, as workers until interrupted: of a runtime, or with an OpenAI server beside it."""
    environment = settled.environment
    servers = upstream.config(environment)
    if servers is None:
        engine.checked()
    elif engine.engine:
        raise InvalidArgument("stands in the place of an engine: give one of both", field="upstream")
    elif runtime.url is None:
        raise InvalidArgument("goes with --runtime; without one it is an option of `penstock serve`", field="upstream")
    fields = {"worker": registered.config(), **model.graph_fields(), **server.graph_fields()}
    config = graph_config(engine if servers is None else EngineOptions(), environment, upstream=servers, **fields)
    from ..program import run_server, run_worker
    from ..worker_program import host_announced_worker, host_upstream_workers, host_worker, worker_watch
    from .progress import loading_bar

    loading = partial(loading_bar, sys.stderr)
    if runtime.url is None:
        run_server(host_worker, worker_watch, config, server, environment, loading)
        return
    host = host_announced_worker if servers is None else host_upstream_workers
    run_worker(host, worker_watch(environment), config, server, environment, loading, runtime)


@command(program)
def up(
    graph: ServedGraph,
    processes: UpOptions,
    registered: RegisteredOptions,
    runtime: RuntimeOptions,
    server: ServerOptions,
    settled: Settled,
) -> None:
    """Run workers and front ends on this machine, each in a process of its own, until interrupted."""
    check_engines(graph, settled)
    from ..up import run_up

    values = worker_values(graph, settled)
    run_up(plan_of(settled, processes.frontends, runtime.url, processes.broker, **values), server, settled.environment)


@command(program)
def status(shown: StatusOptions, runtime: RuntimeOptions, log: QuietLogOption, settled: Settled) -> None:
    """Show the workers and front ends of a runtime: roles, models, streams, loads and caches."""
    if runtime.url is None:
        raise InvalidArgument("is needed", field="runtime")
    from ..runtimes import runtime_of
    from ..server import run
    from ..status import show_status

    async def main() -> None:
        opened = runtime_of(runtime, settled.environment, may_make=False)
        await show_status(opened, watch=shown.watch, as_json=shown.json, wait_s=shown.wait_s)

    run(main)


@command(program)
def graph(draw: DrawOptions, graph: ServedGraph, log: LogLevelOption, settled: Settled) -> None:
    """Draw the graph that `serve` would run with the same options."""
    config = graph.config(settled.environment)
    from ..program import draw_graph
    from ..server import run

    run(partial(draw_graph, config, draw.form, settled.environment))


keys = App(name="key", help="Make API keys for --api-keys.")


@command(keys)
def new(key: KeyOptions) -> None:
    """Print the table of a fresh key for the file; the key itself goes to standard error, this once."""
    from ..access import new_key, table_of

    made = new_key()
    echo(table_of(key.name, made))
    echo(made, err=True)


@command(keys, "hash")
def hash_key(key: KeyOptions) -> None:
    """Print the table of a key of your own, read from standard input: a list of processes would show an option."""
    from ..access import table_of

    echo(table_of(key.name, sys.stdin.readline().strip()))


program.command(replay)
program.command(keys)
program.command(config_app())


def main() -> None:
    """Run the program on the arguments of the process, and end it with the exit code."""
    sys.exit(run_program(program, sys.argv[1:]))
