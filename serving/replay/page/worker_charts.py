"""Charts of single workers: maps over time and totals. A door of plotly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, TypeAlias

import plotly.graph_objects as go  # type: ignore[import-untyped]

from ..report import Report, WorkerReport, worker_name
from .charts import Chart, axis, drawn, interval_seconds, time_axis

_LOAD, _PREFILL, _HIT_RATE = "#3182ce", "#b7891a", "#38a169"
_MOST_ROWS, _MOST_COLUMNS = 64, 240
"""Of a map; beyond, a cell is the mean of several."""
Rows: TypeAlias = list[tuple[str, Sequence[float | None]]]
"""Workers by name, each with a value for each interval."""
_TOTALS: tuple[tuple[str, Callable[[WorkerReport], float | None]], ...] = (
    ("Requests by worker", lambda one: one.requests),
    ("Computed tokens by worker", lambda one: one.input_tokens - one.cached_tokens + one.output_tokens),
    ("Hit rate by worker", lambda one: one.hit_rate),
    ("Running by worker, mean", lambda one: one.mean_running),
)


def worker_maps(reports: Mapping[str, Report]) -> dict[str, list[Chart]]:
    """Return maps of load and hit rate for each report: a row for each worker, a column for each interval.

    The same value has the same shade in all of them.
    """
    known = {run: report for run, report in reports.items() if report.series is not None and report.series.workers}
    loads = {run: _gathered(report, "load", interval_seconds(report)) for run, report in known.items()}
    most = max((cell for rows in loads.values() for _, cells in rows for cell in cells if cell is not None), default=0)
    x, unit_ms = time_axis(max((1000 * sum(interval_seconds(report)) for report in known.values()), default=0.0))
    return {
        run: [
            _map("Load: requests running", _LOAD, loads[run], most or 1.0, report, x, unit_ms),
            _map("Hit rate", _HIT_RATE, _gathered(report, "hit_rate"), 1.0, report, x, unit_ms),
        ]
        for run, report in known.items()
    }


def _gathered(report: Report, field: str, weights: Sequence[float] = ()) -> Rows:
    """Return at most so many rows and columns of a field of the workers' series, each cell the mean of neighbours."""
    assert report.series is not None
    rows: Rows = [(worker_name(one), getattr(one, field)) for one in report.series.workers]
    intervals = len(report.series.arrivals)
    weights = weights or [1.0] * intervals
    of = max(1, ceil(intervals / _MOST_COLUMNS))
    steps = range(0, intervals, of)
    short: Rows = [(name, [_mean(cells[at : at + of], weights[at : at + of]) for at in steps]) for name, cells in rows]
    of = max(1, ceil(len(rows) / _MOST_ROWS))
    some = [short[at : at + of] for at in range(0, len(short), of)]
    return [
        (
            part[0][0] if of == 1 else f"{part[0][0]} to {part[-1][0]}",
            [_mean(column, [1.0] * len(part)) for column in zip(*(cells for _, cells in part), strict=True)],
        )
        for part in some
    ]


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _map(title: str, full: str, rows: Rows, top: float, report: Report, x: Mapping[str, Any], unit_ms: float) -> Chart:
    assert report.series is not None
    intervals, workers = len(report.series.arrivals), len(report.series.workers)
    of = max(1, ceil(intervals / _MOST_COLUMNS))
    width = of * report.series.interval_ms / unit_ms
    heat = go.Heatmap(
        z=[[None if cell is None else float(f"{cell:.4g}") for cell in cells] for _, cells in rows],
        y=[name for name, _ in rows],
        x0=width / 2,
        dx=width,
        zmin=0,
        zmax=top,
        colorscale=[[0, _faint(full)], [1, full]],
        colorbar={"thickness": 8, "outlinewidth": 0, "tickfont": {"size": 10}, "nticks": 5},
        hovertemplate="worker %{y}, %{x:,.4~g}: %{z:,.3~g}<extra></extra>",
        showlegend=False,
    )
    notes = [f"a row is the mean of {ceil(workers / len(rows))} workers"] if len(rows) < workers else []
    notes += [f"a cell is the mean of {of} intervals"] if of > 1 else []
    y = axis("worker", type="category", autorange="reversed", nticks=16, showgrid=False)
    figure = drawn([heat], {**x, "showgrid": False}, y, height=min(440, 150 + 18 * len(rows)), hovermode="closest")
    return Chart(title, figure, ", ".join(notes))


def _faint(full: str) -> str:
    """Return a shade that differs from an empty cell."""
    red, green, blue = (int(full[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},.06)"


def worker_totals(reports: Mapping[str, Report]) -> dict[str, list[Chart]]:
    """Return bars for each report, one for each worker; the same figure has the same scale in all of them."""
    known = {run: report.workers for run, report in reports.items() if report.workers}
    tops = {
        title: max((value(one) or 0 for workers in known.values() for one in workers), default=0)
        for title, value in _TOTALS
    }
    return {
        run: [_bars(title, workers, value, tops[title]) for title, value in _TOTALS] for run, workers in known.items()
    }


def _bars(
    title: str, workers: Sequence[WorkerReport], value: Callable[[WorkerReport], float | None], top: float
) -> Chart:
    traces = []
    for role, fill in (("decode", _LOAD), ("prefill", _PREFILL)):
        some = [one for one in workers if one.role == role]
        if some:
            traces.append(
                go.Bar(
                    x=[worker_name(one) for one in some],
                    y=[value(one) for one in some],
                    name=role,
                    marker={"color": fill},
                    hovertemplate="worker %{x}: %{y:,.4~g}<extra></extra>",
                )
            )
    y = axis(range=[0, (top or 1) * 1.05], nticks=5)
    return Chart(title, drawn(traces, axis("worker", type="category", nticks=10), y, height=210, hovermode="closest"))
