"""The program: `penstock serve`, `penstock worker` and `penstock graph`.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import logging
import os
from enum import StrEnum
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pipeline import InvalidArgument, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from engines import WorkerConfig

    from .config import GraphConfig

_cli = typer.Typer(
    help="Typed, composable request pipelines in front of an inference engine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Router(StrEnum):
    """How a worker is chosen."""

    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    P2C = "p2c"
    LEAST_LOADED = "least-loaded"
    DEVICE_AWARE = "device-aware"
    DIRECT = "direct"
    KV = "kv"


class Form(StrEnum):
    """How a graph is drawn."""

    TEXT = "text"
    MERMAID = "mermaid"
    DOT = "dot"


class LogLevel(StrEnum):
    """The least serious messages that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ModelPath = Annotated[Path | None, typer.Option(help="Model folder; without it a built-in byte-level model is served.")]
ModelName = Annotated[str | None, typer.Option(help="Name clients ask for; default: the folder's name, or echo.")]
Engine = Annotated[str, typer.Option(help="Engine behind the graph: echo, mocker, or module:factory.")]
EngineArg = Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Argument of the engine; repeatable.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
LogLevelOption = Annotated[LogLevel, typer.Option(help="Least serious messages shown.")]
AccessLog = Annotated[bool, typer.Option(help="Log every request; costs speed.")]
Workers = Annotated[int, typer.Option(help="Number of engine instances.")]
PrefillWorkers = Annotated[int, typer.Option(help="Number of engine instances that compute prompts only.")]
EnforceDisagg = Annotated[bool, typer.Option(help="Refuse requests while there are no prefill workers.")]
MigrationLimit = Annotated[
    int,
    typer.Option(envvar="DYN_MIGRATION_LIMIT", help="To how many other workers a request may go on; 0: to none."),
]
MigrationMaxSeqLen = Annotated[
    int | None,
    typer.Option(envvar="DYN_MIGRATION_MAX_SEQ_LEN", metavar="TOKENS", help="Unless it has become longer than this."),
]
RouterOption = Annotated[Router, typer.Option(help="How a worker is chosen for a request.")]
RouterConfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings of the router kv, as TOML; before those of DYN_ROUTER_*.")
]
KvEvents = Annotated[
    bool | None,
    typer.Option(
        "--kv-events/--no-kv-events",
        help="Whether the router kv goes by what engines say of their caches, or by what it sent them.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes repeatable what a router leaves to chance.")]
BusyBlocks = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="A worker is busy with more of its KV blocks in use. [env: DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD]",
    ),
]
BusyTokens = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Or with more tokens in prefill. [env: DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD]"),
]
BusyTokensFraction = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION", help="The same, of its largest batch. [env: DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC]"
    ),
]


@_cli.command()
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
    access_log: AccessLog = False,
) -> None:
    """Serve a model over the OpenAI API until interrupted."""
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
    routing = partial(_routing, router, router_config, kv_events, seed, thresholds, others)
    config = _config(model_path, model_name, engine, engine_arg, workers, routing)
    from .program import serve_graph

    _run_server(serve_graph, config, host, port, log_level, access_log)


@_cli.command()
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
    access_log: AccessLog = False,
) -> None:
    """Host one engine as a worker, with an OpenAI server beside it, until interrupted."""
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
    config = _config(
        model_path,
        model_name,
        engine,
        engine_arg,
        1,
        lambda: {"worker": _worker_config(disaggregation_mode, settings)},
    )
    from .program import host_worker

    _run_server(host_worker, config, host, port, log_level, access_log)


def _worker_config(mode: str, settings: dict[str, Any]) -> WorkerConfig:
    """Raises InvalidArgument for what a worker cannot be."""
    from engines import DisaggregationMode, WorkerConfig

    return WorkerConfig(disaggregation_mode=DisaggregationMode.parse(mode), **settings)


