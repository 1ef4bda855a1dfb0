"""Charts of many runs: one figure of each, what a parameter does, cost by workers. A door of plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from ..report import Figure, Report, best, figure_named, number
from ..sweeping import SweepRun, label_of, text_of
from .charts import Chart, axis, colour, count_axis, drawn, line, plain, value_axis
from .html import setting_text


def comparison_chart(runs: Sequence[str], figures: Sequence[tuple[Figure, Sequence[float | None]]]) -> Chart:
    """Return bars, one for each run; a menu switches between the figures, the best is darker."""
    traces, buttons = [], []
    names = [plain(run) for run in runs]
    for at, (figure, values) in enumerate(figures):
        solid = [1.0 if is_best else 0.55 for is_best in best(values, figure.better)]
        traces.append(
            go.Bar(
                x=list(values),
                y=names,
                orientation="h",
                name=plain(figure.title),
                visible=at == 0,
                showlegend=False,
                marker={"color": colour(0), "opacity": solid},
                text=[number(value) for value in values],
                textposition="auto",
                hovertemplate="%{y}: %{x:,.5~g}<extra></extra>",
            )
        )
        shown = [one == at for one in range(len(figures))]
        buttons.append({"label": plain(figure.title), "method": "update", "args": [{"visible": shown}]})
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}}
    wrapped = [_wrapped(run) for run in runs]
    y = axis(
        type="category",
        autorange="reversed",
        showgrid=False,
        tickfont={"size": 10},
        ticktext=wrapped,
        tickvals=names,
    )
    height = 140 + sum(23 + 13 * text.count("<br>") for text in wrapped)
    figure = drawn(
        traces, axis(rangemode="tozero", nticks=6), y, height=height, hovermode="closest", updatemenus=[menu]
    )
    figure.update_layout(margin={"t": 70}, bargap=0.25)
    return Chart("One figure of every run", figure)


def _wrapped(text: str, width: int = 26, most: int = 3) -> str:
    """Return the name of a run in a few short lines; all of it is shown under the pointer."""
    lines = wrap(text, width, max_lines=most, placeholder=" …", break_on_hyphens=False)
    return "<br>".join(map(plain, lines))


_BY_PARAMETER = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "prefix_cache_reused_ratio")


def varied_of(runs: Sequence[SweepRun]) -> list[str]:
    """Return the parameters that have more than one value, in their order."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return [name for name in names if len(_values(name, runs)) > 1]


def parameter_charts(name: str, runs: Mapping[str, SweepRun], reports: Mapping[str, Report]) -> list[Chart]:
    """Return figures over the values of a parameter, a line for each combination of the others.

    Runs without the parameter are a level line. A figure that no run has is left out.
    """
    values = [text_of(value) for value in _values(name, list(runs.values()))]
    charts = []
    for figure in map(figure_named, _BY_PARAMETER):
        lines = _lines(name, values, figure, runs, reports)
        known = [y for points in lines.values() for _, y in points if y is not None]
        if known:
            traces = [
                line(at, label, points, "%{y:,.5~g}", mode="lines+markers")
                for at, (label, points) in enumerate(lines.items())
            ]
            x = axis(name, type="category", categoryorder="array", categoryarray=[plain(one) for one in values])
            charts.append(Chart(f"{figure.title} by {name}", drawn(traces, x, value_axis(known, ""))))
    return charts


def _values(name: str, runs: Sequence[SweepRun]) -> list[Any]:
    """Return the values of a parameter: numbers by size, anything else as it comes."""
    found = {text_of(run.parameters[name]): run.parameters[name] for run in runs if name in run.parameters}
    sizes = {text: size for text, value in found.items() if (size := _as_number(value)) is not None}
    return [found[text] for text in (sorted(sizes, key=sizes.__getitem__) if len(sizes) == len(found) else found)]


def _as_number(value: Any) -> float | None:
    """Arguments of an engine are texts."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _lines(
    name: str, values: Sequence[str], figure: Figure, runs: Mapping[str, SweepRun], reports: Mapping[str, Report]
) -> dict[str, list[tuple[str, float | None]]]:
    others = [one for one in varied_of(list(runs.values())) if one != name]
    lines: dict[str, list[tuple[str, float | None]]] = {}
    for run, report in reports.items():
        given = runs[run].parameters
        label = label_of({one: given[one] for one in others if one in given}) or "all runs"
        y = figure.value(report)
        at = [text_of(given[name])] if name in given else values
        lines.setdefault(label, []).extend((plain(x), y) for x in at)
    order = {plain(value): place for place, value in enumerate(values)}
    return {label: sorted(points, key=lambda point: order[point[0]]) for label, points in lines.items()}


def scaling_chart(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> Chart:
    """Return lines of workers and cost, both logarithmic: equal slopes are equal powers."""
    shown = {name: sorted(points) for name, points in lines.items() if points}
    counts = [float(workers) for points in shown.values() for workers, _ in points]
    traces = [
        line(at, name, points, "%{y:,.4~g}", mode="lines+markers") for at, (name, points) in enumerate(shown.items())
    ]
    x = count_axis(counts, "workers") or axis("workers")
    x["unifiedhovertitle"] = {"text": "%{x:,} workers"}
    y = axis(f"{label}, logarithmic", type="log", dtick="D2")
    return Chart(f"{label} by workers", drawn(traces, x, y, height=440))


def scaling_of(runs: Mapping[str, Report], group: str) -> dict[str, list[tuple[int, float]]]:
    """Return what a request took the machine, in ms, by workers; a line for each group. Of runs that were timed.

    Runs of a group with as many workers count by their mean; a group that never had more workers has no line.
    """
    costs: dict[str, dict[int, list[float]]] = {}
    for report in runs.values():
        if report.wall_time_ms is not None and report.num_requests:
            name = setting_text(report.settings[group]) if group in report.settings else "all runs"
            by_count = costs.setdefault(name, {})
            by_count.setdefault(len(report.workers), []).append(report.wall_time_ms / report.num_requests)
    return {
        name: [(workers, fsum(found) / len(found)) for workers, found in sorted(by_count.items())]
        for name, by_count in costs.items()
        if len(by_count) > 1
    }
