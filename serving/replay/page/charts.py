"""The charts of a page, as plotly figures. The door of plotly.

Every series is a trace with a name, so that a click in the legend hides it. No chart has a date or a random id in it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite, log10
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import plotly.io  # type: ignore[import-untyped]
import plotly.offline  # type: ignore[import-untyped]
from attrs import frozen

from ..report import DISTRIBUTIONS, Distribution, Report, Series, number
from ..samples import Status
from .html import escaped, visible

_COLOURS = ("#3182ce", "#dd6b20", "#38a169", "#b35fd0", "#b7891a", "#0fa3b1", "#e0559a", "#718096")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_GRID = "rgba(128,128,128,.25)"
_HEIGHT = 300
_LEGEND_ROW, _LEGEND_ROWS = 19, 8
"""Height of a row of the legend in pixels; a legend of more rows scrolls."""
_LEGEND_WIDTH = 430
"""In a page of 500 pixels."""
_UNIFIED = 6
"""Most series that share one hover box."""
_MOST_POINTS = 1000
"""Of a series; beyond, a point is the greatest value of several intervals."""
_CURVE_POINTS = 400
"""Of a percentile curve that is made of every request."""
_LOGARITHMIC_FROM = 50.0
"""An axis is logarithmic if the greatest value is at least this multiple of the least."""
_TIMES = (("h", 3.6e6, 7.2e6), ("min", 6e4, 3e5), ("s", 1e3, 2e3), ("ms", 1.0, 0.0))
"""Units of time, their milliseconds, and the shortest replay in milliseconds that uses them."""


@frozen
class Chart:
    """A plotly figure with its title."""

    title: str
    figure: go.Figure
    note: str = ""
    """Shown under the title."""
    description: str = ""
    """For readers that cannot see the chart; default: the range of each series."""

    def html(self) -> str:
        """Return the figure with its data, which the script of the page draws."""
        height, note = self.figure["layout"]["height"], self.note
        noted = f'<span class="note">{escaped(note)}</span>' if note else ""
        label = escaped(f"{self.title}. {self.description or _ranges(self.figure)}")
        data = plotly.io.to_json(self.figure, engine="json")
        return (
            f"<figure>\n<figcaption><strong>{escaped(self.title)}</strong>{noted}</figcaption>\n"
            f'<div class="chart" role="img" aria-label="{label}" style="min-height:{height}px">'
            f'<script type="application/json">{data}</script></div>\n</figure>\n'
        )


def grid(charts: Sequence[Chart], kind: str = "two") -> str:
    """Return charts side by side, as many as there is room for."""
    return f'<div class="{kind}">\n{"".join(chart.html() for chart in charts)}</div>\n' if charts else ""


def library() -> str:
    """Return the script that draws figures."""
    text: str = plotly.offline.get_plotlyjs()
    return text


def plain(text: str) -> str:
    """Return text as plotly shows it: it reads a little HTML in names and labels."""
    return html.escape(visible(text), quote=False)


def axis(label: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis. Numbers are written out, with thousands separators."""
    shown = {"gridcolor": _GRID, "linecolor": _GRID, "zeroline": False, "automargin": True}
    title = {"text": plain(label), "standoff": 8, "font": {"size": 12}}
    return {**shown, "title": title, "tickformat": ",~f", **more}


def value_axis(values: Iterable[float | None], label: str) -> dict[str, Any]:
    """Return an axis from 0, or a logarithmic one where the values lie far apart."""
    known = [value for value in values if value is not None and isfinite(value)]
    positive = [value for value in known if value > 0]
    if positive and max(positive) >= _LOGARITHMIC_FROM * min(positive):
        decades = log10(max(positive) / min(positive))
        return axis(f"{label}, logarithmic".removeprefix(", "), type="log", dtick=1 if decades > 2 else "D2")
    return axis(label, rangemode="tozero")


def count_axis(values: Iterable[float], label: str) -> dict[str, Any] | None:
    """Return a logarithmic axis of counts, with room at both ends; each is written, as far as they stand apart."""
    known = sorted(set(values))
    if not known or known[0] <= 0:
        return None
    low, high = log10(known[0] / 1.2), log10(known[-1] * 1.2)
    shown = known[:1]
    for value in known[1:]:
        if (log10(value) - log10(shown[-1])) / (high - low) > 0.09:
            shown.append(value)
    texts = [number(int(value)) for value in shown]
    return axis(f"{label}, logarithmic", type="log", range=[low, high], tickvals=shown, ticktext=texts)


