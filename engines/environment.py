"""Reading variables of the environment: what cannot be read counts as not set."""

from __future__ import annotations

import math


def is_true(text: str | None) -> bool:
    """Whether it is a word for yes."""
    return (text or "").strip().lower() in {"1", "true", "yes", "on"}


def seconds(text: str | None) -> float | None:
    """A finite number, also a negative one; None for anything else."""
    if text is None or "_" in text:  # digit groups are Python's own
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def positive_seconds(text: str | None, default_s: float) -> float:
    """A finite number above zero, else the default."""
    number = seconds(text)
    return default_s if number is None or number <= 0 else number


def whole_seconds(text: str | None) -> int | None:
    """A number written in digits only; None for anything else."""
    digits = (text or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
