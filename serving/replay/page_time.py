"""Charts of what happened over the time of a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TypeAlias

from . import page_axes
from .page_lines import Line, Points, line_chart
from .page_text import number
from .report import Report
from .series import Series

_MOST_POINTS = 400
"""More cannot be seen; so many intervals at most are drawn each by itself."""
Values: TypeAlias = Callable[[Series, list[float]], Sequence[float | None]]
"""The values of a series, given how many seconds each interval lasted."""

_OVER_TIME: tuple[tuple[str, str, tuple[tuple[str, Values], ...]], ...] = (
    (
        "Requests",
        "requests/s",
        (
            ("arrivals", lambda series, lasted: _rates(series.arrivals, lasted)),
            ("completions", lambda series, lasted: _rates(series.completions, lasted)),
        ),
    ),
    ("In flight", "requests", (("running", lambda series, _: series.running),)),
    (
        "Time to first token, by arrival",
        "ms",
        (("mean", lambda series, _: series.mean_ttft_ms), ("p99", lambda series, _: series.p99_ttft_ms)),
    ),
    ("Output", "tokens/s", (("output", lambda series, _: series.output_tok_s),)),
)


def time_charts(reports: Mapping[str, Report]) -> list[str]:
    """What happened over time; figures share a chart where there is one report, reports do where there are more."""
    known = {run: report for run, report in reports.items() if report.series is not None and report.series.arrivals}
    end_ms = max((_end_ms(report) for report in known.values()), default=0.0)
    of = max((_intervals_a_point(report) for report in known.values()), default=1)
    note = f"a point is the greatest of {of} intervals" if of > 1 else ""
    charts = []
    for title, unit, parts in _OVER_TIME if known else ():
        if len(reports) == 1:
            (report,) = known.values()
            lines = {name: _points(report, values) for name, values in parts}
            charts.append(_time_chart(title, unit, lines, end_ms, note))
        else:
            for name, values in parts:
                lines = {run: _points(report, values) for run, report in known.items()}
                charts.append(_time_chart(f"{title}: {name}" if len(parts) > 1 else title, unit, lines, end_ms, note))
    return charts


def _time_chart(title: str, unit: str, lines: Mapping[str, Points], end_ms: float, note: str) -> str:
    x, unit_ms = page_axes.time(end_ms)
    y = page_axes.from_zero((value for points in lines.values() for _, value in points), unit)
    drawn = [Line(name, [(at / unit_ms, value) for at, value in points]) for name, points in lines.items()]
    by_time = {name: dict(points) for name, points in lines.items()}
    moments = sorted({at for points in lines.values() for at, _ in points})
    said = [
        (
            at / unit_ms,
            f"{number(at / 1000)} s: " + ", ".join(f"{name} {number(by_time[name].get(at))}" for name in lines),
        )
        for at in moments
    ]
    return line_chart(title, drawn, x, y, unit=unit, said=said, note=note)


def lasted_s(report: Report) -> list[float]:
    """How long each interval of its series was: the last one ends with the replay."""
    assert report.series is not None
    width, intervals = report.series.interval_ms, len(report.series.arrivals)
    last = report.duration_ms - (intervals - 1) * width
    return [width / 1000] * (intervals - 1) + [(last if 0 < last < width else width) / 1000]


def _end_ms(report: Report) -> float:
    return sum(lasted_s(report)) * 1000


def _points(report: Report, values: Values) -> Points:
    """Values at the middle of their intervals, in ms; where there are very many, the greatest of some stands for them.

    A last interval of less than half the length is not drawn: a rate over a moment says nothing, and stands out.
    """
    assert report.series is not None
    lasted = lasted_s(report)
    width, found = report.series.interval_ms, list(values(report.series, lasted))
    if len(lasted) > 2 and lasted[-1] < lasted[0] / 2:
        found.pop()
    of = _intervals_a_point(report)
    points: Points = []
    for first in range(0, len(found), of):
        some = [value for value in found[first : first + of] if value is not None]
        length = sum(lasted[first : first + of]) * 1000
        points.append((first * width + length / 2, max(some, default=None)))
    return points


def _intervals_a_point(report: Report) -> int:
    assert report.series is not None
    return max(1, ceil(len(report.series.arrivals) / _MOST_POINTS))


def _rates(counts: Sequence[int], lasted: Sequence[float]) -> list[float]:
    return [count / seconds for count, seconds in zip(counts, lasted, strict=True)]
