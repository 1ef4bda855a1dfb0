"""Environment variables that are no field of a record, and readers of their texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite, nan
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

from .values import from_text

T = TypeVar("T")

Problem: TypeAlias = tuple[str, str]
"""A setting, and what is wrong with its value."""


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


def choice(*known: str) -> Callable[[str], str]:
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
