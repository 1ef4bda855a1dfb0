"""Fields of a JSON object, checked one by one; all problems are collected and raised at once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from attrs import define, field

from pipeline import InvalidArgument

U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_NUMBER_MAX = 1e15
"""Beyond it a float cannot represent each millisecond."""
_SHOWN_CHARACTERS = 40
_Check: TypeAlias = Callable[[Any], bool]


@define
class Fields:
    """The fields of one object. Each reader returns the value, or None if it is absent, null or invalid.

    A field that `is_needed` must have a value; of two names of one field, only one may.
    """

    values: Mapping[str, Any]
    problems: list[str] = field(factory=list)
    """What is invalid so far; `check` raises them all at once."""

    @classmethod
    def of(cls, value: Any) -> Fields:
        """Return the fields of a JSON value. Raise InvalidArgument unless it is an object."""
        if not isinstance(value, dict):
            raise InvalidArgument(f"it is {shown(value)}, not an object")
        return cls(value)

    def check(self) -> None:
        """Raise InvalidArgument with all problems so far, if any."""
        if self.problems:
            raise InvalidArgument("; ".join(self.problems))

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def is_given(self, name: str) -> bool:
        """Return whether the field has a value: neither null, false, 0 nor empty."""
        return self.values.get(name) not in (None, False, "", [], 0)

    def part(self, name: str) -> Fields:
        """Return the fields of an object inside, which is needed; it shares the list of problems."""
        value = self._value(name, lambda value: isinstance(value, dict), "is {}, not an object", needed=True)
        return Fields({} if value is None else value, self.problems)

    def number(self, name: str, alias: str | None = None) -> float | None:
        """Return a number from 0 to `_NUMBER_MAX`."""
        value = self._value(name, _is_number, "is {}, not a number from 0 on", alias)
        return None if value is None else float(value)

    def whole(
        self, name: str, alias: str | None = None, *, low: int = 0, high: int = U32_MAX, is_needed: bool = False
    ) -> int | None:
        """Return a whole number between two limits, both included."""
        what = f"is {{}}, not a whole number between {low} and {high}"
        value = self._value(name, lambda one: type(one) is int and low <= one <= high, what, alias, is_needed)
        return cast(int | None, value)

    def needed(self, name: str, alias: str | None = None, *, low: int = 0, high: int = U32_MAX) -> int:
        """Return the same of a field that is needed: `low` if it is invalid."""
        value = self.whole(name, alias, low=low, high=high, is_needed=True)
        return low if value is None else value

    def flag(self, name: str) -> bool:
        """Return whether the field is true."""
        return bool(self._value(name, lambda value: type(value) is bool, "is {}, not true or false"))

    def text(self, name: str) -> str | None:
        """Return a text without surrounding white space; None if it is empty."""
        value = self._value(name, lambda value: isinstance(value, str), "is {}, not a text")
        return (value or "").strip() or None

    def name(self, name: str) -> str:
        """Return the same of a field that is needed: empty if it is invalid."""
        value = self.text(name)
        if value is None and not self.is_given(name):
            self.problem(f"{name} is missing")
        return value or ""

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value(name, _are_names, "is not a list of names")
        return tuple(item.strip() for item in value or ())

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers as `number` takes, which is needed."""
        value = self._value(name, _are_numbers, "is not a list of numbers from 0 on", needed=True)
        return [float(item) for item in value or ()]

    def hashes(self, name: str, *, is_needed: bool = False) -> array[int] | None:
        """Return a list of u64 numbers."""
        value = self._value(name, _are_hashes, "is not a list of whole numbers of 64 bits", needed=is_needed)
        return None if value is None else array("Q", value)

    def ids(self, name: str, *, is_needed: bool = False) -> array[int] | None:
        """Return a list of u32 numbers, such as token ids."""
        value = self._value(name, lambda value: isinstance(value, list), "is {}, not a list", needed=is_needed)
        if value is None:
            return None
        if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= U32_MAX)):
            return array("I", value)
        wrong = [at for at, one in enumerate(value) if type(one) is not int or not 0 <= one <= U32_MAX]
        more = f", and {len(wrong) - 1} more are wrong" if len(wrong) > 1 else ""
        at = wrong[0]
        self.problem(f"{name}[{at}] is {shown(value[at])}, not a whole number between 0 and {U32_MAX}{more}")
        return None

    def _value(self, name: str, is_valid: _Check, problem: str, alias: str | None = None, needed: bool = False) -> Any:
        """Return the value under either name, None if it is invalid; `problem` has a place for it."""
        given = [one for key in (name, alias) if key is not None and (one := self.values.get(key)) is not None]
        if len(given) == 2:
            self.problem(f"{name} comes twice, also as {alias}")
        if not given and needed:
            self.problem(f"{name} is missing")
        if given and not is_valid(given[0]):
            self.problem(f"{name} {problem.format(shown(given[0]))}")
            return None
        return given[0] if given else None


def shown(value: Any) -> str:
    """Return an invalid value as text, shortened."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _NUMBER_MAX


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item.strip() for item in value)


def _are_hashes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= _U64_MAX for one in value)
