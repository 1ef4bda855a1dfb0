"""A sweep as a table: a row for each run, in the order of the grid. A door of rich.

A sweep as JSON: a list of runs, each flat, so that it is a table to whoever reads it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline import wire

from ...terminal import rendered
from ..report import SWEEP_COLUMNS, plain_figures, sweep_cells
from ..unbeaten import FRONTS, unbeaten_in
from .grid import SweepRun
from .run import Sweep, SweepResult

_COLUMNS = ("requests", *(figure.short for figure, _ in SWEEP_COLUMNS), "unbeaten in")
_NOTE = "Times in ms. Unbeaten: no other run under the same load has as few workers and is as good in it."


def sweep_text(sweep: Sweep) -> str:
    """What the results are; a run that has none, because it failed or was not reached, says so.

    Its width is as needed.
    """
    runs, by_name = sweep.runs, {result.run.name: result for result in sweep.results}
    marks = unbeaten_in(runs, sweep.reports)
    table = Table(title="Penstock sweep", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("run", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[-1] else "right", no_wrap=True)
    for run in runs:
        table.add_row(run.name, *_cells(run, by_name, marks))
    out = io.StringIO()
    width = max(len(run.name) for run in runs) + 120 if runs else 120
    Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False).print(table)
    return rendered(f"{out.getvalue()} {_NOTE}\n")


def _cells(run: SweepRun, results: Mapping[str, SweepResult], marks: Mapping[str, Sequence[str]]) -> list[str]:
    result = results.get(run.name)
    if result is None or result.report is None:
        return ["not run" if result is None else "failed"]
    return [*sweep_cells(result.report), ", ".join(marks[run.name])]


def sweep_json(sweep: Sweep) -> bytes:
    """A line for each run: its `name`, `parameters`, `error` where it failed, and the figures as a report calls them.

    `unbeaten_in` are the figures in which no other run beats it. Series, workers and single requests are left to the
    reports. A run that was not reached is not in it.
    """
    marks = unbeaten_in(sweep.runs, sweep.reports)
    lines = [wire.to_json(_plain(one, marks.get(one.run.name, ()))).decode() for one in sweep.results]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _plain(result: SweepResult, marks: Sequence[str]) -> Mapping[str, Any]:
    run, report = result.run, result.report
    plain: dict[str, Any] = {"name": run.name, "parameters": dict(run.parameters), "error": result.problem}
    if report is None:
        return plain
    figures = plain_figures(report)
    return plain | {"unbeaten_in": [FRONTS[mark] for mark in marks], "worker_count": run.workers} | figures
