"""The page of a sweep: which runs no other beats, what each parameter does, and how cost grows with workers.

Path("sweep.html").write_text(pareto_page(reports_by_name))
Path("sweep.html").write_text(sweep(...).page())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .page import document
from .page_figures import WORKER_COUNT, comparison
from .page_parameters import parameter_charts, varied_of
from .page_pareto import pareto_figure, sweep_points
from .page_scaling import scaling_figure, scaling_of
from .page_text import escaped, folded, number, table, value_cell
from .report import Report
from .sweeping import Sweep
from .unbeaten import FRONTS, unbeaten_in

PAIRS = (
    ("mean_ttft_ms", "output_throughput_tok_s"),
    ("p99_ttft_ms", "prefix_cache_reused_ratio"),
)
"""What is drawn against what: figures by their names in JSON."""
_AT_ONE_COST = (("mean_ttft_ms", "p99_ttft_ms"), ("p99_ttft_ms", "prefix_cache_reused_ratio"))
"""The same for a sweep in which all runs have as many workers."""
_COST = "ms of the machine a request"


def pareto_page(
    runs: Mapping[str, Report],
    *,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    group: str = "router",
    scaling: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    cost_label: str = _COST,
) -> str:
    """A chart for each pair of figures, its Pareto front marked; `group` names the setting that gives the colour.

    `scaling` are lines of workers and cost; without it, what a request took the machine, where runs were timed.
    Raises InvalidArgument for a figure none of the runs has. The same runs give the same page, byte for byte.
    """
    charts = [pareto_figure(sweep_points(runs, x, y, group), x, y) for x, y in pairs]
    lines = scaling_of(runs, group) if scaling is None else scaling
    parts = [f"<section>\n<h2>Which runs no other beats</h2>\n{''.join(charts)}</section>\n"]
    if lines:
        parts.append(f"<section>\n<h2>Cost by workers</h2>\n{scaling_figure(lines, cost_label)}</section>\n")
    if runs:
        parts.append(f"<section>\n<h2>All figures</h2>\n{folded('every run', comparison(runs))}</section>\n")
    return document("Penstock replay: sweep", f"{len(runs):,} runs", "".join(parts))


def sweep_page(sweep: Sweep, *, group: str = "router") -> str:
    """The runs as a table, those that no other beats, and charts over each parameter that varies.

    Runs are held against each other only under the same load, so each load has charts of its own. The same results give
    the same page, byte for byte.
    """
    runs, reports = {result.run.name: result.run for result in sweep.results}, sweep.reports
    parts = [_section("The runs", _runs_table(sweep)), _section("Which runs no other beats", _fronts(sweep, group))]
    for name in varied_of(list(runs.values())):
        if name != group and (charts := parameter_charts(name, runs, reports)):
            parts.append(_section(f"By {escaped(name)}", f'<div class="two">\n{"".join(charts)}</div>\n'))
    if reports:
        parts.append(_section("All figures", folded("every run", comparison(reports))))
    failed = len(runs) - len(reports)
    lead = f"{len(runs):,} runs" + (f", {failed:,} failed" if failed else "")
    return document("Penstock replay: sweep", lead, "".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}</section>\n"


def _runs_table(sweep: Sweep) -> str:
    marks = unbeaten_in(sweep.runs, sweep.reports)
    head = [
        "run",
        "requests",
        "mean TTFT, ms",
        "p99 TTFT, ms",
        "mean TPOT, ms",
        "reuse",
        "output tokens/s",
        "unbeaten in",
    ]
    rows = []
    for result in sweep.results:
        if result.report is None:
            cells = [f'<span class="bad">{value_cell(result.problem or "")}</span>']
        else:
            cells = [*_cells(result.report), f'<span class="best">{", ".join(marks[result.run.name])}</span>']
        rows.append((escaped(result.run.name), cells))
    caption = "Unbeaten: no other run under the same load has as few workers and is as good in it."
    return table(head, rows, caption=caption)


def _cells(report: Report) -> list[str]:
    done, all_of = report.completed_requests, report.num_requests
    ttft, tpot = report.ttft, report.tpot
    return [
        number(done) if done == all_of else f"{number(done)} of {number(all_of)}",
        number(ttft.mean if ttft.samples else None),
        number(ttft.p99 if ttft.samples else None),
        number(tpot.mean if tpot.samples else None),
        number(report.prefix_cache_reused_ratio),
        number(report.output_throughput_tok_s),
    ]


def _fronts(sweep: Sweep, group: str) -> str:
    """Charts for each load: over the number of workers where that differs."""
    charts = []
    for load in dict.fromkeys(result.run.load_label for result in sweep.results):
        same = [result for result in sweep.results if result.run.load_label == load]
        reports = {result.run.name: result.report for result in same if result.report is not None}
        parameters = {result.run.name: result.run.parameters for result in same}
        several = len({len(report.workers) for report in reports.values()}) > 1
        pairs = [(WORKER_COUNT, figure) for figure in FRONTS.values()] if several else _AT_ONE_COST
        for x, y in pairs if reports else ():
            points = sweep_points(reports, x, y, group, parameters)
            charts.append(pareto_figure(points, x, y, load=load, is_folded=True))
    return "".join(charts) or "<p>No run has a report.</p>\n"
