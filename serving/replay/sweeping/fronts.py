"""The runs that no other beats: none is as good in everything and better in something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report import Report
from .grid import SweepRun

FRONTS = {"mean": "mean_ttft_ms", "p99": "p99_ttft_ms", "reuse": "prefix_cache_reused_ratio"}
"""Figures that are compared at a number of workers: the name in a table, and the name in JSON."""


def unbeaten(costs: Sequence[tuple[float, ...] | None]) -> list[bool]:
    """Return which of the costs no other beats. None is always beaten; equal costs do not beat each other."""
    known = [cost for cost in costs if cost is not None]
    return [cost is not None and not any(_beats(other, cost) for other in known) for cost in costs]


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= yours for mine, yours in zip(one, other, strict=True))


def unbeaten_in(runs: Sequence[SweepRun], reports: Mapping[str, Report]) -> dict[str, list[str]]:
    """Return by the name of a run the figures of FRONTS in which no run under the same load beats it.

    A run beats another one if it has as few workers, completed as many requests and is as good in the figure, and is
    better in one of the three. A run without a token beats none.
    """
    marks: dict[str, list[str]] = {name: [] for name in reports}
    for load in dict.fromkeys(run.load_label for run in runs):
        same = [run for run in runs if run.load_label == load and run.name in reports]
        for short, figure in FRONTS.items():
            costs = [_cost(run, reports[run.name], figure) for run in same]
            for run, is_unbeaten in zip(same, unbeaten(costs), strict=True):
                if is_unbeaten:
                    marks[run.name].append(short)
    return marks


def _cost(run: SweepRun, report: Report, figure: str) -> tuple[float, ...] | None:
    """Less is better."""
    if not report.ttft.samples:
        return None
    value = report.prefix_cache_reused_ratio if figure == FRONTS["reuse"] else report.value(figure)
    return (run.workers, -report.completed_requests, -value if figure == FRONTS["reuse"] else value)
