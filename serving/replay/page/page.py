"""Reports as one HTML page that needs nothing else: no network and no other file.

    Path("report.html").write_text(report_page([report]))
    Path("compare.html").write_text(report_page({"round robin": one, "kv": other}))
    Path("sweep.html").write_text(sweep_page(sweep(...)))
    Path("pareto.html").write_text(pareto_page(reports_by_name))

The same reports give the same page, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report import (
    COSTS,
    COUNTS,
    DISTRIBUTIONS,
    GOODPUT,
    STATISTICS,
    SWEEP_COLUMNS,
    WORKER_COUNT,
    WORKERS,
    Distribution,
    Report,
    best,
    compared,
    difference,
    differing_settings,
    figure_named,
    number,
    sweep_cells,
    titled,
    worker_name,
)
from ..sweeping import FRONTS, Sweep, unbeaten_in
from .charts import grid, latency_charts, library, time_charts
from .html import document, escaped, folded, section, setting_text, table, value_cell
from .pareto import Point, front_of, pareto_chart, points_of
from .run_charts import comparison_chart, parameter_charts, scaling_chart, scaling_of, varied_of
from .worker_charts import worker_maps, worker_totals

_HEADLINES = (
    *("completed_requests", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms"),
    *("prefix_cache_reused_ratio", "request_throughput_rps", "output_throughput_tok_s"),
    *("load_balance_max_over_mean", "duration_ms"),
)
_MORE = (*GOODPUT, *COSTS)
"""Figures of a comparison that only the page has."""
_OPEN_RUNS = 4
"""The workers of more runs are folded."""
PAIRS = (
    ("mean_ttft_ms", "output_throughput_tok_s"),
    ("p99_ttft_ms", "prefix_cache_reused_ratio"),
)
"""What a page of reports draws against what: figures by their names in JSON."""
_AT_ONE_COST = (("mean_ttft_ms", "p99_ttft_ms"), ("p99_ttft_ms", "prefix_cache_reused_ratio"))
"""The same for a sweep in which all runs have as many workers."""
_SWEEP_TITLE = "Penstock replay: sweep"


def report_page(reports: Mapping[str, Report] | Sequence[Report]) -> str:
    """Return the page of one report, or of several compared with the first; those without a name get a number."""
    named = dict(reports) if isinstance(reports, Mapping) else {f"run {at}": one for at, one in enumerate(reports, 1)}
    several = len(named) > 1
    first = next(iter(named.values()), None)
    leads = _leads(named)
    is_long = len(leads) > _OPEN_RUNS
    parts = [
        folded("every run", "<p>" + "<br>\n".join(leads) + "</p>\n") if is_long else "",
        _headlines(first) + folded("all figures", comparison_table(named)) if first and not several else "",
        section("Comparison", _comparison(named) if several else ""),
        section("Latency", (grid(latency_charts(named)) or "<p>No request gave a token.</p>\n") + _statistics(named))
        if named
        else "",
        section("Over time", grid(time_charts(named))),
        section("Workers", _workers(named)),
        section("Settings", _settings_table(named)),
    ]
    title = f"Penstock replay: {len(named)} runs" if several else "Penstock replay"
    lead = f"{len(named)} runs" if is_long else "<br>\n".join(leads) or "No reports."
    return document(title, lead, "".join(parts), library())


def comparison_table(reports: Mapping[str, Report]) -> str:
    """Return a row for each figure, a column for each report: its value, how far from the first, and which is best."""
    rows = [
        (figure.title, _compared(values, figure.better)) for figure, values in compared(list(reports.values()), _MORE)
    ]
    first = next(iter(reports), "")
    caption = f"Percentages are differences from {first}; ★ marks the best of a row." if len(reports) > 1 else ""
    return table(["figure", *reports], rows, caption=caption)


def _comparison(reports: Mapping[str, Report]) -> str:
    figures = {figure.name: (figure, values) for figure, values in compared(list(reports.values()), _MORE)}
    first = [name for name in _HEADLINES if name in figures and name != "completed_requests"]
    shown = [figures[name] for name in dict.fromkeys([*first, *figures]) if figures[name][0] not in COUNTS]
    chart = comparison_chart(list(reports), [(figure, values) for figure, values in shown if any(values)])
    return comparison_table(reports) + (chart.html() if chart.figure.data else "")


def _compared(values: Sequence[float | None], better: int) -> list[str]:
    cells = []
    for at, (value, is_best) in enumerate(zip(values, best(values, better), strict=True)):
        star = '<span class="best" role="img" aria-label="best">★</span> ' if is_best else ""
        shown = f"<strong>{number(value)}</strong>" if is_best else number(value)
        cells.append(f"{star}{shown}{_change(values[0], value, better) if at else ''}")
    return cells


def _change(first: float | None, value: float | None, better: int) -> str:
    text = difference(first, value)
    if not text or first is None or value is None:
        return ""
    way = (value - first) * better
    kind = "same" if not way or text == "=" else "good" if way > 0 else "bad"
    return f' <span class="change {kind}">{text}</span>'


def _headlines(report: Report) -> str:
    """Return the figures to look at first, as cards."""
    cards = "".join(
        f"<div><dt>{escaped(figure.title)}</dt><dd>{number(figure.value(report))}</dd></div>\n"
        for figure in map(figure_named, _HEADLINES)
    )
    return f'<dl class="cards">\n{cards}</dl>\n'


def _leads(reports: Mapping[str, Report]) -> list[str]:
    """Return a line of HTML for each report: what was replayed."""
    lines = []
    for run, report in reports.items():
        tokens = f"{number(report.total_input_tokens)} input and {number(report.total_output_tokens)} output tokens"
        lines.append(
            f"{escaped(run)}: {number(report.completed_requests)} of {number(report.num_requests)} requests completed, "
            f"{tokens}, workers: {len(report.workers):,}, {number(report.duration_ms / 1000)} s"
        )
    return lines


def _statistics(reports: Mapping[str, Report]) -> str:
    parts = []
    for run, report in reports.items():
        figures: list[tuple[str, Distribution]] = [
            (titled(one.label, one.unit), getattr(report, one.name)) for one in DISTRIBUTIONS
        ]
        rows = [
            (label, [number(one.samples), *(number(getattr(one, statistic)) for statistic in STATISTICS)])
            for label, one in figures
            if one.samples
        ]
        parts.append(folded(f"{run}: all statistics", table(["figure", "samples", *STATISTICS], rows) if rows else ""))
    return "".join(parts)


def _workers(reports: Mapping[str, Report]) -> str:
    """Return the maps, totals and numbers of each run's workers, folded if there are many runs."""
    maps, totals = worker_maps(reports), worker_totals(reports)
    parts = []
    for run, report in reports.items():
        rows = [(worker_name(one), [number(getattr(one, figure.name)) for figure in WORKERS]) for one in report.workers]
        numbers = table(["worker", *(figure.label for figure in WORKERS)], rows) if rows else ""
        body = grid(maps.get(run, [])) + grid(totals.get(run, []), "four")
        body += folded(f"{len(rows):,} workers as numbers", numbers)
        if body and len(reports) > 1:
            body = folded(run, body, is_open=len(reports) <= _OPEN_RUNS)
        parts.append(body)
    return "".join(parts)


def _settings_table(reports: Mapping[str, Report]) -> str:
    """Return what was replayed; where the reports differ is marked."""
    rows, differing = [], differing_settings(reports.values())
    for name in dict.fromkeys(name for report in reports.values() for name in report.settings):
        cells = [setting_text(one.settings[name]) if name in one.settings else "" for one in reports.values()]
        is_marked = name in differing
        shown = [f"<mark>{value_cell(cell)}</mark>" if is_marked and cell else value_cell(cell) for cell in cells]
        rows.append((name, shown))
    return table(["setting", *reports], rows) if rows else ""


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
    return document(_SWEEP_TITLE, f"{len(runs):,} runs", "".join(parts), library())


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
    return document(_SWEEP_TITLE, lead, "".join(parts), library())


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
