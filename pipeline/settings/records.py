"""Settings: attrs fields that carry range, meaning, environment variable and option of what a user may set.

    @frozen
    class HttpLimits:
        group: ClassVar[str] = "Limits"

        max_connections: int = setting(10_000, "Connections that may be open at a time.", at_least(0))

That one line gives the option `--max-connections`, the variable `PENSTOCK_MAX_CONNECTIONS`, the key `max_connections`
of a settings file, the check of its range, its line in the help and its row in the docs. An object with fields that are
out of range cannot be made: InvalidArgument names all of them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin

import attrs

from ..errors import InvalidArgument
from .values import Check, at_least, from_plain, from_text, kinds_of, shown

T = TypeVar("T")

Problem: TypeAlias = tuple[str, str]
"""A setting, and what is wrong with its value."""
_KEY = "penstock.setting"
_SETTINGS: dict[Any, dict[str, Setting]] = {}
"""What `settings_of` has found, by class."""


@attrs.frozen
class Setting:
    """What is known of one field of a record of settings."""

    name: str
    kind: Any
    """Its type: what a text is turned into."""
    default: Any
    """`attrs.NOTHING` where a value must be given."""
    help: str
    """One plain sentence."""
    check: Check | None
    variable: str
    """The environment variable that sets it; empty: none does."""
    options: tuple[str, ...]
    """Its names on the command line; empty: an argument without a name, or with no metavar none at all."""
    metavar: str
    """What stands for the value in the help; empty: what follows from the type."""
    group: str
    """The heading above it in the help."""
    has_negative: bool
    """Whether a switch has a `--no-` form."""
    is_read_below: bool
    """Whether the stage that uses the value reads the variable by itself."""
    separator: str
    """What separates the items of a list within one text; empty: each text is one item."""
    read: Callable[[str], Any] | None
    """Turns the text of the variable into a value, or raises ValueError; None: as any text of the type."""

    @property
    def label(self) -> str:
        """What errors call it: its first option, or what stands for it."""
        return self.options[0] if self.options else self.metavar or self.name

    def value_of(self, text: str) -> Any:
        """Return the value that a text of the variable stands for. Raise ValueError that names what is allowed."""
        if self.read is not None:
            return self.read(text)
        if self.is_list:
            return tuple(from_text(part, self.kind) for part in self.parts(text))
        return from_text(text, self.kind)

    def out_of_range(self, value: Any) -> str | None:
        """Return what is wrong with a value of the right type, None if nothing is."""
        check, values = self.check, value if self.is_list else (value,)
        if check is None or value is None or all(map(check.holds, values)):
            return None
        return f"must be {check.text}, got {shown(value)}"

    def parts(self, text: str) -> list[str]:
        """Return the items of a list that a text stands for."""
        if not self.separator:
            return [text]
        return [part.strip() for part in text.split(self.separator) if part.strip()]

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(self.kind) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts it may be; empty: any that its type allows."""
        return next((get_args(kind) for kind in kinds_of(self.kind) if get_origin(kind) is Literal), ())


def setting(
    default: T,
    help: str,
    check: Check | None = None,
    *,
    variable: str | None = None,
    option: str | Sequence[str] | None = None,
    metavar: str = "",
    has_negative: bool = True,
    is_read_below: bool = False,
    separator: str = "",
    read: Callable[[str], Any] | None = None,
) -> T:
    """Return an attrs field that is a setting, with this default; `required(...)` makes one that has none.

    Without a `check` numbers are at least 0 if the default is one, and any if it is None. `variable` is by default the
    prefix of its record and the name in upper case, and none for "". `option` is by default the name with hyphens;
    `()` makes it an argument. The other parameters are those of `Setting`.
    """
    if check is None and isinstance(default, int | float) and not isinstance(default, bool):
        check = at_least(0)
    make = partial(
        Setting,
        help=help,
        check=check,
        metavar=metavar,
        has_negative=has_negative,
        is_read_below=is_read_below,
        separator=separator,
        read=read,
    )
    return attrs.field(default=default, metadata={_KEY: (make, variable, option)}, validator=_validate)


def by_variable(default: T, help: str, variable: str, read: Callable[[str], Any], check: Check | None = None) -> T:
    """Return an attrs field that is a setting without an option: a variable of the environment sets it."""
    return setting(default, help, check, variable=variable, option=(), read=read)


