"""Checks: what the value of a setting must be."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

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


def not_blank() -> Check:
    """Return the check for a text that is more than blanks."""
    return Check("more than blanks", lambda value: bool(value.strip()))


def is_finite(value: float) -> bool:
    """Return whether a number is finite; an integer larger than any float is not."""
    try:
        return isfinite(value)
    except OverflowError:
        return False


PORT = between(0, 65535)
"""The check for a TCP port; 0 takes a free one."""
