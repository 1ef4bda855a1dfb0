"""The arguments of a call as text that a reader can use, and that holds no secret.

What is left out, and what is elided, is in the docstring of `Stage`.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from inspect import Parameter, isclass, isroutine, signature
from itertools import chain, repeat
from os import PathLike
from typing import Any, Literal, get_args, get_origin

ELIDED = "..."
_PLAIN = (int, float, complex, bool, type(None))
_COLLECTIONS = (list, tuple, set, frozenset, dict)
_SHORT_TEXT = 3
"""A text of so many characters is printed: it is too short for a secret."""
_LONGEST_ARGUMENT = 40

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

IsShown = Callable[[str], bool]
"""Whether a text may be printed."""


def argument_texts(
    made: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any], shown: Sequence[str], stages: type[Any]
) -> Iterator[str]:
    """The arguments that `made` was called with, in their order.

    `shown` names the parameters whose texts may be printed. An instance of `stages` prints as it prints itself.
    """
    parameters = list(signature(made.__init__).parameters.values())[1:]
    by_name, by_kind = {one.name: one for one in parameters}, {one.kind: one for one in parameters}
    by_place = [one for one in parameters if one.kind in _BY_PLACE]
    given = list(zip(args, chain(by_place, repeat(by_kind.get(Parameter.VAR_POSITIONAL))), strict=False))
    while given and (_is_default(*given[-1]) or _is_source(given[-1][0])):
        given.pop()
    for value, parameter in given:
        yield ELIDED if _is_source(value) else _text(value, _shows(made, parameter, shown), stages)
    for name, value in kwargs.items():
        parameter = by_name.get(name, by_kind.get(Parameter.VAR_KEYWORD))
        if not (_is_default(value, parameter) or _is_source(value) or isroutine(value)):
            yield f"{name}={_text(value, _shows(made, parameter, shown, name), stages)}"


def _shows(made: type[Any], parameter: Parameter | None, shown: Sequence[str], name: str | None = None) -> IsShown:
    """Return which texts of the parameter may be printed. `name`: the keyword of the argument, if it has one."""
    if parameter is not None and (parameter.name in shown or name in shown):
        return lambda text: True
    literals = set() if parameter is None else set(_literals(_hint(made, parameter)))
    return lambda text: len(text) <= _SHORT_TEXT or text in literals


def _hint(made: type[Any], parameter: Parameter) -> Any:
    """Return the parameter's type; None where it is meant for type checkers only, or there is none."""
    owner = next(cls for cls in made.__mro__ if "__init__" in cls.__dict__)

    def alone() -> None: ...

    alone.__annotations__ = {"one": parameter.annotation}
    try:
        return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]))["one"]
    except Exception:  # whatever evaluating a foreign annotation raises
        return None


def _literals(hint: Any) -> Iterator[str]:
    """The texts that a type consists of, at any depth."""
    if get_origin(hint) is Literal:
        yield from (text for text in get_args(hint) if isinstance(text, str))
        return
    for inner in get_args(hint):
        yield from _literals(inner)


def _is_default(value: object, parameter: Parameter | None) -> bool:
    if parameter is None or parameter.default is Parameter.empty:
        return False
    default = parameter.default
    return value is default or (type(value) is type(default) and isinstance(value, (*_PLAIN, str)) and value == default)


def _is_source(value: object) -> bool:
    """Return whether the value is an observable, whose class does not inform a reader."""
    return callable(getattr(value, "subscribe", None)) and not isclass(value)


def _text(value: object, is_shown: IsShown, stages: type[Any]) -> str:
    if isinstance(value, stages):
        return str(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value) in _PLAIN:
        return _shortened(repr(value))
    if isinstance(value, str):
        return _shortened(repr(str(value))) if is_shown(value) else ELIDED
    if isinstance(value, bytes | bytearray | memoryview):
        return ELIDED
    if type(value) in _COLLECTIONS:
        return _collection(value, is_shown, stages)
    own = getattr(value, "__name__", None) or getattr(value, "name", None)
    if isinstance(own, str) and not isinstance(value, PathLike):
        return _shortened(own)
    return type(value).__name__


def _collection(value: Any, is_shown: IsShown, stages: type[Any]) -> str:
    """Return a short list or tuple as it was written, any other collection by the number of its items."""
    opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if opening != "{" and not any(type(item) in _COLLECTIONS for item in value):
        end = "," if opening == "(" and len(value) == 1 else ""
        text = f"{opening}{', '.join(_text(item, is_shown, stages) for item in value)}{end}{closing}"
        if len(text) <= _LONGEST_ARGUMENT:
            return text
    return f"{opening}{len(value)} item{'' if len(value) == 1 else 's'}{closing}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ARGUMENT else text[: _LONGEST_ARGUMENT - 3] + "..."
