"""Where the value of a setting comes from: an option, a variable of the environment, a file, or its default.

    option ──► environment ──► file ──► default          the first that has a value is taken

All problems of all sources are collected before one error reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_type_hints

import attrs
from attrs import field, frozen

from pipeline import InvalidArgument
from pipeline.settings import Setting, from_plain, from_text, range_problems, settings_of

Origin = Literal["option", "environment", "file", "default"]

ENVIRONMENT_TABLE = "environment"
"""The table of a settings file with variables that have no option."""


class WrongSettings(InvalidArgument):
    """Settings that cannot be; `lines` has one text for each problem, with its place."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("; ".join(self.lines))


@frozen
class Value:
    """One value with its origin; `place` is what a user would change: an option, a variable, a key of a file."""

    value: Any
    origin: Origin
    place: str


@frozen
class Sources:
    """What a user has given. `options` are texts, lists of texts and truth values by the name of the setting."""

    options: Mapping[str, Any] = field(factory=dict)
    environment: Mapping[str, str] = field(factory=dict)
    file: Mapping[str, Any] = field(factory=dict)
    """The keys of the settings file."""
    path: Path | None = None
    """The settings file."""
    problems: tuple[str, ...] = ()
    """What is wrong with the settings file as a whole."""

    @classmethod
    def read(
        cls, options: Mapping[str, Any], environment: Mapping[str, str], path: Path | None, known: Iterable[str]
    ) -> Sources:
        """Return the sources with the settings file at `path`, where there is one.

        Its table `environment` gives variables that the environment does not set. Raise InvalidArgument for a file that
        cannot be read; keys that are not among the `known` are problems for `settle` to report.
        """
        if path is None:
            return cls(options, environment)
        from ..settings_file import read_toml

        values = read_toml(path, "config")
        variables = values.pop(ENVIRONMENT_TABLE, {})
        problems = [f"{path}: {unknown(name, known)}" for name in values if name not in set(known)]
        if not isinstance(variables, dict):
            problems.append(f"{path}: {ENVIRONMENT_TABLE}: must be a table of variables")
            variables = {}
        texts = {name: as_text(value) for name, value in variables.items()}
        texts |= {name: text for name, text in environment.items() if text.strip()}
        return cls(options, texts, values, path, tuple(problems))

    def value_of(self, known: Setting) -> Value:
        """Return the value of a setting. Raise ValueError, whose text is the problem with its place."""
        name, variable = known.name, known.variable
        if name in self.options:
            return self._read(known, self.options[name], "option", known.label, _from_option)
        if variable and (text := self.environment.get(variable, "").strip()):
            return self._read(known, text, "environment", variable, Setting.value_of)
        if name in self.file:
            return self._read(known, self.file[name], "file", f"{self.path}: {name}", _from_file)
        if known.default is attrs.NOTHING:
            raise ValueError(f"{known.label}: is needed")
        return Value(known.default, "default", known.label)

    def _read(
        self, known: Setting, raw: Any, origin: Origin, place: str, convert: Callable[[Setting, Any], Any]
    ) -> Value:
        try:
            return Value(convert(known, raw), origin, place)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


@frozen
class Settled:
    """The values of the settings of some records, by record and by name."""

    values: Mapping[type[Any], Mapping[str, Value]]
    environment: Mapping[str, str]
    """The variables, also those that the settings file gives."""
    path: Path | None = None
    """The settings file."""

    def made(self, record: type[Any]) -> Any:
        """Return the record. A value of the environment that a stage below reads by itself is left to that stage."""
        if record not in self.values:
            return record(**{name: self.made(part) for name, part in get_type_hints(record).items()})
        known = settings_of(record)
        return record(
            **{
                name: each.value
                for name, each in self.values[record].items()
                if not (known[name].is_read_below and each.origin == "environment")
            }
        )

    @property
    def options(self) -> set[str]:
        """The names of settings that were given as options."""
        return {name for values in self.values.values() for name, each in values.items() if each.origin == "option"}


def parts_of(record: type[Any]) -> list[type[Any]]:
    """Return the records of settings in a parameter of a command: itself, or the types of its fields."""
    return [record] if settings_of(record) else list(get_type_hints(record).values())


def settle(records: Iterable[type[Any]], sources: Sources) -> Settled:
    """Return the values of all settings of the records. Raise WrongSettings with every problem of all of them."""
    problems = list(sources.problems)
    settled: dict[type[Any], dict[str, Value]] = {}
    for record in records:
        values = settled[record] = {}
        for name, known in settings_of(record).items():
            try:
                values[name] = sources.value_of(known)
            except ValueError as error:
                problems.append(str(error))
        plain = {name: each.value for name, each in values.items()}
        problems += [f"{values[name].place}: {what}" for name, what in range_problems(record, plain)]
    if problems:
        raise WrongSettings(problems)
    return Settled(settled, sources.environment, sources.path)


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the problem of a name that is not known, with the nearest known one if there is one."""
    near = get_close_matches(name, list(known), 1)
    return f"{name} is not a setting" + (f"; did you mean {near[0]}?" if near else "")


def _from_option(known: Setting, raw: Any) -> Any:
    if known.is_list:
        return tuple(from_text(part, known.kind) for text in raw for part in known.parts(text))
    return raw if isinstance(raw, bool) else from_text(raw, known.kind)


def _from_file(known: Setting, value: Any) -> Any:
    if known.is_list and isinstance(value, dict):  # NAME=VALUE, as a table
        return tuple(f"{name}={as_text(each)}" for name, each in value.items())
    return from_plain(value, known.kind)


def as_text(value: Any) -> str:
    """Return a plain value as the text of a variable or an argument: `true`, `0.5`, `name`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
