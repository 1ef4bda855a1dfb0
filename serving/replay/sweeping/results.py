"""The results of a sweep: which runs no other beats, as a table of text and as JSON, in the order of the grid.

A run is beaten by one that is as good in everything and better in something.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from pipeline import wire

from ...terminal import rendered
from ..report import SWEEP_COLUMNS, Report, console_to, new_table, sweep_cells
from .grid import SweepRun

FRONTS = {"mean": "mean_ttft_ms", "p99": "p99_ttft_ms", "reuse": "prefix_cache_reused_ratio"}
"""Figures that are compared at a number of workers: the name in a table, and the name in JSON."""
_COLUMNS = ("requests", *(figure.short for figure, _ in SWEEP_COLUMNS))
_NOTE = "Times in ms. Unbeaten: no other run under the same load has as few workers and is as good in it."


@frozen
class SweepResult:
    """The result of a run: its report or its error."""

    run: SweepRun
    report: Report | None = None
    """Without single requests."""
    problem: str | None = None
    """The error as text."""
    is_found: bool = False
    """Whether the report existed already."""


@frozen
class Sweep:
    """The runs of a sweep and their results."""

    runs: Sequence[SweepRun]
    results: Sequence[SweepResult]
    """In the order of the runs; a run that was not reached has none."""

    @classmethod
    def of(cls, runs: Sequence[SweepRun], results: Iterable[SweepResult]) -> Sweep:
        """Return the sweep of results in any order."""
        by_name = {result.run.name: result for result in results}
        return cls(runs, [by_name[run.name] for run in runs if run.name in by_name])

    @property
    def reports(self) -> dict[str, Report]:
        """The existing reports by the names of their runs."""
        return {result.run.name: result.report for result in self.results if result.report is not None}


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
    value = report.figures[figure]
    return (run.workers, -report.completed_requests, -value if figure == FRONTS["reuse"] else value)


def sweep_text(sweep: Sweep) -> str:
    """Return the results as a table, as wide as needed; a run without a report is `failed` or `not run`.

    Raise ModuleNotFoundError without rich.
    """
    runs, by_name = sweep.runs, {result.run.name: result for result in sweep.results}
    out = io.StringIO()
    console = console_to(out, max((len(run.name) for run in runs), default=0) + 120, by="the table of a sweep")
    table = new_table("Penstock sweep", ("run", *_COLUMNS))
    table.add_column("unbeaten in", no_wrap=True)
    marks = unbeaten_in(runs, sweep.reports)
    for run in runs:
        table.add_row(run.name, *_cells(run, by_name, marks))
    console.print(table)
    return rendered(f"{out.getvalue()} {_NOTE}\n")


def _cells(run: SweepRun, results: Mapping[str, SweepResult], marks: Mapping[str, Sequence[str]]) -> list[str]:
    result = results.get(run.name)
    if result is None or result.report is None:
        return ["not run" if result is None else "failed"]
    return [*sweep_cells(result.report), ", ".join(marks[run.name])]


def sweep_json(sweep: Sweep) -> bytes:
    """Return a list of runs as JSON, a line for each: `name`, `parameters`, `error`, and the figures of its report.

    `unbeaten_in` are the figures in which no other run beats it. Series, workers and single requests are only in the
    reports. A run that was not reached is left out.
    """
    marks = unbeaten_in(sweep.runs, sweep.reports)
    lines = [wire.to_json(_plain(one, marks.get(one.run.name, ()))).decode() for one in sweep.results]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _plain(result: SweepResult, marks: Sequence[str]) -> dict[str, Any]:
    run, report = result.run, result.report
    plain: dict[str, Any] = {"name": run.name, "parameters": dict(run.parameters), "error": result.problem}
    if report is None:
        return plain
    unbeaten = [FRONTS[mark] for mark in marks]
    return plain | {"unbeaten_in": unbeaten, "worker_count": run.workers, **report.figures}
