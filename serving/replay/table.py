"""A report as tables for people. The door of rich in this folder."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .distribution import Distribution

if TYPE_CHECKING:
    from .report import Report, WorkerReport

TITLE = "Penstock replay"
NOT_KNOWN = "N/A"
_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "std")
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
_ALWAYS = 2
"""So many counts are shown even when they are 0."""


def report_text(report: Report, width: int) -> str:
    """The figures, then the workers."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    console.print(_figures(report))
    console.print(_counts(report), soft_wrap=True)
    for one in report.errors:
        console.print(f" {one.requests:,} {one.type}, first: {one.example}", soft_wrap=True, markup=False)
    if report.workers:
        console.print(_workers(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figures(report: Report) -> Table:
    table = _table(TITLE, ("figure", *_COLUMNS))
    for label, name in DISTRIBUTIONS:
        figures: Distribution = getattr(report, name)
        if figures.samples or name in ("ttft", "ttst", "e2e_latency", "tpot", "itl"):
            table.add_row(label, *_cells(figures))
    nothing = [NOT_KNOWN] * (len(_COLUMNS) - 1)
    for label, name in RATES:
        table.add_row(label, _number(getattr(report, name)), *nothing)
    if report.goodput is not None:
        table.add_row("Good requests/s", _number(report.goodput.request_throughput_rps), *nothing)
        table.add_row("Good output tokens/s", _number(report.goodput.output_throughput_tok_s), *nothing)
    return table


def _cells(figures: Distribution) -> list[str]:
    if not figures.samples:
        return [NOT_KNOWN] * len(_COLUMNS)
    return [_number(getattr(figures, "mean" if column == "avg" else column)) for column in _COLUMNS]


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


def _workers(report: Report) -> Table:
    columns = ("worker", "requests", "input", "output", "hit rate", "running", "preempted", "seconds")
    table = _table("Workers", columns)
    for one in report.workers:
        table.add_row(_name(one), *_worker_cells(one))
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
