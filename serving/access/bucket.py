"""Bucket: a rate a minute, with up to a minute's worth at once. Pure: the caller passes the time."""

from __future__ import annotations

from attrs import define, field

_MINUTE_S = 60.0


@define
class Bucket:
    """A token bucket that holds `per_minute` when it is full and is filled evenly.

    Times are a clock's that does not go back, in seconds; an earlier time than the last counts as the last.
    """

    per_minute: float
    _level: float = field(default=-1.0, init=False)
    _at_s: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._level = self.per_minute

    def used(self, now_s: float) -> float:
        """How much of a minute's worth is taken now; beyond `per_minute` while the bucket is in debt."""
        passed_s = max(now_s - self._at_s, 0.0)
        self._level = min(self._level + passed_s * self.per_minute / _MINUTE_S, self.per_minute)
        self._at_s = max(now_s, self._at_s)
        return self.per_minute - self._level

    def wait_s(self, now_s: float, amount: float) -> float:
        """How long until the bucket holds `amount`, 0 if it does."""
        left = self.per_minute - self.used(now_s)
        return max(amount - left, 0.0) * _MINUTE_S / self.per_minute

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`, also beyond what is there: that debt is filled first."""
        self.used(now_s)
        self._level -= amount

    def set_rate(self, per_minute: float) -> None:
        """Change the rate; the same share of a minute stays used."""
        self._level *= per_minute / self.per_minute
        self.per_minute = per_minute
