"""Maps of workers over time: a row for each worker, a column for each interval, a shade for each value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TypeAlias

from . import page_axes
from .page_axes import Axis
from .page_svg import Frame, figure, tip
from .page_text import number
from .page_time import lasted_s
from .page_workers import worker_name
from .report import Report

_MOST_ROWS = 64
_MOST_COLUMNS = 120
_LEVELS = 12
"""So many shades a map has."""
_NAMED_ROWS = 16

Rows: TypeAlias = list[tuple[str, list[float | None]]]
"""Workers by name, each with a value for each interval."""


def worker_maps(reports: Mapping[str, Report]) -> str:
    """Load and hit rate of every worker over time: two maps for each report, in the same shades."""
    series = {run: report for run, report in reports.items() if report.series is not None and report.series.workers}
    loads = {run: _loads(report) for run, report in series.items()}
    rates = {run: _hit_rates(report) for run, report in series.items()}
    most = page_axes.from_zero((cell for rows in loads.values() for _, cells in rows for cell in cells)).high
    end_ms = max((sum(lasted_s(report)) * 1000 for report in series.values()), default=0.0)
    parts = []
    for run, report in series.items():
        of = f", {run}" if len(reports) > 1 else ""
        parts.append(_map(f"Load: requests running{of}", "load", loads[run], most, report, end_ms))
        parts.append(_map(f"Hit rate{of}", "rate", rates[run], 1.0, report, end_ms))
    return f'<div class="two">\n{"".join(parts)}</div>\n' if parts else ""


def _loads(report: Report) -> Rows:
    assert report.series is not None
    lasted = lasted_s(report)
    rows: Rows = [(worker_name(one.worker, one.role), list(one.load)) for one in report.series.workers]
    return _gathered([(name, _shortened(cells, lasted)) for name, cells in rows])


def _hit_rates(report: Report) -> Rows:
    assert report.series is not None
    same = [1.0] * len(report.series.arrivals)
    rows = [(worker_name(one.worker, one.role), one.hit_rate) for one in report.series.workers]
    return _gathered([(name, _shortened(cells, same)) for name, cells in rows])


def _shortened(cells: Sequence[float | None], weights: Sequence[float]) -> list[float | None]:
    """At most so many columns, each the mean of its intervals."""
    of = max(1, ceil(len(cells) / _MOST_COLUMNS))
    return [_mean(cells[at : at + of], weights[at : at + of]) for at in range(0, len(cells), of)]


def _gathered(rows: Rows) -> Rows:
    """At most so many rows, each the mean of workers that stand together."""
    of = max(1, ceil(len(rows) / _MOST_ROWS))
    if of == 1:
        return rows
    gathered: Rows = []
    for at in range(0, len(rows), of):
        some = rows[at : at + of]
        same = [1.0] * len(some)
        cells = [_mean(column, same) for column in zip(*(cells for _, cells in some), strict=True)]
        gathered.append((f"{some[0][0]} to {some[-1][0]}", cells))
    return gathered


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _map(title: str, kind: str, rows: Rows, top: float, report: Report, end_ms: float) -> str:
    assert report.series is not None
    x, unit_ms = page_axes.time(end_ms)
    each = max(1, ceil(len(rows) / _NAMED_ROWS))
    names = tuple((len(rows) - at - 0.5, rows[at][0]) for at in range(0, len(rows), each))
    height = min(420.0, 70.0 + max(8.0, 180.0 / max(len(rows), 1), 5.0) * len(rows))
    frame = Frame.of(x, Axis(0.0, float(len(rows)), names, "worker"), 640.0, height)
    intervals = len(report.series.arrivals)
    wide = max(1, ceil(intervals / _MOST_COLUMNS)) * report.series.interval_ms
    edges = [min(at * wide, end_ms) / unit_ms for at in range(ceil(intervals * report.series.interval_ms / wide) + 1)]
    marks = [
        f'<path class="{kind}" fill-opacity="{_opacity(level):.2f}" d="{cells}"/>\n'
        for level, cells in sorted(_cells(frame, rows, edges, top).items())
    ]
    tips = [_row_tip(frame, len(rows) - at, name, cells) for at, (name, cells) in enumerate(rows)]
    known = [cell for _, cells in rows for cell in cells if cell is not None]
    said = f"{len(rows):,} rows, {number(min(known))} to {number(max(known))}" if known else "Nothing"
    notes = _notes(len(report.series.workers), len(rows), wide / report.series.interval_ms)
    return figure(title, frame.svg(title, said, *marks, *tips, grid_y=False), key=_shades(kind, top), note=notes)


def _cells(frame: Frame, rows: Rows, edges: Sequence[float], top: float) -> dict[int, str]:
    """The rectangles of each shade; equal ones side by side are one."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for at, (_, cells) in enumerate(rows):
        above, below = frame.place_y(len(rows) - at), frame.place_y(len(rows) - at - 1)
        levels = [_level(cell, top) for cell in cells]
        first = 0
        for column in range(1, len(levels) + 1):
            if column < len(levels) and levels[column] == levels[first]:
                continue
            level, left, right = levels[first], frame.place_x(edges[first]), frame.place_x(edges[column])
            if level is not None:
                found[level].append(f"M{left:.1f} {above:.1f}H{right:.1f}V{below:.1f}H{left:.1f}z")
            first = column
    return {level: "".join(parts) for level, parts in found.items()}


def _level(value: float | None, top: float) -> int | None:
    if value is None:
        return None
    return min(_LEVELS, max(0, ceil(value / top * _LEVELS - 1e-9)))


def _opacity(level: int) -> float:
    """The least shade can still be told from nothing."""
    return 0.06 + 0.94 * level / _LEVELS


def _row_tip(frame: Frame, top: int, name: str, cells: Sequence[float | None]) -> str:
    known = [cell for cell in cells if cell is not None]
    said = f"mean {number(sum(known) / len(known))}, greatest {number(max(known))}" if known else "nothing"
    left, right = frame.left, frame.left + frame.inner_width
    path = f"M{left:.1f} {frame.place_y(top):.1f}H{right:.1f}V{frame.place_y(top - 1):.1f}H{left:.1f}z"
    return f'<path class="band" d="{path}">{tip(f"worker {name}: {said}")}</path>\n'


def _shades(kind: str, top: float) -> str:
    cells = "".join(
        f'<path class="{kind}" fill-opacity="{_opacity(level):.2f}" d="M{level * 9} 0h9v10h-9z"/>'
        for level in range(_LEVELS + 1)
    )
    wide = (_LEVELS + 1) * 9
    svg = f'<svg viewBox="0 0 {wide} 10" width="{wide}" height="10" aria-hidden="true">{cells}</svg>'
    return f'<span class="shades">0 {svg} {number(top)}</span>'


def _notes(workers: int, rows: int, intervals: float) -> str:
    notes = []
    if rows < workers:
        notes.append(f"a row is the mean of {ceil(workers / rows)} workers")
    if intervals > 1:
        notes.append(f"a cell is the mean of {number(int(intervals))} intervals")
    return ", ".join(notes)
