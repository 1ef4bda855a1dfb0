"""The commands `penstock serve`, `worker`, `graph` and `key`, and the program of all commands.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve
from cyclopts import App

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds, PromptWork, RequestLimits

from ..limits import HttpLimits
from ..server_options import AccessOptions, ServerOptions
from ..terminal import echo
from .commands import command, run_program
from .effective import config_app
from .help import PlainHelp
from .options import (
    DrawOptions,
    EngineOptions,
    HostedEngine,
    KeyOptions,
    ListenOptions,
    LogLevelOption,
    LogOptions,
    ModelOptions,
    PoolOptions,
    RoutingOptions,
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
def serve(
    listen: ListenOptions,
    engine: EngineOptions,
    model: ModelOptions,
    pool: PoolOptions,
    routing: RoutingOptions,
    busy: BusyThresholds,
    log: LogOptions,
    limits: HttpLimits,
    request_limits: RequestLimits,
    prompt_work: PromptWork,
    access: AccessOptions,
    settled: Settled,
) -> None:
    """Serve a model over the OpenAI API until interrupted."""
    others = {"request_limits": request_limits, "prompt_work": prompt_work}
    config = _served(model, engine, pool, routing, busy, settled.environment, **others)
    from ..program import serve_graph, serve_watch

    options = ServerOptions(limits, log.access_log, access)
    _run_server(serve_graph, serve_watch, config, listen, options, settled.environment)


@command(program)
def worker(
    engine: HostedEngine,
    listen: ListenOptions,
    model: ModelOptions,
    registered: WorkerOptions,
    log: LogOptions,
    limits: HttpLimits,
    request_limits: RequestLimits,
    prompt_work: PromptWork,
    access: AccessOptions,
    settled: Settled,
) -> None:
    """Host one engine as a worker, with an OpenAI server beside it, until interrupted."""
    from engines import DisaggregationMode, WorkerConfig

    mode = DisaggregationMode.parse(registered.disaggregation_mode)
    hosted = WorkerConfig(disaggregation_mode=mode, **registered.worker_fields())
    others = {"request_limits": request_limits, "prompt_work": prompt_work}
    config = graph_config(model, engine, settled.environment, worker=hosted, **others)
    from ..program import host_worker, worker_watch

    options = ServerOptions(limits, log.access_log, access)
    _run_server(host_worker, worker_watch, config, listen, options, settled.environment)


@command(program)
def graph(
    draw: DrawOptions,
    engine: EngineOptions,
    model: ModelOptions,
    pool: PoolOptions,
    routing: RoutingOptions,
    busy: BusyThresholds,
    log: LogLevelOption,
    settled: Settled,
) -> None:
    """Draw the graph that `serve` would run with the same options."""
    config = _served(model, engine, pool, routing, busy, settled.environment)
    from ..program import draw_graph
    from ..server import run

    run(partial(draw_graph, config, draw.form, settled.environment))


def _served(
    model: ModelOptions,
    engine: EngineOptions,
    pool: PoolOptions,
    routing: RoutingOptions,
    busy: BusyThresholds,
    environment: Mapping[str, str],
    **others: Any,
) -> GraphConfig:
    routed = routing.graph_fields(pool.router, busy, environment)
    return graph_config(model, engine, environment, workers=pool.workers, seed=pool.seed, **routed, **others)


def _run_server(
    main: Callable[[Frontend], Awaitable[None]],
    watch_of: Callable[[Mapping[str, str]], ProcessWatch],
    config: GraphConfig,
    listen: ListenOptions,
    options: ServerOptions,
    environment: Mapping[str, str],
) -> None:
    """Run a program that serves on the address, watched to its end. Raise what keeps it from serving."""
    from ..program import Frontend
    from ..server import listen as listening
    from ..server import run
    from ..trace_export import exporting

    with ExitStack() as opening:
        options = evolve(options, tracer=opening.enter_context(exporting(environment)))
        listener = opening.enter_context(listening(listen.host, listen.port))
        opened = opening.pop_all()
    watch = watch_of(environment)
    watch.start()
    try:
        with opened, engine_args_named(config):
            run(lambda: main(Frontend(config, listener, environment, watch, options)))
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
