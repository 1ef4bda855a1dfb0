"""What the value of a setting must be: its range, and the types that a text, or a value of a TOML file, stands for."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs


@attrs.frozen
class Check:
    """What a value must be."""

    text: str
    """Completes the sentence "must be ..."."""
    holds: Callable[[Any], bool]
    """Return whether a value is right. Not called for None."""


def at_least(low: float) -> Check:
    """Return the check for a number from `low` on."""
    return Check(f"at least {low:g}", lambda value: bool(value >= low))


def above(low: float) -> Check:
    """Return the check for a number above `low`."""
    return Check(f"above {low:g}", lambda value: bool(value > low))


def between(low: float, high: float) -> Check:
    """Return the check for a number from `low` to `high`."""
    return Check(f"between {low:.15g} and {high:.15g}", lambda value: bool(low <= value <= high))


def share() -> Check:
    """Return the check for a part of a whole, from 0 to 1."""
    return between(0, 1)


def finite(low: float) -> Check:
    """Return the check for a finite number from `low` on."""
    return Check(f"a finite number not below {low:g}", lambda value: is_finite(value) and bool(value >= low))


def one_of(*known: str) -> Check:
    """Return the check for one of these texts."""
    return Check(f"one of {', '.join(known)}", lambda value: value in known)


ANY = Check("anything", lambda value: True)
"""The check that any value passes."""


def is_finite(value: float) -> bool:
    """Return whether a number is finite; an integer larger than any float is not."""
    try:
        return isfinite(value)
    except OverflowError:
        return False


PORT = between(0, 65535)
"""The check for a TCP port; 0 takes a free one."""


def shown(value: Any) -> str:
    """Return a value as errors show it: texts in quotes."""
    return repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def kinds_of(kind: Any) -> Sequence[Any]:
    """Return the types a value may have: those of a union, that of each item of a tuple, or the type itself."""
    if isinstance(kind, types.UnionType) or get_origin(kind) is typing.Union:
        return [each for one in get_args(kind) for each in kinds_of(one)]
    return kinds_of(get_args(kind)[0]) if get_origin(kind) is tuple else [kind]


def from_text(text: str, kind: Any) -> Any:
    """Return the value of this type that a text stands for. Raise ValueError that names the types."""
    kinds = kinds_of(kind)
    # The narrowest first: any text is a text, and `none` is not a number.
    for each in sorted(kinds, key=lambda each: each is str):
        if get_origin(each) is Literal:
            if text in get_args(each):
                return text
        elif each in _READERS:
            try:
                return _READERS[each](text)
            except (ValueError, KeyError):
                continue
    raise ValueError(f"must be {expected(kinds)}, got {text!r}")


def from_plain(value: Any, kind: Any) -> Any:
    """Return the value of this type that a value of a TOML file stands for. Raise ValueError that names the types."""
    kinds = kinds_of(kind)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(from_plain(each, kinds[0]) for each in value)
    for each in kinds:
        if get_origin(each) is Literal:
            if value in get_args(each):
                return value
        elif each is Path and isinstance(value, str):
            return Path(value)
        elif each is float and type(value) is int:
            return float(value) if is_finite(value) else value
        elif type(value) is (get_origin(each) or each):
            return (value,) if get_origin(kind) is tuple else value
    raise ValueError(f"must be {expected(kinds)}, got {shown(value)}")


def expected(kinds: Iterable[Any]) -> str:
    """Return the types in words: "an integer or none"."""
    return " or ".join(dict.fromkeys(map(_in_words, kinds)))


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if attrs.has(kind):
        return "a JSON object"
    return _WORDS.get(kind, "something that no text can set")


TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOLEANS = dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)
_READERS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: lambda text: _BOOLEANS[text.strip().lower()],
    str: str,
    Path: Path,
}
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "none",
}


# -- readers of texts of variables


def whole(low: int = 0, high: int = 2**64 - 1, unit: float | None = None) -> Callable[[str], Any]:
    """Return a reader of numbers written in digits only, from `low` to `high`; with a `unit` times that, as a float."""

    def read(text: str) -> Any:
        if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST and low <= int(text) <= high):
            raise ValueError(f"must be a whole number from {low} to {high}, got {_cut(text)}")
        return int(text) if unit is None else int(text) * unit

    return read


def number(low: float = 0, high: float = inf) -> Callable[[str], float]:
    """Return a reader of finite decimal numbers from `low` to `high`."""

    def read(text: str) -> float:
        try:
            value = decimal(text)
        except ValueError:
            value = nan
        if not (isfinite(value) and low <= value <= high):
            most = "" if high == inf else f" and at most {high:g}"
            raise ValueError(f"must be a number of at least {low:g}{most}, got {_cut(text)}")
        return value

    return read


def decimal(text: str) -> float:
    """Return the number of a text. Raise ValueError also for digits in groups and for those of other scripts."""
    if "_" in text or not text.isascii():
        raise ValueError(f"must be a number, got {_cut(text)}")
    return float(text)


def switch(text: str) -> bool:
    """Return whether a text is a word for yes. Raise ValueError for a text that is no word for no either."""
    return bool(from_text(text, bool))


def choice(*known: str) -> Callable[[str], Any]:
    """Return a reader of one of these texts."""

    def read(text: str) -> str:
        if text not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {_cut(text)}")
        return text

    return read


def url_path(text: str) -> str:
    """Return the path of a URL. Raise ValueError for one that does not begin with a slash, or has placeholders."""
    if not text.startswith("/") or {"{", "}"} & set(text):
        raise ValueError(f"must be a path that begins with / and has no braces, got {_cut(text)}")
    return text


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}...")


_LONGEST = 20
"""Digits of the longest number that a variable may have: those of 2**64."""
_SHOWN_MAX = 64
"""Characters of a text that an error repeats."""
