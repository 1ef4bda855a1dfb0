"""Arguments given as text, turned into what a function or a record wants by its annotations."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import attrs

from pipeline import InvalidArgument
from pipeline.codec import from_json


def converted(make: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The texts as the arguments of `make`. Raises InvalidArgument, naming the argument.

    A choice among texts is left to `make`, which knows what it accepts; a record is given as JSON. What has no
    annotation is a text.
    """
    if not texts:
        return {}
    return {name: _converted(text, hint_of(make, name), name) for name, text in texts.items()}


def hint_of(make: Callable[..., Any], name: str) -> Any:
    """The type of the argument `name` of `make`. Raises InvalidArgument if it takes none of that name."""
    parameters = inspect.signature(make).parameters
    takes_any = next((name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    named = [name for name, one in parameters.items() if one.kind in _BY_NAME]
    declared = name if name in named else takes_any
    if declared is None:
        raise InvalidArgument(f"no such argument; there are: {', '.join(named) or 'none'}", field=name)
    return _hint(make, declared, name)


def _hint(make: Callable[..., Any], parameter: str, name: str) -> Any:
    """The parameter's type. The others are not looked at: their annotations may be meant for type checkers only."""
    function: Any = make
    if isinstance(make, type):
        function = make.__init__  # type: ignore[misc]
    elif not inspect.isroutine(make):
        function = make.__call__  # type: ignore[operator]

    def alone() -> None: ...

    alone.__annotations__ = {parameter: getattr(function, "__annotations__", {}).get(parameter, str)}
    try:
        return typing.get_type_hints(alone, getattr(function, "__globals__", None))[parameter]
    except Exception as error:
        raise InvalidArgument(f"its type cannot be told: {error}", field=name) from error


def _converted(text: str, hint: Any, name: str) -> Any:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = [_plain(kind) for kind in (get_args(hint) if is_union else (hint,))]
    # What says most goes first: a text is anything, and `none` is no number.
    for kind in sorted(kinds, key=lambda kind: kind is str):
        if attrs.has(kind):
            if text.lstrip().startswith("{"):
                return _record(text, kind, name)
        elif kind in _READERS:
            try:
                return _READERS[kind](text)
            except (ValueError, KeyError):
                continue
    expected = " or ".join(_name(kind) for kind in kinds)
    raise InvalidArgument(f"must be {expected}, got {text!r}", field=name)


def _record(text: str, kind: type[Any], name: str) -> Any:
    try:
        return from_json(text, kind)
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=name) from None


def _plain(kind: Any) -> Any:
    """The type itself: a choice of texts is a text."""
    return str if typing.get_origin(kind) is typing.Literal else kind


def _name(kind: Any) -> str:
    return "a JSON object" if attrs.has(kind) else _NAMES.get(kind, "something not settable as text")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    str: str,
    Path: Path,
    type(None): lambda text: {"none": None}[text.lower()],
}
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "none",
}
