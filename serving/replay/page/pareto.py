"""Runs as points of two figures, and which of them no other beats. A door of plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
from attrs import field, frozen

from pipeline import InvalidArgument

from ..report import HIGHER, WORKER_COUNT, Report, differing_settings, figure_named
from ..sweeping import unbeaten
from .charts import Chart, axis, colour, count_axis, drawn, plain
from .html import setting_text


@frozen
class Point:
    """One run in a chart of two figures."""

    label: str
    x: float
    y: float
    group: str = ""
    """What gives it its colour."""
    parameters: Mapping[str, Any] = field(factory=dict)
    completed: int = 0
    """Requests it completed: a run with fewer of them does not beat another."""


def points_of(
    runs: Mapping[str, Report],
    x: str,
    y: str,
    group: str,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Point]:
    """Return a point for each run that has both figures, by their names in JSON or `worker_count`.

    `group` names a setting. A report without workers, of a server that does not list them, has no count of them.
    `parameters` of each run default to its settings, as far as runs differ in them. Raises InvalidArgument for a figure
    that no run has.
    """
    for name in (x, y):
        if runs and name != WORKER_COUNT and not any(name in one.figures for one in runs.values()):
            raise InvalidArgument(f"no run has a figure {name!r}", field=name)
    differing, points = differing_settings(runs.values()), []
    for label, report in runs.items():
        settings, across, up = report.settings, _value(report, x), _value(report, y)
        given = {name: settings[name] for name in differing if name in settings}
        if across is not None and up is not None:
            named = setting_text(settings[group]) if group in settings else ""
            points.append(
                Point(label, across, up, named, (parameters or {}).get(label, given), report.completed_requests)
            )
    return points


def _value(report: Report, name: str) -> float | None:
    return len(report.workers) or None if name == WORKER_COUNT else figure_named(name).value(report)


def front_of(points: Sequence[Point], x: str, y: str) -> list[int]:
    """Return the points that no other beats, by x, best first: none is as good in both figures and better in one."""
    costs = [(*_cost(point, x, y), float(-point.completed)) for point in points]
    return sorted((at for at, is_unbeaten in enumerate(unbeaten(costs)) if is_unbeaten), key=lambda at: (costs[at], at))


def _cost(point: Point, x: str, y: str) -> tuple[float, float]:
    """Less is better."""
    across, up = ((figure_named(name).better or HIGHER) == HIGHER for name in (x, y))
    return -point.x if across else point.x, -point.y if up else point.y


def pareto_chart(points: Sequence[Point], x: str, y: str, *, load: str = "") -> Chart:
    """Return the points of two figures, a series for each group. Those that no other beats are numbered.

    A stair joins the points that no other beats in the two figures. `load` names the common load for the title.
    """
    across, up = figure_named(x), figure_named(y)
    front = front_of(points, x, y)
    x_axis = count_axis([point.x for point in points], across.title) if x == WORKER_COUNT else None
    x_axis = x_axis or _around([point.x for point in points], across.title)
    y_axis = _around([point.y for point in points], up.title)
    texts = _labels(points, front, x_axis, y_axis)
    hover = f"%{{customdata}}<br>{plain(across.title)}: %{{x:,.5~g}}<br>{plain(up.title)}: %{{y:,.5~g}}<extra></extra>"
    groups = list(dict.fromkeys(point.group for point in points))
    traces = [_stair(points, x, y)]
    for chosen in (False, True):  # the front last, so that nothing covers it
        for at, group in enumerate(groups):
            some = [one for one in range(len(points)) if points[one].group == group and (one in front) is chosen]
            if some:
                traces.append(_dots(points, some, texts, hover, at, is_front=chosen))
    named: set[str] = set()
    for trace in traces[1:]:
        trace.showlegend = trace.name not in named
        named.add(trace.name)
    ways = (
        "up" if (up.better or HIGHER) == HIGHER else "down",
        "right" if (across.better or HIGHER) == HIGHER else "left",
    )
    return Chart(
        f"{up.title} over {across.title}" + (f", {load}" if load else ""),
        drawn(traces, x_axis, y_axis, height=430, hovermode="closest"),
        "numbered, as far as there is room: no other run is as good in both and better in one; "
        f"better is {ways[0]} and to the {ways[1]}",
        f"{len(points):,} runs; none is beaten by another: {', '.join(points[at].label for at in front)}",
    )


def _dots(
    points: Sequence[Point],
    some: Sequence[int],
    texts: Mapping[int, tuple[str, str]],
    hover: str,
    at: int,
    *,
    is_front: bool,
) -> Any:
    marker = {"color": colour(at), "size": 12 if is_front else 8, "opacity": 1.0 if is_front else 0.55}
    outline = {"line": {"width": 1.5, "color": "#1b1f24"}} if is_front else {}
    group = plain(points[some[0]].group)
    return go.Scatter(
        x=[points[one].x for one in some],
        y=[points[one].y for one in some],
        mode="markers+text" if is_front else "markers",
        name=group,
        legendgroup=group,
        text=[texts[one][0] if one in texts else "" for one in some] if is_front else None,
        textposition=[texts[one][1] if one in texts else "top center" for one in some] if is_front else None,
        customdata=[plain(points[one].label) for one in some],
        hovertemplate=hover,
        marker={**marker, **outline},
    )


def _stair(points: Sequence[Point], x: str, y: str) -> Any:
    """Return the line between beaten and unbeaten places."""
    costs = [_cost(point, x, y) for point in points]
    front = sorted(
        (cost, at) for at, (cost, is_joined) in enumerate(zip(costs, unbeaten(costs), strict=True)) if is_joined
    )
    some = [points[at] for _, at in front]
    return go.Scatter(
        x=[one.x for one in some],
        y=[one.y for one in some],
        mode="lines",
        line={"shape": "hv", "dash": "dot", "color": "#718096", "width": 1},
        showlegend=False,
        hoverinfo="skip",
    )


_PLOT_WIDTH, _PLOT_HEIGHT = 380.0, 330.0
"""The plot of a page of 500 pixels: labels that stand apart there do so in any wider one."""
_PLACES = (
    ("top center", -0.5, 1.0),
    ("bottom center", -0.5, -1.0),
    ("middle right", 0.0, 0.0),
    ("middle left", -1.0, 0.0),
    ("top right", 0.0, 1.0),
    ("top left", -1.0, 1.0),
    ("bottom right", 0.0, -1.0),
    ("bottom left", -1.0, -1.0),
)
"""Where a label may stand at its point, best first: its left end in widths, its middle in heights."""


def _labels(
    points: Sequence[Point], front: Sequence[int], x_axis: Mapping[str, Any], y_axis: Mapping[str, Any]
) -> dict[int, tuple[str, str]]:
    """Return the number of each point of the front with its place, where it covers no point and no other number.

    Points in one place share a text.
    """
    places = [(_part(x_axis, one.x) * _PLOT_WIDTH, _part(y_axis, one.y) * _PLOT_HEIGHT) for one in points]
    ranks: dict[tuple[float, float], list[int]] = {}
    for rank, at in enumerate(front, 1):
        ranks.setdefault(places[at], []).append(rank)
    taken = [_box(x, y, 12, 12, -0.5, 0.0) for x, y in dict.fromkeys(places)]
    found: dict[int, tuple[str, str]] = {}
    for (x, y), some in ranks.items():
        text = f"{some[0]}" if len(some) == 1 else f"{some[0]} to {some[-1]}"
        own = _box(x, y, 12, 12, -0.5, 0.0)
        for place, left, middle in _PLACES:
            box = _box(x, y, 9.0 * len(text) + 12, 15.0, left, middle)
            is_inside = box[1] >= 0 and box[3] <= _PLOT_HEIGHT + 8
            if is_inside and not any(_overlap(box, one) for one in taken if one != own):
                taken.append(box)
                found[front[some[0] - 1]] = text, place
                break
    return found


def _box(x: float, y: float, wide: float, high: float, left: float, middle: float) -> tuple[float, ...]:
    """Return the left, lower, right and upper end of a box, `left` widths and `middle` heights from a point."""
    return x + left * wide, y + (middle - 0.5) * high, x + (left + 1) * wide, y + (middle + 0.5) * high


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _part(axis: Mapping[str, Any], value: float) -> float:
    """Return how far along an axis with a range a value stands, 0 to 1."""
    low, high = map(float, axis["range"])
    return ((log10(value) if axis.get("type") == "log" else value) - low) / (high - low)


def _around(values: Sequence[float], label: str) -> dict[str, Any]:
    """Return an axis with room on both sides of the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return axis(label, range=[max(low - room, 0) if low >= 0 else low - room, high + room], nticks=7)
