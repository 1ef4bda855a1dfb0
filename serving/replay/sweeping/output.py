"""A sweep as a table of text, and as JSON: a row for each run, in the order of the grid."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import wire

from ...terminal import rendered
from ..report import SWEEP_COLUMNS, console_to, new_table, sweep_cells
from .fronts import FRONTS, unbeaten_in
from .grid import SweepRun
from .run import Sweep, SweepResult

_COLUMNS = ("requests", *(figure.short for figure, _ in SWEEP_COLUMNS))
_NOTE = "Times in ms. Unbeaten: no other run under the same load has as few workers and is as good in it."


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
