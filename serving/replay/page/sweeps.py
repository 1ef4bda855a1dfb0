"""The pages of many runs: which of them no other beats, what each parameter does, how cost grows with workers.

Path("sweep.html").write_text(sweep_page(sweep(...)))
Path("pareto.html").write_text(pareto_page(reports_by_name))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report import SWEEP_COLUMNS, WORKER_COUNT, Report, figure_named, number, sweep_cells, titled
from ..sweeping import FRONTS, Sweep, unbeaten_in
from .charts import grid, library
from .html import document, folded, section, setting_text, table, value_cell
from .page import comparison_table
from .pareto import Point, front_of, pareto_chart, points_of
from .run_charts import parameter_charts, scaling_chart, scaling_of, varied_of

PAIRS = (
    ("mean_ttft_ms", "output_throughput_tok_s"),
    ("p99_ttft_ms", "prefix_cache_reused_ratio"),
)
"""What a page of reports draws against what: figures by their names in JSON."""
_AT_ONE_COST = (("mean_ttft_ms", "p99_ttft_ms"), ("p99_ttft_ms", "prefix_cache_reused_ratio"))
"""The same for a sweep in which all runs have as many workers."""
_TITLE = "Penstock replay: sweep"


def pareto_page(runs: Mapping[str, Report], *, pairs: Sequence[tuple[str, str]] = PAIRS, group: str = "router") -> str:
    """Return a chart for each pair of figures, its Pareto front marked; `group` names the setting of the colours.

    What a request took the machine follows, if runs were timed. Raises InvalidArgument for a figure that no run has.
    """
    fronts = "".join(_front(points_of(runs, x, y, group), x, y) for x, y in pairs)
    lines = scaling_of(runs, group)
    parts = [
        section("Which runs no other beats", fronts),
        section("Cost by workers", _scaling(lines, "ms of the machine a request") if lines else ""),
        section("All figures", folded("every run", comparison_table(runs) if runs else "")),
    ]
    return document(_TITLE, f"{len(runs):,} runs", "".join(parts), library())


def scaling_page(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    """Return cost over worker counts: a line of workers and cost for each name; `label` is what the cost is."""
    return document(f"{label} by workers", f"{len(lines):,} lines", _scaling(lines, label), library())


def sweep_page(sweep: Sweep, *, group: str = "router") -> str:
    """Return the runs as a table, those that no other beats, and charts over each parameter that varies.

    Runs are compared only under the same load, so each load has its own charts. `group` names the setting of the
    colours.
    """
    runs, reports = {result.run.name: result.run for result in sweep.results}, sweep.reports
    parts = [section("The runs", _runs_table(sweep)), section("Which runs no other beats", _fronts(sweep, group))]
    for name in varied_of(list(runs.values())):
        if name != group:
            parts.append(section(f"By {name}", grid(parameter_charts(name, runs, reports))))
    parts.append(section("All figures", folded("every run", comparison_table(reports) if reports else "")))
    failed = len(runs) - len(reports)
    lead = f"{len(runs):,} runs" + (f", {failed:,} failed" if failed else "")
    return document(_TITLE, lead, "".join(parts), library())


def _runs_table(sweep: Sweep) -> str:
    marks = unbeaten_in(sweep.runs, sweep.reports)
    columns = (titled(figure.short, figure.unit) for figure, _ in SWEEP_COLUMNS)
    rows = []
    for result in sweep.results:
        if result.report is None:
            cells = [f'<span class="bad">{value_cell(result.problem or "")}</span>']
        else:
            cells = [*sweep_cells(result.report), f'<span class="best">{", ".join(marks[result.run.name])}</span>']
        rows.append((result.run.name, cells))
    caption = "Unbeaten: no other run under the same load has as few workers and is as good in it."
    return table(["run", "requests", *columns, "unbeaten in"], rows, caption=caption)


def _fronts(sweep: Sweep, group: str) -> str:
    """Return charts for each load: over the number of workers where that differs."""
    charts = []
    for load in dict.fromkeys(result.run.load_label for result in sweep.results):
        same = [result for result in sweep.results if result.run.load_label == load]
        reports = {result.run.name: result.report for result in same if result.report is not None}
        parameters = {result.run.name: result.run.parameters for result in same}
        several = len({len(report.workers) for report in reports.values()}) > 1
        for x, y in [(WORKER_COUNT, figure) for figure in FRONTS.values()] if several else _AT_ONE_COST:
            if reports:
                charts.append(_front(points_of(reports, x, y, group, parameters), x, y, load))
    return "".join(charts) or "<p>No run has a report.</p>\n"


def _front(points: Sequence[Point], x: str, y: str, load: str = "") -> str:
    """Return the chart of two figures, and its points as a table with the front first."""
    front = front_of(points, x, y)
    names = list(dict.fromkeys(name for point in points for name in point.parameters))
    ordered = [*front, *sorted((at for at in range(len(points)) if at not in front), key=lambda at: (points[at].x, at))]
    rows = []
    for place, at in enumerate(ordered, 1):
        point = points[at]
        cells = [str(place) if place <= len(front) else "", number(point.x), number(point.y)]
        given = point.parameters
        cells += [value_cell(setting_text(given[name])) if name in given else "" for name in names]
        rows.append((point.label, cells))
    head = ["run", "front", figure_named(x).title, figure_named(y).title, *names]
    chart = pareto_chart(points, x, y, load=load).html() if points else "<p>No run has both figures.</p>\n"
    return chart + folded("the runs of this chart", table(head, rows))


def _scaling(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    counts = sorted({workers for points in lines.values() for workers, _ in points})
    rows = [(name, [number(dict(points).get(count)) for count in counts]) for name, points in lines.items() if points]
    return scaling_chart(lines, label).html() + table(["workers", *map(number, counts)], rows)
