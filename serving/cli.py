"""The program: `penstock serve`, `penstock worker`, `penstock graph` and `penstock replay`.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import evolve

from pipeline import InvalidArgument, PenstockError
from pipeline.protocols.limits import PromptWork, RequestLimits

from .access_options import AccessOptions
from .key_cli import key
from .limits import HttpLimits
from .options import (
    AccessLog,
    BusyBlocks,
    BusyTokens,
    BusyTokensFraction,
    EnforceDisagg,
    Engine,
    EngineArg,
    Form,
    Host,
    KvEvents,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    MigrationLimit,
    MigrationMaxSeqLen,
    ModelName,
    ModelPath,
    Port,
    PrefillWorkers,
    Router,
    RouterConfig,
    RouterOption,
    Seed,
    Workers,
    config_of,
    fail,
    of_engine,
    routing_of,
    says_its_options,
)
from .record_options import with_record_options
from .replay_cli import replay
from .server_options import ServerOptions
from .terminal import echo, log_to_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from engines import ProcessWatch, WorkerConfig

    from .deployment import GraphConfig

_cli = typer.Typer(
    help="Typed, composable request pipelines in front of an inference engine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@_cli.command()
@says_its_options
@with_record_options
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_path: ModelPath = None,
    model_name: ModelName = None,
    engine: Engine = "echo",
    engine_arg: EngineArg = [],  # noqa: B006  (typer reads it, nobody changes it)
    workers: Workers = 1,
    prefill_workers: PrefillWorkers = 0,
    enforce_disagg: EnforceDisagg = False,
    migration_limit: MigrationLimit = 3,
    migration_max_seq_len_tokens: MigrationMaxSeqLen = None,
    router: RouterOption = Router.ROUND_ROBIN,
    router_config: RouterConfig = None,
    kv_events: KvEvents = None,
    seed: Seed = None,
    active_decode_blocks_threshold: BusyBlocks = None,
    active_prefill_tokens_threshold: BusyTokens = None,
    active_prefill_tokens_threshold_frac: BusyTokensFraction = None,
    log_level: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
    access_log: AccessLog = False,
    *,
    limits: HttpLimits,
    request_limits: RequestLimits,
    prompt_work: PromptWork,
    access: AccessOptions,
) -> None:
    """Serve a model over the OpenAI API until interrupted."""
    _log_from(log_level, log_format, access_log=access_log)
    thresholds = (
        active_decode_blocks_threshold,
        active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac,
    )
    others = {
        "prefill_workers": prefill_workers,
        "enforce_disagg": enforce_disagg,
        "migration_limit": migration_limit,
        "migration_max_seq_len_tokens": migration_max_seq_len_tokens,
        "request_limits": request_limits,
        "prompt_work": prompt_work,
    }
    routing = partial(routing_of, router, router_config, kv_events, seed, thresholds, others)
    config = config_of(model_path, model_name, engine, engine_arg, workers, routing)
    from .program import serve_graph, serve_watch

    _run_server(serve_graph, serve_watch, config, host, port, ServerOptions(limits, access_log, access))


@_cli.command()
@says_its_options
@with_record_options
def worker(
    engine: Annotated[str, typer.Argument(help="Engine to host: echo, mocker, or module:factory.")],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_path: ModelPath = None,
    model_name: ModelName = None,
    engine_arg: EngineArg = [],  # noqa: B006
    namespace: Annotated[str, typer.Option(envvar="DYN_NAMESPACE", help="Where it is registered.")] = "dynamo",
    component: Annotated[
        str | None, typer.Option(envvar="DYN_COMPONENT", help="Default: prefill for prefill workers, else backend.")
    ] = None,
    endpoint: Annotated[str, typer.Option(envvar="DYN_ENDPOINT", help="Name of its endpoint.")] = "generate",
    endpoint_types: Annotated[
        str, typer.Option(envvar="DYN_ENDPOINT_TYPES", help="Surfaces its model is published for.")
    ] = "chat,completions",
    custom_jinja_template: Annotated[
        Path | None, typer.Option(envvar="DYN_CUSTOM_JINJA_TEMPLATE", help="Chat template in the place of the model's.")
    ] = None,
    dyn_tool_call_parser: Annotated[
        str | None, typer.Option(envvar="DYN_TOOL_CALL_PARSER", help="Published with the model.")
    ] = None,
    dyn_reasoning_parser: Annotated[
        str | None, typer.Option(envvar="DYN_REASONING_PARSER", help="Published with the model.")
    ] = None,
    exclude_tools_when_tool_choice_none: Annotated[
        bool, typer.Option(envvar="DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", help="Published with the model.")
    ] = True,
    disaggregation_mode: Annotated[str, typer.Option(help="agg, prefill, decode or encode.")] = "agg",
    log_level: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
    access_log: AccessLog = False,
    *,
    limits: HttpLimits,
    request_limits: RequestLimits,
    prompt_work: PromptWork,
    access: AccessOptions,
) -> None:
    """Host one engine as a worker, with an OpenAI server beside it, until interrupted."""
    _log_from(log_level, log_format, access_log=access_log)
    settings: dict[str, Any] = {
        "namespace": namespace,
        "endpoint": endpoint,
        "endpoint_types": endpoint_types,
        "custom_jinja_template": custom_jinja_template,
        "tool_call_parser": dyn_tool_call_parser,
        "reasoning_parser": dyn_reasoning_parser,
        "exclude_tools_when_tool_choice_none": exclude_tools_when_tool_choice_none,
    }
    if component is not None:
        settings["component"] = component
    config = config_of(
        model_path,
        model_name,
        engine,
        engine_arg,
        1,
        lambda: {
            "worker": _worker_config(disaggregation_mode, settings),
            "request_limits": request_limits,
            "prompt_work": prompt_work,
        },
    )
    from .program import host_worker, worker_watch

    _run_server(host_worker, worker_watch, config, host, port, ServerOptions(limits, access_log, access))


def _worker_config(mode: str, settings: dict[str, Any]) -> WorkerConfig:
    """Raises InvalidArgument for what a worker cannot be."""
    from engines import DisaggregationMode, WorkerConfig

    return WorkerConfig(disaggregation_mode=DisaggregationMode.parse(mode), **settings)


def _log_from(level: LogLevel, form: LogFormat = LogFormat.TEXT, *, access_log: bool = False) -> None:
    """Shows messages from this level on; before anything that may fail, for then there is one to show."""
    log_to_stderr(level.upper(), form.value, access_log=access_log)


def _run_server(
    main: Callable[..., Coroutine[Any, Any, None]],
    watch_of: Callable[[Mapping[str, str]], ProcessWatch],
    config: GraphConfig,
    host: str,
    port: int,
    options: ServerOptions,
) -> None:
    """Runs a program that serves on the address, watched to its end; what it cannot do ends it with an error."""
    from .server import listen, run
    from .trace_export import exporting

    with ExitStack() as opening:
        try:
            options = evolve(options, tracer=opening.enter_context(exporting(os.environ)))
            listener = opening.enter_context(listen(host, port))
        except InvalidArgument as error:  # an engine may have arguments of these names
            fail(error)
        opened = opening.pop_all()
    watch = watch_of(os.environ)
    watch.start()
    try:
        with opened:
            run(partial(main, config, listener, os.environ, echo, watch, options))
    except (PenstockError, OSError) as error:
        fail(of_engine(error, config))
    finally:
        watch.over()  # a thread that an engine left behind may still hold up the end


@_cli.command()
@says_its_options
def graph(
    form: Annotated[Form, typer.Option(help="Form of the drawing.")] = Form.TEXT,
    model_path: ModelPath = None,
    model_name: ModelName = None,
    engine: Engine = "echo",
    engine_arg: EngineArg = [],  # noqa: B006
    workers: Workers = 1,
    prefill_workers: PrefillWorkers = 0,
    enforce_disagg: EnforceDisagg = False,
    migration_limit: MigrationLimit = 3,
    migration_max_seq_len_tokens: MigrationMaxSeqLen = None,
    router: RouterOption = Router.ROUND_ROBIN,
    router_config: RouterConfig = None,
    kv_events: KvEvents = None,
    seed: Seed = None,
    active_decode_blocks_threshold: BusyBlocks = None,
    active_prefill_tokens_threshold: BusyTokens = None,
    active_prefill_tokens_threshold_frac: BusyTokensFraction = None,
    log_level: LogLevelOption = LogLevel.WARNING,
) -> None:
    """Draw the graph that `serve` would run with the same options."""
    _log_from(log_level)
    thresholds = (
        active_decode_blocks_threshold,
        active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac,
    )
    others = {
        "prefill_workers": prefill_workers,
        "enforce_disagg": enforce_disagg,
        "migration_limit": migration_limit,
        "migration_max_seq_len_tokens": migration_max_seq_len_tokens,
    }
    routing = partial(routing_of, router, router_config, kv_events, seed, thresholds, others)
    config = config_of(model_path, model_name, engine, engine_arg, workers, routing)
    from .program import draw_graph
    from .server import run

    try:
        run(partial(draw_graph, config, form.value, os.environ, echo))
    except (PenstockError, OSError) as error:
        fail(error)


_cli.add_typer(replay)
_cli.add_typer(key, name="key")


def main() -> None:
    """Entry point of the program."""
    _cli()
