"""Workers in total: columns for the eye, a table for the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from . import page_axes
from .page_axes import Axis
from .page_svg import Frame, figure, tip
from .page_text import escaped, folded, number, table
from .report import Report, WorkerReport

_TOTALS: tuple[tuple[str, Callable[[WorkerReport], float | None]], ...] = (
    ("Requests by worker", lambda one: one.requests),
    ("Computed tokens by worker", lambda one: one.input_tokens - one.cached_tokens + one.output_tokens),
    ("Hit rate by worker", lambda one: one.hit_rate),
    ("Running by worker, mean", lambda one: one.mean_running),
)


def worker_name(worker: int, role: str) -> str:
    return f"prefill {worker}" if role == "prefill" else str(worker)


def total_charts(reports: Mapping[str, Report]) -> str:
    """A row of charts for each report, a column for each worker; the same figure has the same scale in every row."""
    known = {run: report for run, report in reports.items() if report.workers}
    rows = []
    axes = {
        title: page_axes.from_zero((value(one) for report in known.values() for one in report.workers), count=4)
        for title, value in _TOTALS
    }
    for run, report in known.items():
        head = f"<h3>{escaped(run)}</h3>\n" if len(known) > 1 else ""
        charts = "".join(_columns(title, run, report.workers, axes[title], value) for title, value in _TOTALS)
        rows.append(f'{head}<div class="four">\n{charts}</div>\n')
    return "".join(rows)


def _columns(
    title: str, run: str, workers: Sequence[WorkerReport], y: Axis, value: Callable[[WorkerReport], float | None]
) -> str:
    each = max(1, ceil(len(workers) / 8))
    names = [worker_name(one.worker, one.role) for one in workers]
    ticks = tuple((at + 0.5, names[at].replace("prefill ", "p")) for at in range(0, len(workers), each))
    frame = Frame.of(Axis(0.0, float(len(workers)), ticks, "worker"), y, 320.0, 200.0)
    marks = []
    for at, (name, one) in enumerate(zip(names, workers, strict=True)):
        height = value(one)
        if height is None or not y.shows(height):
            continue
        left, right = frame.place_x(at + 0.12), frame.place_x(at + 0.88)
        path = f"M{left:.1f} {frame.place_y(0):.1f}V{frame.place_y(height):.1f}H{right:.1f}V{frame.place_y(0):.1f}z"
        marks.append(f'<path class="bar {one.role}" d="{path}">{tip(f"worker {name}: {number(height)}")}</path>\n')
    known = [height for one in workers if (height := value(one)) is not None]
    said = (
        f"{run}: {len(workers):,} workers, {number(min(known))} to {number(max(known))}" if known else f"{run}: nothing"
    )
    return figure(title, frame.svg(title, said, *marks))


def worker_tables(reports: Mapping[str, Report]) -> str:
    """The totals of every worker as numbers, folded away."""
    head = (
        "worker",
        "requests",
        "input tokens",
        "cached",
        "output tokens",
        "hit rate",
        "running",
        "preempted",
        "seconds",
    )
    parts = []
    for run, report in reports.items():
        rows = [(worker_name(one.worker, one.role), _numbers(one)) for one in report.workers]
        if rows:
            parts.append(folded(f"{escaped(run)}: {len(rows):,} workers as numbers", table(head, rows)))
    return "".join(parts)


def _numbers(one: WorkerReport) -> list[str]:
    counts = (one.requests, one.input_tokens, one.cached_tokens, one.output_tokens)
    return [number(value) for value in (*counts, one.hit_rate, one.mean_running, one.preemptions, one.worker_seconds)]
