"""Options made of records: a command that takes a record of settings gets an option for each of its fields.

    @cli.command()
    @with_record_options
    def serve(port: Port = 8000, *, limits: HttpLimits) -> None: ...

The options are named after the fields, `max_connections` is `--max-connections`, and read the fields' variables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import attrs
import typer

from pipeline.protocols.settings import Setting, settings_of

Command = TypeVar("Command", bound=Callable[..., None])


def with_record_options(command: Command) -> Command:
    """The command with each parameter that is a record of settings replaced by the options of its fields.

    Raise TypeError if two records, or a record and the command, have a name in common.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    records = {name: hints[name] for name in signature.parameters if attrs.has(hints[name])}
    kept = [p.replace(annotation=hints[n]) for n, p in signature.parameters.items() if n not in records]
    options = [option for record in records.values() for option in _options(record)]
    names = [parameter.name for parameter in (*kept, *options)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"more than one option is called {', '.join(sorted(twice))}")

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: record(**{field: _value(values.pop(field)) for field in settings_of(record)})
            for name, record in records.items()
        }
        command(**values, **made)

    run.__signature__ = inspect.Signature([*kept, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *options)} | {"return": None}
    del run.__wrapped__  # its parameters are not these
    return run  # type: ignore[return-value]


def _options(record: type[Any]) -> list[inspect.Parameter]:
    hints, defaults = get_type_hints(record), {each.name: each.default for each in attrs.fields(record)}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=list(default) if isinstance(default := defaults[name], tuple) else default,
            annotation=Annotated[_hint(hints[name]), _option(known, hints[name])],
        )
        for name, known in settings_of(record).items()
    ]


def _hint(kind: Any) -> Any:
    """What typer is given: it knows lists, not tuples of any length."""
    return list[str] if get_origin(kind) is tuple else kind


def _value(value: Any) -> Any:
    """What the record is given: each text of a list may hold several with commas between them."""
    if not isinstance(value, list):
        return value
    return tuple(part.strip() for text in value for part in text.split(",") if part.strip())


def _option(known: Setting, kind: Any) -> Any:
    minimum = known.minimum if known.minimum is None or kind is not int else int(known.minimum)
    panel = "Access" if minimum is None else "Limits"
    return typer.Option(envvar=known.variable, min=minimum, help=known.help, rich_help_panel=panel)
