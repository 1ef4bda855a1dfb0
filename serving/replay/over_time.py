"""Amounts for each interval of a replay: things that happen at a time, and things that last."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from attrs import define, field


@define(eq=False)
class Amounts:
    """Sums by interval. An interval begins with its first moment and ends before that of the next."""

    interval_ms: float
    by_interval: defaultdict[int, float] = field(factory=lambda: defaultdict(float))

    def interval(self, at_ms: float) -> int:
        return int(at_ms // self.interval_ms)

    def add(self, at_ms: float, amount: float = 1.0) -> None:
        self.by_interval[self.interval(at_ms)] += amount

    def add_sorted(self, times_ms: Sequence[float]) -> None:
        """One for each of the times, which come in order."""
        at = 0
        while at < len(times_ms):
            interval = self.interval(times_ms[at])
            end = bisect_left(times_ms, interval + 1, at, key=self.interval)
            self.by_interval[interval] += end - at
            at = end

    def values(self, intervals: int) -> list[float]:
        """The first so many sums."""
        return [self.by_interval.get(interval, 0.0) for interval in range(intervals)]


@define(eq=False)
class Lasting:
    """How many of something there were on average in each interval."""

    interval_ms: float
    _parts: defaultdict[int, float] = field(factory=lambda: defaultdict(float))
    """Milliseconds in the intervals where something began or ended."""
    _changes: defaultdict[int, int] = field(factory=lambda: defaultdict(int))
    """By how many the number of whole intervals grows there."""

    def add(self, begin_ms: float, end_ms: float) -> None:
        """Something lasted from one time to another."""
        first, last = int(begin_ms // self.interval_ms), int(end_ms // self.interval_ms)
        if first == last:
            self._parts[first] += end_ms - begin_ms
            return
        self._parts[first] += (first + 1) * self.interval_ms - begin_ms
        self._parts[last] += end_ms - last * self.interval_ms
        self._changes[first + 1] += 1
        self._changes[last] -= 1

    def means(self, intervals: int, end_ms: float) -> list[float]:
        """Of the first so many intervals, of which the last one ends with the replay."""
        whole, found = 0, []
        for interval in range(intervals):
            whole += self._changes.get(interval, 0)
            lasted_ms = min(self.interval_ms, end_ms - interval * self.interval_ms) or self.interval_ms
            found.append((self._parts.get(interval, 0.0) + whole * self.interval_ms) / lasted_ms)
        return found
