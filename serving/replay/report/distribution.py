"""Distribution: the figures a report gives of many samples, exact and the same in whatever order they came."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import floor, fsum, sqrt

from attrs import field, frozen

STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")
"""The figures, in the order a report gives them."""


@frozen
class Distribution:
    """Figures of so many samples; all 0 where there are none. `std` is that of the population."""

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
    """From 0 to 100, one for each percent, to draw them by; empty where there are no samples."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """Of samples in any order: the sums are exact before they are rounded, so the order leaves no mark."""
        ordered = sorted(samples)
        return cls._of(samples, len(ordered), ordered.__getitem__)

    @classmethod
    def _of(cls, samples: Iterable[float], count: int, at: Callable[[int], float]) -> Distribution:
        """`at` gives them in order. The sums go through `samples`, for an array lies side by side in memory."""
        if not count:
            return cls()
        mean = fsum(samples) / count
        spread = fsum((sample - mean) * (sample - mean) for sample in samples)
        return cls(
            samples=count,
            mean=mean,
            min=at(0),
            max=at(count - 1),
            median=at(rank(count, 50)),
            p75=at(rank(count, 75)),
            p90=at(rank(count, 90)),
            p95=at(rank(count, 95)),
            p99=at(rank(count, 99)),
            std=sqrt(spread / count),
            percentiles=[at(rank(count, percent)) for percent in range(101)],
        )


def rank(count: int, percent: float) -> int:
    """The index of a percentile among so many ordered samples: round((n - 1) * percent / 100), a half rounded up."""
    return min(count - 1, floor((count - 1) * percent / 100 + 0.5))


def gaps_and_rates(gaps_ms: array[float]) -> tuple[Distribution, Distribution]:
    """Of the gaps between tokens, and of tokens a second and user: one sample for each gap that is not zero.

    A rate falls as its gap grows, so both need one sort.
    """
    ordered = sorted(gaps_ms)
    rates = array("d", (1000.0 / gap for gap in gaps_ms if gap > 0))
    return (
        Distribution._of(gaps_ms, len(ordered), ordered.__getitem__),
        Distribution._of(rates, len(rates), lambda index: 1000.0 / ordered[-1 - index]),
    )
