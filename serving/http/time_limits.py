"""TimeLimits: how long a request, its engine's silence and one write may take.

Decides only: a `RequestClock` compares a request with its state at the last check, and returns the limit it exceeded.
"""

from __future__ import annotations

from math import inf

from attrs import frozen

from pipeline.errors import ExceededLimit

from .options import HttpOptions
from .side_task import TIMER_ERROR_S

_CHECKS_PER_LIMIT = 4
"""Checks within the shortest limit: a limit takes effect at most a quarter of it late."""


@frozen
class TimeLimits:
    """The limits of one app in seconds, infinite where there is none."""

    write_s: float = inf
    """One write to a client."""
    silence_s: float = inf
    """Without an item of the engine."""
    request_s: float = inf
    """The request as a whole."""

    @classmethod
    def of(cls, options: HttpOptions) -> TimeLimits:
        """Return the limits in the options. `silence_timeout_s` of the options overrides that of their `limits`."""
        limits, silence_s = options.limits, options.silence_timeout_s
        return cls(
            limits.write_timeout_s or inf,
            limits.silence_timeout_s or inf if silence_s is None else silence_s,
            limits.request_timeout_s or inf,
        )

    @property
    def period_s(self) -> float:
        """Seconds between two checks of a request; infinite if nothing is limited."""
        return min(self.write_s, self.silence_s, self.request_s) / _CHECKS_PER_LIMIT


class RequestClock:
    """The state of one request at its last check, and since when it has been so."""

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
        """Return the limit if the number of items is unchanged for too long and no check found an excuse."""
        if items != self._items or is_excused:
            self._items, self._items_s = items, now_s
            return None
        return _beyond("silence_timeout_s", now_s - self._items_s, self._limits.silence_s)

    def lasted_too_long(self, now_s: float) -> ExceededLimit | None:
        """Return the limit if the request as a whole has taken too long."""
        return _beyond("request_timeout_s", now_s - self._began_s, self._limits.request_s)


def _beyond(name: str, value_s: float, limit_s: float) -> ExceededLimit | None:
    return ExceededLimit(name, round(value_s, 3), limit_s) if value_s > limit_s - TIMER_ERROR_S else None
