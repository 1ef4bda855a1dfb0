"""The commands `penstock serve`, `worker`, `graph` and `key`, and the program of all commands.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from cyclopts import App

from pipeline import InvalidArgument

from ..server_options import ServerOptions
from ..terminal import echo
from .commands import command, run_program
from .effective import config_app
from .help import PlainHelp
from .options import (
    DrawOptions,
    HostedEngine,
    KeyOptions,
    LogLevelOption,
    ModelOptions,
    ServedGraph,
    WorkerOptions,
    engine_args_named,
    graph_config,
)
from .replay import replay
from .sources import Settled

if TYPE_CHECKING:
    from engines.worker import ProcessWatch

    from ..deployment import GraphConfig
    from ..program import Frontend

program = App(
    name="penstock",
    help="Typed, composable request pipelines in front of an inference engine.",
    help_format="plaintext",
    help_formatter=PlainHelp(),
    version=lambda: _version(),
)


@command(program)
def serve(graph: ServedGraph, server: ServerOptions, settled: Settled) -> None:
    """Serve a model over the OpenAI API until interrupted."""
    limits = {"request_limits": server.request_limits, "prompt_work": server.prompt_work}
    config = graph.config(settled.environment, **limits)
    from ..program import serve_graph, serve_watch

    _run_server(serve_graph, serve_watch, config, server, settled.environment)


@command(program)
def worker(
    engine: HostedEngine, model: ModelOptions, registered: WorkerOptions, server: ServerOptions, settled: Settled
) -> None:
    """Host one engine as a worker, with an OpenAI server beside it, until interrupted."""
    from engines import DisaggregationMode, WorkerConfig

    mode = DisaggregationMode.parse(registered.disaggregation_mode)
    hosted = WorkerConfig(disaggregation_mode=mode, **registered.worker_fields())
    limits = {"request_limits": server.request_limits, "prompt_work": server.prompt_work}
    config = graph_config(engine, settled.environment, worker=hosted, **model.graph_fields(), **limits)
    from ..program import host_worker, worker_watch

    _run_server(host_worker, worker_watch, config, server, settled.environment)


@command(program)
def graph(draw: DrawOptions, graph: ServedGraph, log: LogLevelOption, settled: Settled) -> None:
    """Draw the graph that `serve` would run with the same options."""
    config = graph.config(settled.environment)
    from ..program import draw_graph
    from ..server import run

    run(partial(draw_graph, config, draw.form, settled.environment))


def _run_server(
    main: Callable[[Frontend], Awaitable[None]],
    watch_of: Callable[[Mapping[str, str]], ProcessWatch],
    config: GraphConfig,
    server: ServerOptions,
    environment: Mapping[str, str],
) -> None:
    """Run a program that serves on the address, watched to its end. Raise what keeps it from serving."""
    from ..program import Frontend
    from ..server import listen, run
    from ..trace_export import exporting
    from .progress import loading_bar

    with ExitStack() as opening:
        tracer = opening.enter_context(exporting(environment))
        listener = opening.enter_context(listen(server.listen.host, server.listen.port))
        opened = opening.pop_all()
    watch = watch_of(environment)
    watch.start()
    try:
        with opened, engine_args_named(config):
            show = partial(loading_bar, sys.stderr)
            run(lambda: main(Frontend(config, listener, environment, watch, server, tracer, show)))
    finally:
        watch.over()  # a thread that an engine left behind may still hold up the end


keys = App(name="key", help="Make API keys for --api-keys.")


@command(keys)
def new(key: KeyOptions) -> None:
    """Print the table of a fresh key for the file; the key itself goes to standard error, this once."""
    from ..access import new_key

    made = new_key()
    echo(_table(key.name, made))
    echo(made, err=True)


@command(keys, "hash")
def hash_key(key: KeyOptions) -> None:
    """Print the table of a key of your own, read from standard input: a list of processes would show an option."""
    echo(_table(key.name, sys.stdin.readline().strip()))


def _table(name: str, made: str) -> str:
    """Return the table for the file. Raise InvalidArgument for a name or key that cannot be."""
    from pipeline.protocols.field_rules import InvalidRecord

    from ..access import ApiKey, hash_of

    try:
        checked = ApiKey(name=name, hash=hash_of(made))
    except InvalidRecord as error:
        raise InvalidArgument(str(error), field="name") from error
    return f'[[key]]\nname = "{checked.name}"\nhash = "{checked.hash}"'


def _version() -> str:
    from importlib.metadata import version

    return version("penstock")


program.command(replay)
program.command(keys)
program.command(config_app())


def main() -> None:
    """Run the program on the arguments of the process, and end it with the exit code."""
    sys.exit(run_program(program, sys.argv[1:]))
