"""Bucket: a rate per minute, with up to one minute's worth at once. The caller passes the time."""

from __future__ import annotations

from attrs import define, field

_MINUTE_S = 60.0


@define
class Bucket:
    """A token bucket, filled evenly. Times are of a monotonic clock; one before the last counts as the last."""

    per_minute: float
    """The rate, and what a full bucket holds."""
    _level: float = field(default=-1.0, init=False)
    _at_s: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._level = self.per_minute

    def used(self, now_s: float) -> float:
        """Return the used part of a minute's worth; more than `per_minute` while the bucket is in debt."""
        passed_s = max(now_s - self._at_s, 0.0)
        self._level = min(self._level + passed_s * self.per_minute / _MINUTE_S, self.per_minute)
        self._at_s = max(now_s, self._at_s)
        return self.per_minute - self._level

    def wait_s(self, now_s: float, amount: float) -> float:
        """Return the seconds until the bucket holds `amount`, 0 if it does."""
        left = self.per_minute - self.used(now_s)
        return max(amount - left, 0.0) * _MINUTE_S / self.per_minute

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`, even more than the bucket holds: the debt is filled first."""
        self.used(now_s)
        self._level -= amount

    def set_rate(self, per_minute: float) -> None:
        """Change the rate. The used share of a minute stays the same."""
        self._level *= per_minute / self.per_minute
        self.per_minute = per_minute
