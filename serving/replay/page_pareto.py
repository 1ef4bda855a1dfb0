"""Runs as points on a chart: which of them no other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from pipeline import InvalidArgument

from . import page_axes
from .page_figures import HIGHER, WORKER_COUNT, figure_named, value_of
from .page_svg import Frame, dot, figure, legend
from .page_text import escaped, folded, number, setting, table, value_cell
from .report import Report
from .unbeaten import unbeaten


@frozen
class SweepPoint:
    """One run of a sweep: two figures of it, the group it has its colour by, and what it was run with.

    `completed` are the requests it completed: with fewer of them a run does not beat another one.
    """

    label: str
    x: float
    y: float
    group: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)
    completed: int = 0


def sweep_points(
    runs: Mapping[str, Report],
    x: str,
    y: str,
    group: str,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[SweepPoint]:
    """A point for each run that has both figures, by their names in JSON or `worker_count`; `group` names a setting.

    A server that does not tell its workers has no count of them, and no point there. Without `parameters` of each run
    these are its settings, as far as runs differ in them. Raises InvalidArgument for a figure none of the runs has.
    """
    plains = {label: report.to_plain() | {WORKER_COUNT: len(report.workers) or None} for label, report in runs.items()}
    for name in (x, y):
        if runs and not any(name in plain for plain in plains.values()):
            raise InvalidArgument(f"no run has a figure {name!r}", field=name)
    given = _differing_settings(runs) if parameters is None else parameters
    points = []
    for label, report in runs.items():
        across, up = (value_of(report, figure_named(name), plains[label]) for name in (x, y))
        if across is not None and up is not None:
            named = setting(report.settings[group]) if group in report.settings else ""
            points.append(SweepPoint(label, across, up, named, given[label], report.completed_requests))
    return points


def _differing_settings(runs: Mapping[str, Report]) -> dict[str, dict[str, Any]]:
    names = _differing(runs)
    return {
        label: {name: report.settings[name] for name in names if name in report.settings}
        for label, report in runs.items()
    }


def _differing(runs: Mapping[str, Report]) -> list[str]:
    names = dict.fromkeys(name for report in runs.values() for name in report.settings)
    return [
        name
        for name in names
        if len({setting(report.settings[name]) if name in report.settings else None for report in runs.values()}) > 1
    ]


def pareto_front(points: Sequence[SweepPoint], x_better: int, y_better: int) -> list[int]:
    """The points no other beats: none is as good in both figures and better in one. By x, best first.

    Points that are equal in both are all in it.
    """
    ordered = sorted(range(len(points)), key=lambda at: (-x_better * points[at].x, -y_better * points[at].y, at))
    front: list[int] = []
    for at in ordered:
        last = points[front[-1]] if front else None
        point = points[at]
        if last is None or y_better * point.y > y_better * last.y or (point.x, point.y) == (last.x, last.y):
            front.append(at)
    return front


def _unbeaten(points: Sequence[SweepPoint], x_better: int, y_better: int) -> list[int]:
    """Those none beats that completed as many requests, by x, best first: the front where all completed the same."""
    costs = [(-x_better * point.x, -y_better * point.y, float(-point.completed)) for point in points]
    found = [at for at, is_unbeaten in enumerate(unbeaten(costs)) if is_unbeaten]
    return sorted(found, key=lambda at: (costs[at], at))


def pareto_figure(points: Sequence[SweepPoint], x: str, y: str, *, load: str = "", is_folded: bool = False) -> str:
    """The points, those that no other beats numbered, and joined where they completed the same.

    The numbers stand in the table below, which may be folded. `load` is what the points have in common.
    """
    across, up = figure_named(x), figure_named(y)
    title = f"{up.label} over {across.label}" + (f", {load}" if load else "")
    if not points:
        return figure(title, Frame.of(page_axes.from_zero(()), page_axes.from_zero(())).svg(title, "No runs"))
    better = across.better or HIGHER, up.better or HIGHER
    front = _unbeaten(points, *better)
    xs = [point.x for point in points]
    frame = Frame.of(
        page_axes.counts(xs, across.label) if x == WORKER_COUNT else page_axes.around(xs, across.label, 8),
        page_axes.around((point.y for point in points), up.label),
        1280.0,
        430.0,
    )
    groups = list(dict.fromkeys(point.group for point in points))
    steps = _steps(frame, [points[at] for at in pareto_front(points, *better)])
    dots = [_point(frame, points[at], groups.index(points[at].group), at in front) for at in _front_last(points, front)]
    said = f"{len(points):,} runs; none is beaten by another: " + ", ".join(points[at].label for at in front)
    key = legend(groups, of_dots=True) if len(groups) > 1 else ""
    note = f"numbered: no other run is as good in both and better in one; better is {_way(better)}"
    svg = frame.svg(title, said, steps, *dots, *_pins(frame, points, front), grid_x=True)
    rows = _points_table(points, front, across.label, up.label)
    return figure(title, svg, key=key, note=note) + (folded("the runs of this chart", rows) if is_folded else rows)


def _way(better: tuple[int, int]) -> str:
    return f"{'up' if better[1] == HIGHER else 'down'} and to the {'right' if better[0] == HIGHER else 'left'}"


def _front_last(points: Sequence[SweepPoint], front: Sequence[int]) -> list[int]:
    """So that nothing covers them."""
    return [*(at for at in range(len(points)) if at not in front), *front]


def _steps(frame: Frame, front: Sequence[SweepPoint]) -> str:
    """A stair: what lies behind it is beaten."""
    if len(front) < 2:
        return ""
    path = f"M{frame.place_x(front[0].x):.1f} {frame.place_y(front[0].y):.1f}"
    path += "".join(f"H{frame.place_x(point.x):.1f}V{frame.place_y(point.y):.1f}" for point in front[1:])
    return f'<path class="front-line" d="{path}"/>\n'


def _point(frame: Frame, point: SweepPoint, group: int, is_front: bool) -> str:
    return dot(frame, point.x, point.y, group, f"{point.label}: {number(point.x)}, {number(point.y)}", is_front)


def _pins(frame: Frame, points: Sequence[SweepPoint], front: Sequence[int]) -> list[str]:
    """Numbers at the points of the front; one that would stand on the last is joined to it."""
    pins: list[tuple[float, float, list[int]]] = []
    for rank, at in enumerate(front, 1):
        x, y = frame.place_x(points[at].x), frame.place_y(points[at].y)
        if pins and abs(pins[-1][0] - x) < 16 and abs(pins[-1][1] - y) < 14:
            pins[-1][2].append(rank)
        else:
            pins.append((x, y, [rank]))
    return [
        f'<text class="pin" x="{x:.1f}" y="{max(y - 11, 11):.1f}" text-anchor="middle">{_ranks(ranks)}</text>\n'
        for x, y, ranks in pins
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _points_table(points: Sequence[SweepPoint], front: Sequence[int], x: str, y: str) -> str:
    names = list(dict.fromkeys(name for point in points for name in point.parameters))
    ordered = [*front, *sorted((at for at in range(len(points)) if at not in front), key=lambda at: (points[at].x, at))]
    rows = []
    for place, at in enumerate(ordered, 1):
        point = points[at]
        cells = [str(place) if place <= len(front) else "", number(point.x), number(point.y)]
        cells += [value_cell(setting(point.parameters[name])) if name in point.parameters else "" for name in names]
        rows.append((escaped(point.label), cells))
    return table(["run", "front", escaped(x), escaped(y), *map(escaped, names)], rows)
