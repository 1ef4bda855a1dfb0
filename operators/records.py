"""A copy of a record, several times faster than `attrs.evolve`; for what every request goes through."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from attrs import AttrsInstance, fields

R = TypeVar("R", bound=AttrsInstance)


def shallow_copy(record: R) -> R:
    """Return a copy, to be changed by the caller; what it holds is shared.

    For records whose fields, at least two, are all positional arguments.
    """
    cls = type(record)
    return cls(*_values_of(cls)(record))


@cache
def _values_of(cls: type[AttrsInstance]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in fields(cls)))
