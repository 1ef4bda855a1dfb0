"""Axes: where a value stands on a chart, and which values are written at it."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, inf, isfinite, log10

from attrs import frozen

from .page_text import number

_LOG_FROM = 50.0
"""A logarithmic axis is worth its trouble when the greatest value is so many times the least."""
_TIMES = (("h", 3.6e6, 7.2e6), ("min", 6e4, 3e5), ("s", 1e3, 2e3), ("ms", 1.0, 0.0))
"""Units of time, their milliseconds, and how long a replay is counted in them."""
_LEAST = 1e-300
_MOST_TICKS = 10
_ROOM, _APART = 1.2, 0.04
"""Beside the numbers of an axis of counts, as a factor; and between two that are written, as part of the axis."""
_PERCENTILES = (0, 50, 75, 90, 95, 99)
_LAST = 2.5
"""Where the greatest value stands: as far from p99 as half a nine."""


@frozen
class Axis:
    """A scale from `low` to `high`, with what is written at its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    label: str = ""
    is_log: bool = False

    def part(self, value: float) -> float:
        """How far along the axis a value stands, 0 to 1 for what lies within."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(value)
        return (at - low) / (high - low)

    def shows(self, value: float | None) -> bool:
        """Whether a value has a place: a logarithmic axis has none for 0."""
        return value is not None and isfinite(value) and (value > 0 or not self.is_log)


def from_zero(values: Iterable[float | None], label: str = "", count: int = 5) -> Axis:
    """An axis from 0 to a round number not below any of the values."""
    high = max((value for value in values if value is not None and isfinite(value)), default=0.0)
    step = _step(high if high > 0 else 1.0, count)
    steps = max(1, ceil(high / step - 1e-9))
    return Axis(0.0, steps * step, _written(at * step for at in range(steps + 1)), label)


def around(values: Iterable[float], label: str = "", count: int = 5) -> Axis:
    """An axis of round numbers that has the values well inside."""
    known = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    step = _step(high - low + 2 * room, count)
    first, last = floor((low - room) / step), ceil((high + room) / step)
    if low >= 0:
        first = max(first, 0)
    return Axis(first * step, last * step, _written(at * step for at in range(first, last + 1)), label)


def latency(values: Iterable[float | None], label: str) -> Axis:
    """From 0 on, or logarithmic where the values lie far apart."""
    known = [value for value in values if value is not None and isfinite(value)]
    positive = [value for value in known if value > 0]
    if not positive or max(positive) < _LOG_FROM * min(positive):
        return from_zero(known, label)
    return logarithmic(positive, label)


def logarithmic(values: Iterable[float], label: str) -> Axis:
    """An axis of positive values between round numbers. Where there are many ticks, only powers of ten are written."""
    known = [value for value in values if isfinite(value) and value > 0] or [1.0]
    first, last = floor(log10(min(known))), ceil(log10(max(known)))
    steps = [mark * 10.0**decade for decade in range(first, last + 1) for mark in (1, 2, 5)]
    low = max(step for step in steps if step <= min(known) * (1 + 1e-9))
    high = min((step for step in steps if step >= max(known) * (1 - 1e-9)), default=inf)
    if not low < high < inf:
        high = low * 10
    shown = [step for step in steps if low <= step <= high]
    if len(shown) > _MOST_TICKS:
        shown = [10.0**decade for decade in range(first, last + 1) if low <= 10.0**decade <= high]
    return Axis(low, high, _written(shown), f"{label}, logarithmic", True)


def counts(values: Iterable[float], label: str) -> Axis:
    """A logarithmic axis of numbers above 0, with room at both ends; each is written, as far as they stand apart."""
    known = sorted(set(values))
    low, high = known[0] / _ROOM, known[-1] * _ROOM
    whole = Axis(low, high, (), f"{label}, logarithmic", True)
    shown = known[:1]
    for value in known[1:]:
        if whole.part(value) - whole.part(shown[-1]) > _APART:
            shown.append(value)
    return Axis(low, high, _written(shown), whole.label, True)


def time(end_ms: float) -> tuple[Axis, float]:
    """An axis of the time of a replay, and the milliseconds of its unit."""
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms, from_ms in _TIMES if end_ms >= from_ms)
    high = end_ms / unit_ms if end_ms > 0 else 1.0
    step = _step(high, 7)
    ticks = _written(at * step for at in range(floor(high / step + 1e-9) + 1))
    return Axis(0.0, high, ticks, f"time of the replay, {unit}"), unit_ms


def percentile(percent: float) -> float:
    """Where a percentile stands: each nine has the same room, so the tail can be seen."""
    return _LAST if percent >= 100 else -log10(1 - percent / 100)


def percentiles() -> Axis:
    ticks = [(percentile(percent), f"p{percent}" if percent else "min") for percent in _PERCENTILES]
    return Axis(0.0, _LAST, (*ticks, (_LAST, "max")), "percentile")


def _step(span: float, count: int) -> float:
    """1, 2 or 5 times a power of ten, at most so many of them in the span."""
    rough = max(span / count, _LEAST)
    size = 10.0 ** floor(log10(rough))
    return next(size * mark for mark in (1, 2, 5, 10) if size * mark >= rough * (1 - 1e-9))


def _written(values: Iterable[float]) -> tuple[tuple[float, str], ...]:
    return tuple((value, _tick(value)) for value in values)


def _tick(value: float) -> str:
    rounded = float(f"{value:.6g}")
    return number(int(rounded)) if rounded.is_integer() else f"{rounded:,.6g}"