def drawn(traces: Sequence[Any], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any) -> go.Figure:
    """Return a figure of traces. Its legend stands below, and grows with the series up to some rows."""
    names = [html.unescape(trace.name or "") for trace in traces if trace.showlegend is not False]
    a_row = max(1, _LEGEND_WIDTH // (6 * max(map(len, names), default=0) + 50))
    rows = min(ceil(len(names) / a_row), _LEGEND_ROWS) if len(names) > 1 else 0
    common = {
        "template": "none",
        "height": _HEIGHT + rows * _LEGEND_ROW,
        "margin": {"l": 10, "r": 14, "t": 26, "b": 10},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12},
        "showlegend": len(names) > 1,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "maxheight": _LEGEND_ROW * _LEGEND_ROWS,
            "font": {"size": 11},
        },
        "hovermode": "x unified" if len(names) <= _UNIFIED else "closest",
        "hoverlabel": {"namelength": -1, "align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#718096", "activecolor": colour(0)},
    }
    return go.Figure(traces, {**common, "xaxis": dict(x), "yaxis": dict(y), **layout})


def line(at: int, name: str, points: Iterable[tuple[Any, float | None]], hover: str, **more: Any) -> Any:
    """Return one of several lines: each has its own colour and dashes."""
    style = {"color": colour(at), "dash": _DASHES[at // len(_COLOURS) % len(_DASHES)], "width": 1.7}
    texts = {"name": plain(name), "hovertemplate": hover}
    places = list(points)
    return go.Scatter(
        x=[x for x, _ in places], y=[y for _, y in places], **{"mode": "lines", "line": style, **texts, **more}
    )


def colour(at: int) -> str:
    return _COLOURS[at % len(_COLOURS)]


def _ranges(figure: go.Figure) -> str:
    parts = []
    for trace in figure.data:
        horizontal = trace.type == "bar" and trace.orientation == "h"
        found = (
            [one for row in trace.z for one in row] if trace.type == "heatmap" else trace.x if horizontal else trace.y
        )
        known = [one for one in found or () if one is not None]
        text = f"{number(min(known))} to {number(max(known))}" if known else "nothing"
        parts.append(f"{html.unescape(trace.name)}: {text}" if trace.name else text)
    return "; ".join(parts)


def latency_charts(reports: Mapping[str, Report]) -> list[Chart]:
    """Return a chart for each kind of latency that took any time, with a line for each report."""
    charts = []
    for one in DISTRIBUTIONS:
        figures: dict[str, Distribution] = {run: getattr(report, one.name) for run, report in reports.items()}
        if one.unit == "ms" and any(found.samples and found.max > 0 for found in figures.values()):
            curves = {run: _curve(report, one.name) for run, report in reports.items()}
            charts.append(_percentile_chart(one.label, curves))
    return charts


def _curve(report: Report, name: str) -> tuple[str, list[tuple[float, float]]]:
    """Return what the curve is made of, and its values by percent."""
    found: Distribution = getattr(report, name)
    each = [
        value
        for one in report.per_request or ()
        if one.status is Status.COMPLETED and (value := getattr(one, f"{name}_ms", None)) is not None
    ]
    if found.samples > 101 and len(each) == found.samples:
        return "every request", _thinned(sorted(each))
    if len(found.percentiles) == 101:
        return "the samples at 101 percentiles", [(float(at), value) for at, value in enumerate(found.percentiles)]
    named = (found.min, found.median, found.p75, found.p90, found.p95, found.p99, found.max)
    return "7 percentiles", list(zip((0.0, 50.0, 75.0, 90.0, 95.0, 99.0, 100.0), named, strict=True)) * bool(
        found.samples
    )


def _thinned(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Return values by percent: all of the tail, and the rest as dense as a chart shows."""
    last = len(ordered) - 1
    end = log10(last)
    places = (round(last * (1 - 10 ** (-end * at / (_CURVE_POINTS - 1)))) for at in range(_CURVE_POINTS))
    return [(100 * at / last, ordered[at]) for at in sorted({*places, last})]


def _percentile_place(percent: float, end: float) -> float:
    """Return the place of a percentile: p90, p99 and p99.9 are equally far apart, which shows the tail."""
    return end if percent >= 100 else -log10(1 - percent / 100)


def _percentile_chart(title: str, curves: Mapping[str, tuple[str, list[tuple[float, float]]]]) -> Chart:
    percents = [percent for _, curve in curves.values() for percent, _ in curve if percent < 100]
    end = max(_percentile_place(percent, 0) for percent in percents or [99.0]) + 0.5
    ticks = [at for at in (0, 50, 75, 90, 95, 99, 99.9, 99.99) if _percentile_place(at, 0) < end - 0.3] + [100]
    names: dict[float, str] = {0: "min", 100: "max"}
    x = axis(
        "percentile",
        tickvals=[_percentile_place(at, end) for at in ticks],
        ticktext=[names.get(at, f"p{at:g}") for at in ticks],
        range=[0, end],
        unifiedhovertitle={"text": " "},
    )
    y = value_axis((value for _, curve in curves.values() for _, value in curve), "ms")
    traces = [
        line(
            at,
            run,
            [(_percentile_place(percent, end), value) for percent, value in curve],
            "%{customdata}: %{y:,.4~g} ms",
            customdata=[names.get(percent, f"p{percent:.4g}") for percent, _ in curve],
        )
        for at, (run, (_, curve)) in enumerate(curves.items())
    ]
    sources = dict.fromkeys(source for source, curve in curves.values() if curve)
    return Chart(title, drawn(traces, x, y), f"drawn from {' and '.join(sources)}")


_OVER_TIME = (
    ("Requests", "requests/s", {"arrivals": "arrivals", "completions": "completions"}),
    ("In flight", "requests", {"running": "running"}),
    ("Time to first token, by arrival", "ms", {"mean": "mean_ttft_ms", "p99": "p99_ttft_ms"}),
    ("Output", "tokens/s", {"output": "output_tok_s"}),
)
"""Title and unit of each chart, and its lines by the fields of the series."""
_COUNTS = ("arrivals", "completions")
"""Fields that are shown a second."""


def time_charts(reports: Mapping[str, Report]) -> list[Chart]:
    """Return what happened over time. A line is a figure of the one report, or a report of several."""
    known = {run: report.series for run, report in reports.items() if report.series and report.series.arrivals}
    lasted = {run: interval_seconds(reports[run]) for run in known}
    end_ms = max((1000 * sum(seconds) for seconds in lasted.values()), default=0.0)
    x, unit_ms = time_axis(end_ms)
    of = max((ceil(len(series.arrivals) / _MOST_POINTS) for series in known.values()), default=1)
    note = f"a point is the greatest of {of} intervals" if of > 1 else ""
    charts = []
    for title, unit, parts in _OVER_TIME if known else ():
        lines = {
            (run, name): _points(series, field, lasted[run], unit_ms)
            for name, field in parts.items()
            for run, series in known.items()
        }
        for only in (None,) if len(reports) == 1 else parts:
            shown = {(name if only is None else run): one for (run, name), one in lines.items() if only in (None, name)}
            full = title if only is None or len(parts) == 1 else f"{title}: {only}"
            traces = [line(at, name, one, "%{y:,.4~g} " + unit) for at, (name, one) in enumerate(shown.items())]
            charts.append(Chart(full, drawn(traces, x, axis(unit, rangemode="tozero")), note))
    return charts


def interval_seconds(report: Report) -> list[float]:
    """Return how long each interval of the series was: the last one ends with the replay."""
    assert report.series is not None
    width, intervals = report.series.interval_ms, len(report.series.arrivals)
    last = report.duration_ms - (intervals - 1) * width
    return [width / 1000] * (intervals - 1) + [(last if 0 < last < width else width) / 1000]


def time_axis(end_ms: float) -> tuple[dict[str, Any], float]:
    """Return an axis of the time of a replay, and the milliseconds of its unit."""
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms, from_ms in _TIMES if end_ms >= from_ms)
    hover = {"text": "%{x:,.4~g} " + unit}
    return axis(f"time of the replay, {unit}", range=[0, end_ms / unit_ms or 1.0], unifiedhovertitle=hover), unit_ms


def _points(series: Series, field: str, lasted: Sequence[float], unit_ms: float) -> list[tuple[float, float | None]]:
    """Return values at the middle of their intervals; of very many, the greatest of some stands for them.

    A last interval of less than half the length is left out: a rate over a moment towers over all others.
    """
    width, found = series.interval_ms, list(getattr(series, field))
    if field in _COUNTS:
        found = [count / seconds for count, seconds in zip(found, lasted, strict=True)]
    if len(lasted) > 2 and lasted[-1] < lasted[0] / 2:
        found.pop()
    of = max(1, ceil(len(series.arrivals) / _MOST_POINTS))
    points = []
    for first in range(0, len(found), of):
        length = sum(lasted[first : first + of]) * 1000
        greatest = max((value for value in found[first : first + of] if value is not None), default=None)
        points.append(((first * width + length / 2) / unit_ms, greatest))
    return points
