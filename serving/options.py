"""What the commands share: their options, the config these make, and how a wrong one is told.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import logging
import os
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from pipeline import InvalidArgument, PenstockError

from .failure_report import report
from .terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable

    from .deployment import GraphConfig

Command = TypeVar("Command", bound="Callable[..., None]")

_option_of: dict[str, str] = {}
"""By the field of an error, the option that sets it."""


def says_its_options(command: Command) -> Command:
    """Lets errors name the options of the command where their fields are called like its parameters."""
    _option_of.update({name: f"--{name.replace('_', '-')}" for name in signature(command).parameters})
    return command


def called(**options: str) -> None:
    """Lets errors name options that are not called like their fields."""
    _option_of.update(options)


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


class LogFormat(StrEnum):
    """The form of messages."""

    TEXT = "text"
    JSON = "json"


ModelPath = Annotated[Path | None, typer.Option(help="Model folder; without it a built-in byte-level model is served.")]
ModelName = Annotated[str | None, typer.Option(help="Name clients ask for; default: the folder's name, or echo.")]
Engine = Annotated[str, typer.Option(help="Engine behind the graph: echo, mocker, or module:factory.")]
EngineArg = Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Argument of the engine; repeatable.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
LogLevelOption = Annotated[LogLevel, typer.Option(help="Least serious messages shown.")]
LogFormatOption = Annotated[
    LogFormat, typer.Option(envvar="PENSTOCK_LOG_FORMAT", help="Form of messages: text, or JSON, an object a line.")
]
AccessLog = Annotated[bool, typer.Option(help="Log every request when its answer ends; costs speed.")]
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


def config_of(
    model_path: Path | None,
    model_name: str | None,
    engine: str,
    engine_arg: list[str],
    workers: int,
    others: Callable[[], dict[str, Any]],
) -> GraphConfig:
    """The checked config of the options, and of `others`; a wrong one ends the program with a line that names it."""
    from .deployment import GraphConfig
    from .environment import is_true

    try:
        return GraphConfig(
            model_path=model_path,
            model_name=model_name,
            engine=engine,
            engine_args=named(engine_arg),
            workers=workers,
            ignore_unsupported=is_true(os.environ.get("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS")),
            **others(),
        )
    except InvalidArgument as error:
        fail(error)


def routing_of(
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
        from .deployment import kv_router_config

        return given | {"kv_router": kv_router_config(router_config, os.environ, kv_events)}
    if router_config is not None or kv_events is not None:
        raise InvalidArgument("is for the router kv only", field="router_config" if router_config else "kv_events")
    return given


def named(texts: list[str]) -> dict[str, str]:
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


def fail(error: Exception) -> NoReturn:
    """Ends the program with what is to be said of the error: see `failure_report`.

    Below it the whole traceback, where messages for debugging are shown.
    """
    place = _place(error.field) if isinstance(error, InvalidArgument) else ""
    for line in report(error, place):
        echo(line, err=True)
    logging.getLogger(__name__).debug("it was raised here", exc_info=error)
    raise typer.Exit(2 if isinstance(error, InvalidArgument | OSError) else 1) from None


def of_engine(error: PenstockError | OSError, config: GraphConfig) -> PenstockError | OSError:
    """The error, with its place below the engine's arguments if an engine that started found it in one of them."""
    if isinstance(error, InvalidArgument) and error.field.partition(".")[0] in config.engine_args:
        return InvalidArgument(str(error), field=f"engine_args.{error.field}", cause=error.__cause__)
    return error


def _place(field: str | None) -> str:
    """What to change, in front of a message: an option where the field is one; an engine has fields of its own."""
    if not field:
        return ""
    for place, option in (("engine_args.", "--engine-arg"), ("vary.", "--vary")):
        if field.startswith(place):
            return f"{option} {field.removeprefix(place)}: "
    return f"{_option_of.get(field, field)}: "
