"""How the cost of a request grows with the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from . import page_axes
from .page_lines import Line
from .page_svg import Frame, dot, figure, legend, style
from .page_text import escaped, number, setting, table
from .report import Report


def scaling_figure(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    """Cost over worker counts, both logarithmic: equal slopes are equal powers. A line each, of workers and cost."""
    title = f"{label} by workers"
    drawn = [
        Line(name, [(float(workers), cost) for workers, cost in sorted(points)])
        for name, points in lines.items()
        if points
    ]
    values = [value for line in drawn for _, value in line.points if value is not None]
    counts = sorted({workers for points in lines.values() for workers, _ in points})
    frame = Frame.of(_worker_axis(counts), page_axes.logarithmic(values, label), 1280.0, 400.0)
    marks = []
    for at, line in enumerate(drawn):
        marks.append(f'<path class="line {style(at)}" d="{frame.path(line.points)}"/>\n')
        marks += [
            dot(frame, workers, cost, at, f"{line.label}, {workers:,.0f} workers: {number(cost)}")
            for workers, cost in line.points
            if cost is not None and frame.x.shows(workers) and frame.y.shows(cost)
        ]
    said = "; ".join(
        f"{line.label}: " + ", ".join(f"{number(cost)} at {workers:,.0f}" for workers, cost in line.points)
        for line in drawn
    )
    key = legend([line.label for line in drawn]) if len(drawn) > 1 else ""
    return figure(title, frame.svg(title, said, *marks, grid_x=True), key=key) + _costs_table(drawn, counts)


def _worker_axis(counts: Sequence[int]) -> page_axes.Axis:
    """The counts there are, as far as they can be told apart."""
    axis = page_axes.logarithmic(counts, "workers")
    low, high = min(counts, default=1), max(counts, default=1)
    if low <= 0 or low == high:
        return axis
    whole = page_axes.Axis(low, high, (), axis.label, True)
    ticks = [(float(low), number(low))]
    for count in counts[1:]:
        if whole.part(count) - whole.part(ticks[-1][0]) > 0.05:
            ticks.append((float(count), number(count)))
    return page_axes.Axis(low, high, tuple(ticks), axis.label, True)


def _costs_table(lines: Sequence[Line], counts: Sequence[int]) -> str:
    rows = []
    for line in lines:
        by_count = dict(line.points)
        rows.append((escaped(line.label), [number(by_count.get(float(count))) for count in counts]))
    return table(["workers", *map(number, counts)], rows)


def scaling_of(runs: Mapping[str, Report], group: str) -> dict[str, list[tuple[int, float]]]:
    """What a request took the machine, in ms, by workers; a line for each group. Of runs that were timed.

    Runs of a group with as many workers count by their mean; a group that never had more workers has no line.
    """
    costs: dict[str, dict[int, list[float]]] = {}
    for report in runs.values():
        if report.wall_time_ms is not None and report.num_requests:
            name = setting(report.settings[group]) if group in report.settings else "all runs"
            by_count = costs.setdefault(name, {})
            by_count.setdefault(len(report.workers), []).append(report.wall_time_ms / report.num_requests)
    return {
        name: [(workers, fsum(found) / len(found)) for workers, found in sorted(by_count.items())]
        for name, by_count in costs.items()
        if len(by_count) > 1
    }
