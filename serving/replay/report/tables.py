"""A report as tables for people. The door of rich in this folder.

Reports side by side as a table. A door of rich.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline import InvalidArgument

from ...terminal import rendered
from .distribution import Distribution
from .report import Report

if TYPE_CHECKING:
    from .report import Report, WorkerReport


TITLE = "Penstock replay"
NOT_KNOWN = "N/A"
_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "p50", "std")
_NAMES = {"avg": "mean", "p50": "median"}
"""Of the columns that a distribution names otherwise."""
_DROPPED = ("p75", "std", "min", "p90", "max", "p99")
"""The columns that a narrow terminal goes without, in this order."""
_OF_WORKERS: Sequence[str] = ("requests", "input", "output", "hit rate", "running", "preempted", "seconds")
_DROPPED_OF_WORKERS = ("preempted", "running", "seconds")
DISTRIBUTIONS = (
    ("Time to first token (ms)", "ttft"),
    ("Time to second token (ms)", "ttst"),
    ("End to end (ms)", "e2e_latency"),
    ("Time per output token (ms)", "tpot"),
    ("Gap between tokens (ms)", "itl"),
    ("Output tokens/s of a user", "output_token_throughput_per_user"),
    ("Wait for a worker (ms)", "queue_wait"),
    ("Wait for the prompt (ms)", "prefill_wait"),
    ("Prompt (ms)", "prefill_time"),
    ("KV transfer (ms)", "kv_transfer"),
)
RATES = (
    ("Requests/s", "request_throughput_rps"),
    ("Input tokens/s", "input_throughput_tok_s"),
    ("Output tokens/s", "output_throughput_tok_s"),
    ("Tokens/s", "total_throughput_tok_s"),
    ("Prefix reuse", "prefix_cache_reused_ratio"),
    ("Prefix reuse, first admission", "first_admission_prefix_cache_reused_ratio"),
)
COUNTS = (
    ("requests", "num_requests"),
    ("completed", "completed_requests"),
    ("rejected", "rejected_requests"),
    ("failed", "failed_requests"),
    ("cancelled", "cancelled_requests"),
    ("unfinished", "unfinished_requests"),
    ("never sent", "unsent_requests"),
    ("bad lines left out", "skipped_lines"),
    ("migrations", "migrations"),
    ("preemptions", "preemptions"),
    ("deepest router queue", "max_router_queue_depth"),
)
_ANY_WIDTH = 10_000
_ALWAYS = 2
"""So many counts are shown even when they are 0."""


def report_text(report: Report, width: int) -> str:
    """The figures, then the workers; of columns that are wider than `width` together some are left out."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(_fitting(console, _COLUMNS, _DROPPED, partial(_figures, report)))
    console.print(_counts(report), soft_wrap=True)
    for one in report.errors:
        console.print(f" {one.requests:,} {one.type}, first: {one.example}", soft_wrap=True, markup=False)
    if report.workers:
        console.print(_fitting(console, _OF_WORKERS, _DROPPED_OF_WORKERS, partial(_workers, report)))
    return rendered(out.getvalue())


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _fitting(
    console: Console, columns: Sequence[str], dropped: Sequence[str], make: Callable[[Sequence[str]], Table]
) -> Table:
    """The table that `make` gives for as many of the columns as the console has room for."""
    unlimited = console.options.update(width=_ANY_WIDTH)
    for count in range(len(dropped)):
        table = make([column for column in columns if column not in dropped[:count]])
        if console.measure(table, options=unlimited).maximum <= console.width:
            return table
    return make([column for column in columns if column not in dropped])


def _figures(report: Report, columns: Sequence[str]) -> Table:
    table = _table(TITLE, ("figure", *columns))
    for label, name in DISTRIBUTIONS:
        figures: Distribution = getattr(report, name)
        if figures.samples or name in ("ttft", "ttst", "e2e_latency", "tpot", "itl"):
            table.add_row(label, *_cells(figures, columns))
    nothing = [NOT_KNOWN] * (len(columns) - 1)
    for label, name in RATES:
        table.add_row(label, _number(getattr(report, name)), *nothing)
    if report.goodput is not None:
        table.add_row("Good requests/s", _number(report.goodput.request_throughput_rps), *nothing)
        table.add_row("Good output tokens/s", _number(report.goodput.output_throughput_tok_s), *nothing)
    return table


def _cells(figures: Distribution, columns: Sequence[str]) -> list[str]:
    if not figures.samples:
        return [NOT_KNOWN] * len(columns)
    return [_number(getattr(figures, _NAMES.get(column, column))) for column in columns]


