"""A sweep as a table: a row for each run, in the order of the grid. A door of rich."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..terminal import rendered
from .grid import SweepRun
from .report import Report
from .sweeping import Sweep, SweepResult
from .table import NOT_KNOWN
from .unbeaten import unbeaten_in

_COLUMNS = ("requests", "mean TTFT", "p99 TTFT", "mean TPOT", "reuse", "output tok/s", "unbeaten in")
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
    return [*_figures(result.report), ", ".join(marks[run.name])]


def _figures(report: Report) -> list[str]:
    done, all_of = report.completed_requests, report.num_requests
    ttft, tpot = report.ttft, report.tpot
    return [
        f"{done:,}" if done == all_of else f"{done:,} of {all_of:,}",
        f"{ttft.mean:,.1f}" if ttft.samples else NOT_KNOWN,
        f"{ttft.p99:,.1f}" if ttft.samples else NOT_KNOWN,
        f"{tpot.mean:,.2f}" if tpot.samples else NOT_KNOWN,
        f"{report.prefix_cache_reused_ratio:.3f}",
        f"{report.output_throughput_tok_s:,.0f}",
    ]
