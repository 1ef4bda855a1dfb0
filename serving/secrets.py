"""The settings of a replay that its report may show, since a report is passed on.

A value is shown only if it is known to be harmless: a number, a boolean or a path, one of the literal choices of an
engine's parameter, or a parameter that the engine or this module names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from .deployment import converted, find_engine, hint_of

NOT_SHOWN = "(not shown)"
"""Replaces a value that may be a secret."""
_SOUNDS_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$", re.IGNORECASE)
_OF_THE_ROUTER = re.compile(r"DYN_ROUTER_[A-Z_]+")
"""Variables whose texts are names of policies and files."""
_NUMBER_OR_SWITCH = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?|true|false|yes|no|on|off|none", re.IGNORECASE)


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in the order of their names, with the values that may be shown."""
    return {name: text if _is_shown(name, text) else NOT_SHOWN for name, text in sorted(environment.items())}


def _is_shown(name: str, text: str) -> bool:
    if _SOUNDS_SECRET.search(name):
        return False
    return _OF_THE_ROUTER.fullmatch(name) is not None or _NUMBER_OR_SWITCH.fullmatch(text.strip()) is not None


def shown_engine_args(engine: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments of an engine with the values that may be shown. Our own engines have no secrets."""
    choice = find_engine(engine)
    if choice.is_ours:
        return dict(texts)
    return {name: text if _is_harmless(choice.arguments, name, text) else NOT_SHOWN for name, text in texts.items()}


def _is_harmless(make: Callable[..., Any], name: str, text: str) -> bool:
    """Return whether a text for this parameter of an engine's factory is known not to be a secret."""
    if name in getattr(make, "shown_texts", ()):
        return True
    if _SOUNDS_SECRET.search(name):
        return False
    hint = hint_of(make, name)
    if get_origin(hint) is Literal:
        return text in get_args(hint)
    value = converted(make, {name: text})[name]
    return value is None or isinstance(value, bool | int | float | Path)
