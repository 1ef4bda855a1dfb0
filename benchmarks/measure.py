"""Measuring: repeat, take the least disturbed run, report as a ratio."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from attrs import asdict, frozen

REPEATS = 7


@frozen
class Result:
    """One line of the table: what was measured, beside what it is held against in the same run."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    """The same in plain Python, or of the alternative."""
    budget: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


async def best_of(run: Callable[[], Awaitable[int]], repeats: int = REPEATS) -> float:
    """Seconds for one unit of work: the fastest of some runs, each of which returns how many units it did."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        done = await run()
        best = min(best, (time.perf_counter() - start) / done)
    return best


async def best_of_each(runs: Sequence[Callable[[], Awaitable[int]]], repeats: int = REPEATS) -> list[float]:
    """The same for several that are compared: they take turns, so that what disturbs one disturbs all."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        best = [min(so_far, await best_of(run, 1)) for so_far, run in zip(best, runs, strict=True)]
    return best