def _run_server(
    main: Callable[..., Coroutine[Any, Any, None]],
    config: GraphConfig,
    host: str,
    port: int,
    log_level: LogLevel,
    access_log: bool,
) -> None:
    """Runs a program that serves on the address; what it cannot do ends it with one line."""
    level = LogLevel.INFO if access_log and log_level is LogLevel.WARNING else log_level
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    from .server import listen, run

    try:
        with listen(host, port) as listener:
            run(partial(main, config, listener, os.environ, typer.echo, access_log=access_log))
    except (PenstockError, OSError) as error:
        _fail(_of_engine(error, config))


def _of_engine(error: PenstockError | OSError, config: GraphConfig) -> PenstockError | OSError:
    """The error, with its place below the engine's arguments if an engine that started found it in one of them."""
    if isinstance(error, InvalidArgument) and error.field.partition(".")[0] in config.engine_args:
        return InvalidArgument(str(error), field=f"engine_args.{error.field}", cause=error.__cause__)
    return error


@_cli.command()
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
) -> None:
    """Draw the graph that `serve` would run with the same options."""
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
    routing = partial(_routing, router, router_config, kv_events, seed, thresholds, others)
    config = _config(model_path, model_name, engine, engine_arg, workers, routing)
    from .program import draw_graph
    from .server import run

    try:
        run(partial(draw_graph, config, form.value, os.environ, typer.echo))
    except (PenstockError, OSError) as error:
        _fail(error)


def _config(
    model_path: Path | None,
    model_name: str | None,
    engine: str,
    engine_arg: list[str],
    workers: int,
    others: Callable[[], dict[str, Any]],
) -> GraphConfig:
    """The checked config of the options, and of `others`; a wrong one ends the program with a line that names it."""
    from .config import GraphConfig
    from .environment import is_true

    try:
        return GraphConfig(
            model_path=model_path,
            model_name=model_name,
            engine=engine,
            engine_args=_named(engine_arg),
            workers=workers,
            ignore_unsupported=is_true(os.environ.get("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS")),
            **others(),
        )
    except InvalidArgument as error:
        _fail(error)


def _routing(
    router: Router,
    router_config: Path | None,
    kv_events: bool | None,
    seed: int | None,
    thresholds: tuple[float | None, int | None, float | None],
    others: dict[str, Any],
) -> dict[str, Any]:
    """Raises InvalidArgument for a threshold out of its range, and for what the router kv cannot be."""
    from operators import BusyThresholds

    given = others | {"router": router.value, "seed": seed, "busy": BusyThresholds(*thresholds)}
    if router is Router.KV:
        from .router_config import kv_router_config

        return given | {"kv_router": kv_router_config(router_config, os.environ, kv_events)}
    if router_config is not None or kv_events is not None:
        raise InvalidArgument("is for the router kv only", field="router_config" if router_config else "kv_events")
    return given


def _named(texts: list[str]) -> dict[str, str]:
    """The texts `NAME=VALUE` by name. Raises InvalidArgument for any other text, and for a name given twice."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"expected NAME=VALUE, got {text!r}", field="engine_arg")
        name = name.replace("-", "_")
        if name in named:
            raise InvalidArgument(f"{name} is given twice", field="engine_arg")
        named[name] = value
    return named


def _fail(error: Exception) -> NoReturn:
    """Ends the program with the error as one line, below it its trace where messages for debugging are shown."""
    text = " ".join(str(error).split())
    place = _place(error.field) if isinstance(error, InvalidArgument) else ""
    typer.echo(f"Error: {'' if place in text else place}{text}", err=True)
    logging.getLogger(__name__).debug("it was raised here", exc_info=error)
    raise typer.Exit(2 if isinstance(error, InvalidArgument | OSError) else 1) from None


def _place(field: str | None) -> str:
    """What to change, in front of a message: an option where the field is one; an engine has fields of its own."""
    if not field:
        return ""
    argument = field.removeprefix("engine_args.")
    if argument != field:
        return f"--engine-arg {argument}: "
    options = {*signature(serve).parameters, *signature(worker).parameters}
    return f"--{field.replace('_', '-')}: " if field in options else f"{field}: "


def main() -> None:
    """Entry point of the program."""
    _cli()
