"""The program: `penstock serve` and `penstock graph`.

What a command needs is imported when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import logging
import os
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pipeline import InvalidArgument

if TYPE_CHECKING:
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
    DIRECT = "direct"


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
Engine = Annotated[str, typer.Option(help="Engine behind the graph.")]
EngineArg = Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Argument of the engine; repeatable.")]
Workers = Annotated[int, typer.Option(help="Number of engine instances.")]
RouterOption = Annotated[Router, typer.Option(help="How a worker is chosen for a request.")]


@_cli.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    model_path: ModelPath = None,
    model_name: ModelName = None,
    engine: Engine = "echo",
    engine_arg: EngineArg = [],  # noqa: B006  (typer reads it, nobody changes it)
    workers: Workers = 1,
    router: RouterOption = Router.ROUND_ROBIN,
    log_level: Annotated[LogLevel, typer.Option(help="Least serious messages shown.")] = LogLevel.WARNING,
    access_log: Annotated[bool, typer.Option(help="Log every request; costs speed.")] = False,
) -> None:
    """Serve a model over the OpenAI API until interrupted."""
    config = _config(model_path, model_name, engine, engine_arg, workers, router)
    level = LogLevel.INFO if access_log and log_level is LogLevel.WARNING else log_level
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    from .program import serve_graph
    from .server import listen, run

    try:
        with listen(host, port) as listener:
            run(partial(serve_graph, config, listener, os.environ, typer.echo, access_log=access_log))
    except (InvalidArgument, OSError) as error:
        _fail(error)


@_cli.command()
def graph(
    form: Annotated[Form, typer.Option(help="Form of the drawing.")] = Form.TEXT,
    model_path: ModelPath = None,
    model_name: ModelName = None,
    engine: Engine = "echo",
    engine_arg: EngineArg = [],  # noqa: B006
    workers: Workers = 1,
    router: RouterOption = Router.ROUND_ROBIN,
) -> None:
    """Draw the graph that `serve` would run with the same options."""
    config = _config(model_path, model_name, engine, engine_arg, workers, router)
    from .program import draw_graph
    from .server import run

    try:
        run(partial(draw_graph, config, form.value, typer.echo))
    except InvalidArgument as error:
        _fail(error)


def _config(
    model_path: Path | None, model_name: str | None, engine: str, engine_arg: list[str], workers: int, router: Router
) -> GraphConfig:
    """The checked config of the options; a wrong one ends the program with a line that names it."""
    from .config import GraphConfig
    from .environment import is_true

    try:
        return GraphConfig(
            model_path=model_path,
            model_name=model_name,
            engine=engine,
            engine_args=_named(engine_arg),
            workers=workers,
            router=router.value,
            ignore_unsupported=is_true(os.environ.get("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS")),
        )
    except InvalidArgument as error:
        _fail(error)


def _named(texts: list[str]) -> dict[str, str]:
    """The texts `NAME=VALUE` by name. Raises InvalidArgument for any other text, and for a name given twice."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"expected NAME=VALUE, got {text!r}", field="engine_arg")
        if name in named:
            raise InvalidArgument(f"{name} is given twice", field="engine_arg")
        named[name.replace("-", "_")] = value
    return named


def _fail(error: Exception) -> NoReturn:
    """Ends the program with the error as one line."""
    place = error.field if isinstance(error, InvalidArgument) else ""
    argument = place.removeprefix("engine_args.")
    option = f"--engine-arg {argument}" if argument != place else f"--{place.replace('_', '-')}"
    typer.echo(f"Error: {option}: {error}" if place else f"Error: {error}", err=True)
    raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the program."""
    _cli()
