"""Settings: attrs fields that carry what a command line, an environment and a table of the docs need to know of them.

    @frozen
    class HttpLimits:
        max_connections: int = setting(10_000, "Connections that may be open at a time.")

From that one line come the option `--max-connections`, the variable `PENSTOCK_MAX_CONNECTIONS`, the check of its range
and its row in the docs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

T = TypeVar("T")

_KEY = "setting"


@attrs.frozen
class Setting:
    """What is known of one field beside its name, type and default.

    `help` is one plain sentence. Numbers are at least `minimum`; None for what is no number. `variable` is the
    environment variable that sets it.
    """

    help: str
    minimum: float | None
    variable: str


def setting(default: T, help: str, *, minimum: float = 0, variable: str = "") -> T:
    """An attrs field with this default: a number, a text, a path, a tuple of texts, or None where it is not set.

    ValueError is raised for a number below `minimum`. `variable` replaces the name made of the field's: `PENSTOCK_` and
    the field in upper case.
    """
    if not isinstance(default, int | float):
        return attrs.field(default=default, metadata={_KEY: Setting(help, None, variable)})
    at_least: Any = attrs.validators.ge
    return attrs.field(default=default, metadata={_KEY: Setting(help, minimum, variable)}, validator=at_least(minimum))


def settings_of(record: type[Any]) -> Mapping[str, Setting]:
    """The settings of an attrs class by field name, in their order; fields made otherwise are left out."""
    found: dict[str, Setting] = {}
    for each in attrs.fields(record):
        known = each.metadata.get(_KEY)
        if isinstance(known, Setting):
            variable = known.variable or f"PENSTOCK_{each.name.upper()}"
            found[each.name] = attrs.evolve(known, variable=variable)
    return found