def required(help: str, *, metavar: str) -> Any:
    """Return an attrs field that is an argument of a command, and must be given."""
    return setting(attrs.NOTHING, help, variable="", option=(), metavar=metavar)


def settings_of(record: type[Any]) -> Mapping[str, Setting]:
    """Return the settings of an attrs class by field name, in their order; other fields are left out.

    The class may set `group`, the heading of its options, and `variable_prefix`, `PENSTOCK_` by default; with an empty
    prefix only those settings have a variable that name one. `validates_itself` leaves the checks to the class.
    """
    if (known := _SETTINGS.get(record)) is not None:
        return known
    hints, group = typing.get_type_hints(record), getattr(record, "group", "Options")
    prefix = getattr(record, "variable_prefix", "PENSTOCK_")
    found = _SETTINGS[record] = {}
    for each in attrs.fields(record):
        if _KEY not in each.metadata:
            continue
        make, variable, option = each.metadata[_KEY]
        found[each.name] = make(
            name=each.name,
            kind=hints[each.name],
            default=each.default,
            variable=(prefix and prefix + each.name.upper()) if variable is None else variable,
            options=(option,) if isinstance(option, str) else (dashed(each.name),) if option is None else tuple(option),
            group=group,
        )
    return found


def from_environment(
    record: type[Any], environment: Mapping[str, str], problems: list[Problem] | None = None
) -> dict[str, Any]:
    """Return the values of the fields that the environment sets, by name.

    A variable that is blank, or whose text cannot be a value of the field, counts as not set; the latter are added to
    `problems` under the variable's name.
    """
    found = {}
    for name, known in settings_of(record).items():
        text = environment.get(known.variable, "").strip() if known.variable else ""
        if not text:
            continue
        try:
            value = known.value_of(text)
            if (problem := known.out_of_range(value)) is not None:
                raise ValueError(problem)
        except ValueError as error:
            if problems is not None:
                problems.append((known.variable, str(error)))
        else:
            found[name] = value
    return found


def dashed(name: str) -> str:
    """Return the option of a field: `max_tools` is `--max-tools`."""
    return f"--{name.replace('_', '-')}"


def kind_problems(record: type[Any], values: Mapping[str, Any]) -> list[Problem]:
    """Return the values, by the names of settings, that are not of the type of their setting."""
    known, problems = settings_of(record), []
    for name, value in values.items():
        try:
            if not (value is None and type(None) in kinds_of(known[name].kind)):
                from_plain(value, known[name].kind)
        except ValueError as error:
            problems.append((name, str(error).replace(" or none, got ", ", got ")))
    return problems


def range_problems(record: type[Any], values: Mapping[str, Any]) -> list[Problem]:
    """Return what is out of range among values of the right types; None is right wherever it can be."""
    found = ((name, known.out_of_range(values.get(name))) for name, known in settings_of(record).items())
    return [(name, problem) for name, problem in found if problem is not None]


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise InvalidArgument if there are any: all of them in its text, the first one's setting as its field."""
    if len(problems) == 1:
        raise InvalidArgument(problems[0][1], field=problems[0][0])
    if problems:
        raise InvalidArgument("; ".join(f"{name}: {what}" for name, what in problems), field=problems[0][0])


def _validate(record: Any, attribute: attrs.Attribute[Any], _: Any) -> None:
    """Check the whole object once, when its first setting is set, unless its class does so by itself."""
    if getattr(record, "validates_itself", False):
        return
    known = settings_of(type(record))
    if attribute.name == next(iter(known)):
        raise_problems(range_problems(type(record), {name: getattr(record, name) for name in known}))


@attrs.frozen
class Variable(Generic[T]):
    """An environment variable that is no field of a record."""

    name: str
    default: T
    """Its value where it is not set, or its text cannot be read."""
    help: str
    read: Callable[[str], T]
    """Turns the text, without blanks around it, into the value. Raises ValueError that names what is allowed."""

    def of(self, environment: Mapping[str, str]) -> T:
        """Return the value that the environment sets."""
        text = environment.get(self.name, "").strip()
        try:
            return self.read(text) if text else self.default
        except ValueError:
            return self.default

    def problem(self, environment: Mapping[str, str]) -> Problem | None:
        """Return what is wrong with its text, if anything is."""
        text = environment.get(self.name, "").strip()
        try:
            if text:
                self.read(text)
        except ValueError as error:
            return self.name, str(error)
        return None
