"""Fields of a JSON object, checked one by one; all problems are collected and raised at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import define, field

from pipeline import InvalidArgument

U32_MAX = 2**32 - 1
_NUMBER_MAX = 1e15
"""Beyond it a float cannot represent each millisecond."""
_SHOWN_CHARACTERS = 40


@define
class Fields:
    """The fields of one object. Each reader returns the value, or None if it is absent, null or invalid."""

    values: Mapping[str, Any]
    problems: list[str] = field(factory=list)
    """What is invalid so far; `check` raises them all at once."""

    def check(self) -> None:
        """Raise InvalidArgument with all problems so far, if any."""
        if self.problems:
            raise InvalidArgument("; ".join(self.problems))

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def is_given(self, name: str) -> bool:
        """Return whether the field has a value: neither null, false, 0 nor empty."""
        return self.values.get(name) not in (None, False, "", [], 0)

    def raw(self, name: str, alias: str | None = None) -> Any:
        """Return the value under either name; both at once is a problem."""
        value = self.values.get(name)
        other = None if alias is None else self.values.get(alias)
        if value is not None and other is not None:
            self.problem(f"{name} comes twice, also as {alias}")
        return other if value is None else value

    def number(self, name: str, alias: str | None = None) -> float | None:
        """Return a number from 0 to `_NUMBER_MAX`."""
        value = self.raw(name, alias)
        if value is None:
            return None
        if _is_number(value):
            return float(value)
        self.problem(f"{name} is {shown(value)}, not a number from 0 on")
        return None

    def whole(self, name: str, alias: str | None = None, *, low: int = 0, high: int = U32_MAX) -> int | None:
        """Return a whole number between two limits, both included."""
        value = self.raw(name, alias)
        if value is None:
            return None
        if type(value) is int and low <= value <= high:
            return value
        self.problem(f"{name} is {shown(value)}, not a whole number between {low} and {high}")
        return None

    def flag(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is None or type(value) is bool:
            return value
        self.problem(f"{name} is {shown(value)}, not true or false")
        return None

    def text(self, name: str) -> str | None:
        """Return a text without surrounding white space; None if it is empty."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return (value or "").strip() or None
        self.problem(f"{name} is {shown(value)}, not a text")
        return None

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.raw(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value):
            return tuple(item.strip() for item in value)
        self.problem(f"{name} is not a list of names")
        return ()

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers as `number` takes; an absent one is a problem."""
        value = self.raw(name)
        if isinstance(value, list) and all(map(_is_number, value)):
            return [float(item) for item in value]
        self.problem(f"{name} is missing" if value is None else f"{name} is not a list of numbers from 0 on")
        return []

    def ids(self, name: str) -> array[int] | None:
        """Return a list of u32 numbers, such as token ids."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.problem(f"{name} is {shown(value)}, not a list")
            return None
        wrong = None if set(map(type, value)) <= {int} and _in_range(value) else _wrong_ids(value)
        if wrong is None:
            return array("I", value)
        at, count = wrong
        more = f", and {count - 1} more are wrong" if count > 1 else ""
        self.problem(f"{name}[{at}] is {shown(value[at])}, not a whole number between 0 and {U32_MAX}{more}")
        return None


def shown(value: Any) -> str:
    """Return an invalid value as text, shortened."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _NUMBER_MAX


def _in_range(values: list[int]) -> bool:
    return not values or (min(values) >= 0 and max(values) <= U32_MAX)


def _wrong_ids(values: Iterable[Any]) -> tuple[int, int]:
    """Return the index of the first invalid value, and how many are invalid."""
    wrong = [at for at, value in enumerate(values) if type(value) is not int or not 0 <= value <= U32_MAX]
    return wrong[0], len(wrong)