def _counts(report: Report) -> str:
    shown = [
        f"{getattr(report, name):,} {label}"
        for at, (label, name) in enumerate(COUNTS)
        if at < _ALWAYS or getattr(report, name)
    ]
    tokens = f"{report.total_input_tokens:,} input and {report.total_output_tokens:,} output tokens"
    took = f"in {_number(report.duration_ms / 1000)} s"
    wall = "" if report.wall_time_ms is None else f", replayed in {_number(report.wall_time_ms / 1000)} s"
    partial = "INTERRUPTED, this is what was done until then: " if report.is_interrupted else ""
    return f" {partial}{', '.join(shown)}; {tokens} {took}{wall}"


def _workers(report: Report, columns: Sequence[str]) -> Table:
    table = _table("Workers", ("worker", *columns))
    for one in report.workers:
        cells: dict[str, str] = dict(zip(_OF_WORKERS, _worker_cells(one), strict=True))
        table.add_row(_name(one), *(cells[column] for column in columns))
    table.caption = (
        f"greatest over mean: requests {_number(report.request_balance.max_over_mean)}, "
        f"computed tokens {_number(report.token_balance.max_over_mean)}, "
        f"running {_number(report.load_balance.max_over_mean)}"
    )
    return table


def _name(one: WorkerReport) -> str:
    return f"prefill {one.worker}" if one.role == "prefill" else str(one.worker)


def _worker_cells(one: WorkerReport) -> list[str]:
    is_known = one.worker_seconds > 0  # not of a worker that only answers tell of
    return [
        f"{one.requests:,}",
        f"{one.input_tokens:,}",
        f"{one.output_tokens:,}",
        NOT_KNOWN if one.hit_rate is None else _number(one.hit_rate),
        _number(one.mean_running),
        f"{one.preemptions:,}" if is_known else NOT_KNOWN,
        _number(one.worker_seconds) if is_known else NOT_KNOWN,
    ]


def _number(value: float) -> str:
    return f"{value:,.2f}"


_STATISTICS = (("mean", "mean"), ("median", "median"), ("p99", "p99"))
_BALANCES = (
    ("Requests, greatest over mean", "request_balance"),
    ("Computed tokens, greatest over mean", "token_balance"),
    ("Running, greatest over mean", "load_balance"),
)


def comparison_text(reports: Sequence[tuple[str, Report]], width: int | None = None) -> str:
    """A row for each figure that is known: of the first report, then of each other with its difference to the first.

    Settings that differ stand above. The width is as needed unless given. Raises InvalidArgument for less than two.
    """
    if len(reports) < 2:
        raise InvalidArgument("needs two reports at least", field="reports")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure", no_wrap=True)
    for at, (name, _) in enumerate(reports):
        table.add_column(name, justify="right", overflow="fold")
        if at:
            table.add_column("", justify="right", no_wrap=True)
    for row in [*_settings(reports), *_compared_figures(reports)]:
        table.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 44 + 32 * len(reports),
        color_system=None,
        legacy_windows=False,
        markup=False,
        emoji=False,
    )
    console.print(table)
    return rendered(out.getvalue())


def _settings(reports: Sequence[tuple[str, Report]]) -> Iterator[list[str]]:
    """Those that are not the same in all of them."""
    for name in dict.fromkeys(name for _, report in reports for name in report.settings):
        values = [report.settings.get(name) for _, report in reports]
        if any(value != values[0] for value in values):
            texts = [_setting(value) for value in values]
            yield [name, texts[0], *(cell for text in texts[1:] for cell in (text, ""))]


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _compared_figures(reports: Sequence[tuple[str, Report]]) -> Iterator[list[str]]:
    for label, name in DISTRIBUTIONS:
        of_each = [getattr(report, name) for _, report in reports]
        if any(figures.samples for figures in of_each):
            for what, statistic in _STATISTICS:
                known = [getattr(one, statistic) if one.samples else None for one in of_each]
                yield [f"{label}, {what}", *_compared_cells(known)]
    for label, name in RATES:
        yield [label, *_compared_cells([getattr(report, name) for _, report in reports])]
    for label, name in _BALANCES:
        yield [label, *_compared_cells([getattr(report, name).max_over_mean for _, report in reports])]
    for label, name in COUNTS:
        counts = [getattr(report, name) for _, report in reports]
        if any(counts):
            yield [label.capitalize(), *_compared_cells(counts)]
    yield ["Seconds", *_compared_cells([report.duration_ms / 1000 for _, report in reports])]


def _compared_cells(values: Sequence[float | None]) -> list[str]:
    first = values[0]
    cells = [_compared_number(first)]
    for value in values[1:]:
        cells += [_compared_number(value), difference(first, value)]
    return cells


def difference(first: float | None, other: float | None) -> str:
    """By how many percent the other is more than the first; nothing where that says nothing."""
    if first is None or other is None or (first == 0 and other != 0):
        return ""
    percent = 0.0 if first == other else 100.0 * (other - first) / abs(first)
    return f"{percent:+,.1f} %" if round(percent, 1) else "="


def _compared_number(value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
