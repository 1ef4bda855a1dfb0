"""TimeLimits: how long a request, its engine's silence and one write may take; and whether they have.

Decides only: `Patience` is shown now and then how far a request is, and returns the limit that it has gone beyond.
"""

from __future__ import annotations

from math import inf

from attrs import frozen

from pipeline.errors import ExceededLimit

from .options import HttpOptions

_LOOKS_PER_LIMIT = 4
"""How often the requests are looked at within the shortest limit, so each takes effect at most that part later."""

_CLOCK_S = 1e-3
"""Timers of some loops are early by as much."""


@frozen
class TimeLimits:
    """The limits of one app in seconds, infinite where there is none."""

    write_s: float = inf
    silence_s: float = inf
    request_s: float = inf

    @classmethod
    def of(cls, options: HttpOptions) -> TimeLimits:
        """The limits that are in the options. The time for silence that they name itself goes before its limit."""
        limits, silence_s = options.limits, options.silence_timeout_s
        return cls(
            limits.write_timeout_s or inf,
            limits.silence_timeout_s or inf if silence_s is None else silence_s,
            limits.request_timeout_s or inf,
        )

    @property
    def period_s(self) -> float:
        """After how many seconds to look at the requests again; infinite if nothing is limited."""
        return min(self.write_s, self.silence_s, self.request_s) / _LOOKS_PER_LIMIT


class Patience:
    """What was seen of one request at the last look, and since when it has been so."""

    __slots__ = ("_began_s", "_items", "_items_s", "_limits", "_write", "_write_s")

    def __init__(self, limits: TimeLimits, began_s: float) -> None:
        self._limits = limits
        self._began_s = self._items_s = self._write_s = began_s
        self._items = 0
        self._write: object = None

    def stalled_write(self, now_s: float, write: object) -> ExceededLimit | None:
        """Return the limit if the same write is under way for too long; None stands for no write."""
        if write is None or write is not self._write:
            self._write, self._write_s = write, now_s
            return None
        return _beyond("write_timeout_s", now_s - self._write_s, self._limits.write_s)

    def silence(self, now_s: float, items: int, *, is_excused: bool) -> ExceededLimit | None:
        """Return the limit if the count of items is the same for too long, and there was no excuse at any look."""
        if items != self._items or is_excused:
            self._items, self._items_s = items, now_s
            return None
        return _beyond("silence_timeout_s", now_s - self._items_s, self._limits.silence_s)

    def lasted_too_long(self, now_s: float) -> ExceededLimit | None:
        """Return the limit if the request as a whole has taken too long."""
        return _beyond("request_timeout_s", now_s - self._began_s, self._limits.request_s)


def _beyond(name: str, value_s: float, limit_s: float) -> ExceededLimit | None:
    return ExceededLimit(name, round(value_s, 3), limit_s) if value_s > limit_s - _CLOCK_S else None
