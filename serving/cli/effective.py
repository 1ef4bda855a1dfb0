"""`penstock config`: the settings that a command would run with, and where each comes from.

penstock config serve --workers 4 > penstock.toml
penstock serve --config penstock.toml
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cyclopts import App

from pipeline.settings import settings_of

from ..settings import ENVIRONMENT_TABLE, EngineOptions, Settled
from ..terminal import echo
from .commands import Command, check_variables, commands, flattened

_SHOWN = ("serve", "worker", "up", "graph", "replay", "replay sweep")


def config_app() -> App:
    """Return the commands of `penstock config`: one for each command that runs something; `serve` is the default."""
    app = App(name="config", help="Print the settings a command would run with, as TOML, and where each comes from.")
    for name in _SHOWN:
        made = commands[name]
        shows = flattened(made, lambda options, made=made: _show(made, options))  # type: ignore[misc]
        shows.__doc__ = f"Print the settings of `penstock {name}` with the same options."
        app.command(shows, name=name.rpartition(" ")[2])
        if name == "serve":
            app.default(shows)
    return app


def _show(made: Command, options: dict[str, Any]) -> None:
    settled = made.settle(options, os.environ)
    check_variables(settled.environment)
    echo("\n".join([*lines_of(settled), *_lines_of_variables(settled.environment)]))


def lines_of(settled: Settled) -> Iterator[str]:
    """Yield the lines of a settings file with these values; each ends with a comment that names the origin."""
    from ..secrets import shown_engine_args

    group = ""
    for record, values in settled.values.items():
        known = settings_of(record)
        for name, each in values.items():
            if known[name].group != group:
                group = known[name].group
                yield f"\n# {group}"
            value = each.value
            if name == "engine_arg":  # without what may be a secret: the output is often passed on
                texts = shown_engine_args(values["engine"].value, EngineOptions(value).engine_args)
                value = [f"{argument}={text}" for argument, text in texts.items()]
            origin = each.origin if each.origin == "default" else f"{each.origin}: {each.place}"
            yield f"# {name} is not set" if value is None else f"{f'{name} = {as_toml(value)}':40}  # {origin}"


def _lines_of_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the table of the variables that have no option and are set; those that may be secrets are hidden."""
    from ..secrets import NOT_SHOWN
    from ..variables import SECRETS, names

    found = sorted(name for name in names() if environment.get(name, "").strip())
    if found:
        yield f"\n[{ENVIRONMENT_TABLE}]"
    for name in found:
        text = NOT_SHOWN if name in SECRETS else environment[name]
        origin = "environment" if os.environ.get(name, "").strip() else "file"
        yield f"{f'{name} = {as_toml(text)}':40}  # {origin}"


def as_toml(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {as_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
