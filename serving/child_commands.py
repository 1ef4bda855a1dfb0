"""The commands of the programs of a deployment: what was given to one program, passed on to those that it starts.

Only options are passed on: variables are inherited, and the settings file is read again by each program.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pipeline.settings import Setting

from .settings import Settled, as_text


def command_of(
    name: str,
    known: Mapping[str, Setting],
    settled: Settled,
    own: Mapping[str, Any],
    *,
    leave_out: Collection[str] = (),
) -> list[str]:
    """Return the command of a program by its name.

    `known` are its settings, `own` values that it gets in any case; an option that was given for another of its
    settings is passed on unless it is one to leave out.
    """
    given = {
        setting: each.value
        for values in settled.values.values()
        for setting, each in values.items()
        if each.origin == "option" and setting in known and setting not in leave_out
    }
    values = given | {setting: value for setting, value in own.items() if value is not None}
    arguments = [str(value) for setting, value in values.items() if not known[setting].options]
    for setting, value in values.items():
        if known[setting].options:
            arguments += _option(known[setting].options[0], value)
    config = [] if settled.path is None else [f"--config={settled.path}"]
    return [sys.executable, "-m", "serving", name, *config, *arguments]


def _option(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool):
        yield name if value else f"--no-{name.removeprefix('--')}"
    elif isinstance(value, tuple | list):
        for each in value:
            yield f"{name}={as_text(each)}"
    else:
        yield f"{name}={as_text(value)}"
