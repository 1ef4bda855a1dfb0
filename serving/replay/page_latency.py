"""Charts of latency: how long it took at each percentile."""

from __future__ import annotations

from collections.abc import Mapping

from . import page_axes
from .page_lines import Line, line_chart
from .page_text import number
from .report import Distribution, Report

_LATENCIES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token, by request"),
    ("itl", "Gap between tokens"),
    ("e2e_latency", "End to end"),
    ("queue_wait", "Wait for a worker"),
    ("prefill_wait", "Wait for the prompt"),
    ("kv_transfer", "KV transfer"),
)


def latency_charts(reports: Mapping[str, Report]) -> list[str]:
    """A chart for each kind of latency that took any time, every report a line in it."""
    charts = []
    for name, title in _LATENCIES:
        figures: dict[str, Distribution] = {run: getattr(report, name) for run, report in reports.items()}
        if any(one.samples and one.max > 0 for one in figures.values()):
            charts.append(_percentile_chart(title, figures))
    return charts


def _percentile_chart(title: str, figures: Mapping[str, Distribution]) -> str:
    lines = [
        Line(run, [(page_axes.percentile(at), value) for at, value in _curve(one)]) for run, one in figures.items()
    ]
    y = page_axes.latency((value for line in lines for _, value in line.points), "ms")
    x = page_axes.percentiles()
    curves = {run: dict(_curve(one)) for run, one in figures.items()}
    marks = (0, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99, 100)
    said = [
        (
            page_axes.percentile(at),
            f"p{at}: " + ", ".join(f"{run} {number(curve.get(at))} ms" for run, curve in curves.items()),
        )
        for at in marks
        if any(at in curve for curve in curves.values())
    ]
    return line_chart(title, lines, x, y, unit="ms", said=said)


def _curve(figures: Distribution) -> list[tuple[int, float]]:
    """Values by percentile: all of them, or those that have a name."""
    if not figures.samples:
        return []
    if len(figures.percentiles) == 101:
        return list(enumerate(figures.percentiles))
    named = (figures.min, figures.median, figures.p75, figures.p90, figures.p95, figures.p99, figures.max)
    return list(zip((0, 50, 75, 90, 95, 99, 100), named, strict=True))
