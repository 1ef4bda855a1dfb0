"""Commands made of functions whose parameters are records of settings. A door of cyclopts.

    @command(app)
    def graph(draw: DrawOptions, model: ModelOptions, engine: EngineOptions) -> None: ...

gives `penstock graph` an option for each field of the three records; a parameter may also be a record of such records.
What cyclopts has parsed is joined with the environment and the settings file by `serving.settings`; the function then
gets the records. What it raises of the errors of this project, or of the system, ends the program with a line that
names the option to change.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import attrs
from attrs import frozen
from cyclopts import App, CycloptsError, Group, Parameter

from pipeline import InvalidArgument, PenstockError
from pipeline.settings import Setting, kinds_of, settings_of

from ..failure_report import report
from ..log_format import log_to_stderr
from ..settings import ConfigOption, Settled, Sources, WrongSettings, as_text, parts_of, settle
from ..terminal import echo

Function = TypeVar("Function", bound=Callable[..., "int | None"])
Records = Mapping[str, type[Any]]
"""Records of settings by the parameter that takes them."""

GROUPS = (
    *(
        "Engine",
        "Upstream",
        "Graph",
        "Worker",
        "Runtime",
        "Server",
        "Load",
        "Sweep",
        "Live",
        "Report",
        "Options",
        "Logging",
    ),
    *("Access", "Limits"),
)
"""The parts of the help in their order."""

ABORTED_EXIT = 1
USAGE_EXIT = 2
INTERRUPTED_EXIT = 130
"""As shells give it."""

_FIELDS = {"vocabulary": "live_ids"}
"""Fields of errors that no option is named after -> the setting behind them."""


@frozen
class Command:
    """One command: the function, its records, and what its settings come to."""

    function: Callable[..., int | None]
    records: Records

    @property
    def parts(self) -> list[type[Any]]:
        """The records of settings, also those that are fields of a record."""
        return [part for record in self.records.values() for part in parts_of(record)]

    def settings(self) -> dict[str, Setting]:
        """Return the settings of all its records by name. Raise TypeError if two records share one."""
        known: dict[str, Setting] = {}
        for record in (*self.parts, ConfigOption):
            for name, one in settings_of(record).items():
                if name in known:
                    raise TypeError(f"more than one option is called {one.label}")
                known[name] = one
        return known

    def settle(self, options: dict[str, Any], environment: Mapping[str, str]) -> Settled:
        """Return the settings as given. Raise WrongSettings for what is wrong with any of them."""
        path = options.pop("config", None) or environment.get("PENSTOCK_CONFIG", "").strip() or None
        known = {name for each in commands.values() for name in each.settings()} - {"config"}
        sources = Sources.read(options, environment, None if path is None else Path(path), known)
        return settle(self.parts, sources)

    def run(self, options: dict[str, Any]) -> int | None:
        """Run the function with the records that the options and other sources give."""
        settled = self.settle(options, os.environ)
        made = {name: settled.made(record) for name, record in self.records.items()}
        if log := next((settled.made(part) for part in self.parts if "log_level" in settings_of(part)), None):
            log_to_stderr(log.log_level.upper(), log.log_format, access_log=log.access_log)
            check_variables(settled.environment)
        if "settled" in inspect.signature(self.function).parameters:
            made["settled"] = settled
        return self.function(**made)

    def labels(self) -> dict[str, str]:
        """Return what errors call a setting, by the field of the error."""
        found: dict[str, str] = {}
        for name, known in self.settings().items():
            found |= {option.removeprefix("--").replace("-", "_"): known.label for option in known.options}
            found[name] = known.label
        return found | {field: found[name] for field, name in _FIELDS.items() if name in found}


commands: dict[str, Command] = {}
"""Every command by its name: `serve`, `replay sweep`."""


def command(app: App, name: str | None = None, **how: Any) -> Callable[[Function], Function]:
    """Make the decorated function a command of the app; an empty name makes it what the app does by default.

    Parameters that are records of settings become options; `settled: Settled` gets the environment and
    where each value is from. Raise TypeError if two records have a setting in common.
    """

    def add(function: Function) -> Function:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
        records = {n: hints[n] for n in parameters if hints[n] is not Settled}
        made = Command(function, records)
        flat = flattened(made, made.run)
        called = function.__name__ if name is None else name
        if called:
            app.command(flat, name=called, **how)
        else:
            app.default(flat, **how)
        commands[f"{_own_name(app)} {called}".strip()] = made
        return function

    return add


def flattened(made: Command, act: Callable[[dict[str, Any]], int | None]) -> Callable[..., int | None]:
    """Return a function that cyclopts can read, with a parameter for each setting; it passes what is given to `act`."""
    known = made.settings()
    arguments = [one for one in known.values() if not one.options]

    def run(*values: Any, **options: Any) -> int | None:
        given = {one.name: value for one, value in zip(arguments, values, strict=False) if value}
        try:
            return act(given | options)
        except BrokenPipeError:  # nobody reads what is printed: see `run_program`
            raise
        except (PenstockError, OSError) as error:
            fail(error, made.labels())

    parameters = [_parameter(one) for one in sorted(known.values(), key=lambda one: bool(one.options))]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__, run.__name__ = made.function.__doc__, made.function.__name__
    return run


def check_variables(environment: Mapping[str, str]) -> None:
    """Log the variables that nothing reads. Raise WrongSettings for those without an option that cannot be read."""
    from ..variables import names, unread, unreadable

    if problems := unreadable(environment):
        raise WrongSettings(f"{name}: {what}" for name, what in problems)
    known = {one.variable for each in commands.values() for one in each.settings().values()}
    for line in unread(environment, known | names()):
        logging.getLogger(__name__).warning(line)


def _own_name(app: App) -> str:
    """Return what comes before the name of a command of the app: nothing for the program itself."""
    return "" if app.name == ("penstock",) else app.name[0]


def _parameter(known: Setting) -> inspect.Parameter:
    kind: Any = list[str] if known.is_list else bool if bool in kinds_of(known.kind) else str
    shown = Parameter(
        name=list(known.options) or [known.metavar],
        help=_help(known),
        group=_group(known.group),
        metavar=known.metavar or _metavar(known, kind),
        negative=() if kind is not bool or not known.has_negative else None,
        show_default=False,
        allow_repeating=None if known.is_list else True,
        consume_multiple=not known.options,
    )
    how = inspect.Parameter.KEYWORD_ONLY if known.options else inspect.Parameter.POSITIONAL_ONLY
    # What is not given is not passed on; the default only has to be of the type.
    default = inspect.Parameter.empty if known.default is attrs.NOTHING else () if kind == list[str] else kind()
    return inspect.Parameter(known.name, how, default=default, annotation=Annotated[kind, shown])


@cache
def _group(title: str) -> Group:
    """Return the part of the help with this title."""
    return Group(title, sort_key=GROUPS.index(title))


def _metavar(known: Setting, kind: Any) -> str | None:
    types = kinds_of(known.kind)
    names = {int: "INT", float: "NUMBER", Path: "PATH"}
    return None if kind is bool else next((names[each] for each in types if each in names), "TEXT")


def _help(known: Setting) -> str:
    """Return the sentence of the help with what the value may be, its variable and its default."""
    notes = [known.help]
    if known.choices:
        notes.append(f"[{', '.join(known.choices)}]")
    if known.variable:
        notes.append(f"[env: {known.variable}]")
    if known.default not in (None, (), "", attrs.NOTHING):
        notes.append(f"[default: {as_text(known.default)}]")
    return " ".join(notes)


def run_program(app: App, tokens: Sequence[str]) -> int:
    """Run the command that the tokens name; return the exit code."""
    try:
        try:
            function, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            echo(f"Error: {error}", err=True)
            return USAGE_EXIT
        code = function(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except KeyboardInterrupt:
        echo("Aborted.", err=True)
        return ABORTED_EXIT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return ABORTED_EXIT
    needs_command = function == app.help_print and not {*app.help_flags} & {*tokens}
    return USAGE_EXIT if needs_command else code or 0


def fail(error: Exception, labels: Mapping[str, str]) -> NoReturn:
    """End the program with the report of the error, which names the option to change: see `failure_report`.

    `labels` are what options are called, by field. With messages for debugging the whole traceback is below it.
    """
    if isinstance(error, WrongSettings):
        lines = [f"Error: {line}" for line in error.lines]
    else:
        lines = report(error, _place(error.field, labels) if isinstance(error, InvalidArgument) else "")
    for line in lines:
        echo(line, err=True)
    logging.getLogger(__name__).debug("it was raised here", exc_info=error)
    raise SystemExit(USAGE_EXIT if isinstance(error, InvalidArgument | OSError) else 1) from None


def _place(field: str | None, labels: Mapping[str, str]) -> str:
    """Return what stands in front of a message: the option to change, or the field that is not one."""
    if not field:
        return ""
    for place, option in (("engine_args.", "--engine-arg"), ("vary.", "--vary")):
        if field.startswith(place):
            return f"{option} {field.removeprefix(place)}: "
    return f"{labels.get(field, field)}: "
