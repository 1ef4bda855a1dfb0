"""Distribution: statistics of many samples, exact and independent of their order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import floor, fsum, sqrt

from attrs import field, frozen

from ..arithmetic import Arithmetic

STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")
"""The statistics in the order of a report."""
_PERCENTS = {"min": 0, "median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99, "max": 100}


@frozen
class Distribution:
    """Statistics of that many samples, all 0 without samples. `std` is that of the population."""

    samples: int = 0
    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    median: float = 0.0
    p75: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    std: float = 0.0
    percentiles: list[float] = field(factory=list)
    """One for each percent from 0 to 100, for charts; empty without samples."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """Return the statistics of samples in any order: sums are exact before they are rounded."""
        ordered = sorted(samples)
        return cls._of(samples, len(ordered), ordered.__getitem__, Arithmetic())

    @classmethod
    def _of(
        cls, samples: Sequence[float], count: int, at: Callable[[int], float], arithmetic: Arithmetic
    ) -> Distribution:
        """`at` returns the samples in order. Sums iterate over `samples`, whose array is contiguous in memory."""
        if not count:
            return cls()
        mean = fsum(samples) / count
        spread = fsum(arithmetic.squares(samples, mean))
        parts = {name: at(rank(count, percent)) for name, percent in _PERCENTS.items()}
        percentiles = [at(rank(count, percent)) for percent in range(101)]
        return cls(samples=count, mean=mean, **parts, std=sqrt(spread / count), percentiles=percentiles)


def rank(count: int, percent: float) -> int:
    """Return the index of a percentile in `count` ordered samples: (n - 1) * percent / 100, a half rounded up."""
    return min(count - 1, floor((count - 1) * percent / 100 + 0.5))


def gaps_and_rates(gaps_ms: array[float], arithmetic: Arithmetic) -> tuple[Distribution, Distribution]:
    """Return the statistics of gaps, and of rates in tokens a second: a sample for each gap that is not 0.

    A rate falls as its gap grows, so both need one sort.
    """
    ordered = arithmetic.ordered(gaps_ms)
    positive = gaps_ms if ordered and ordered[0] > 0 else array("d", (gap for gap in gaps_ms if gap > 0))
    rates = arithmetic.rates(positive)
    return (
        Distribution._of(gaps_ms, len(ordered), ordered.__getitem__, arithmetic),
        Distribution._of(rates, len(rates), lambda index: 1000.0 / ordered[-1 - index], arithmetic),
    )
