"""Reading variables of the environment: what cannot be read counts as not set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

_DIGITS = re.compile(r"[0-9]{1,20}")


def integer(text: str | None, low: int, high: int) -> int | None:
    """A number from `low` to `high`."""
    text = (text or "").strip()
    return int(text) if _DIGITS.fullmatch(text) and low <= int(text) <= high else None


def fraction(text: str | None, high: float) -> float | None:
    """A number from 0 to `high`, which may be infinite; what is read never is."""
    try:
        value = float((text or "").strip())
    except ValueError:
        return None
    return value if isfinite(value) and 0 <= value <= high else None


def seconds(text: str | None, unit_s: float) -> float | None:
    """A time given in units of so many seconds, more than none."""
    count = integer(text, 1, 10**9)
    return None if count is None else count * unit_s


def path(text: str | None) -> str | None:
    """A path of URLs, without placeholders."""
    text = (text or "").strip()
    return text if text.startswith("/") and not {"{", "}"} & set(text) else None


def is_true(text: str | None) -> bool:
    """Whether it is a word for yes."""
    return (text or "").strip().lower() in {"1", "true", "yes", "on"}


def of_graphs(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it may change what a graph does: the variables `DYN_*`, but for blank ones, which count as not set."""
    return {name: text for name, text in environment.items() if name.startswith("DYN_") and text.strip()}
