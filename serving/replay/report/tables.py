"""Reports as tables of text: one report, or several side by side. A door of rich, which the first table loads."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument
from pipeline.extras import brought_by

from ...terminal import rendered
from .distribution import Distribution
from .figures import (
    COUNTS,
    DISTRIBUTIONS,
    GOODPUT,
    NOT_KNOWN,
    RATES,
    WORKERS,
    compared,
    difference,
    differing_settings,
    number,
    titled,
    worker_name,
)
from .report import Report, WorkerReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_TITLE = "Penstock replay"
_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "p50", "std")
_STATISTICS = {"avg": "mean", "p50": "median"}
"""The statistics of a distribution that have another name in the heading."""
_DROPPED = ("p75", "std", "min", "p90", "max", "p99")
"""The columns that a narrow terminal goes without, in this order."""
_WORKER_COLUMNS = {figure.short: figure.name for figure in WORKERS if figure.short}
_DROPPED_OF_WORKERS = ("preempted", "running", "seconds")
_ANY_WIDTH = 10_000
_ALWAYS = 2
"""So many of COUNTS are shown even if they are 0."""


def report_text(report: Report, width: int = 120) -> str:
    """Return the figures and workers of a report as tables; columns that do not fit into `width` are left out.

    Raise ModuleNotFoundError without rich.
    """
    out = io.StringIO()
    console = console_to(out, width, by="the table of a report")
    console.print(_fitting(console, _COLUMNS, _DROPPED, partial(_figures, report)))
    console.print(_counts(report), soft_wrap=True)
    for one in report.errors:
        console.print(f" {one.requests:,} {one.type}, first: {one.example}", soft_wrap=True, markup=False)
    if report.workers:
        console.print(_fitting(console, list(_WORKER_COLUMNS), _DROPPED_OF_WORKERS, partial(_workers, report)))
    return rendered(out.getvalue())


def comparison_text(reports: Sequence[tuple[str, Report]], width: int | None = None) -> str:
    """Return a table of named reports: the figures of the first, then of each other with its difference to the first.

    Settings that differ stand above. `width` defaults to what the table needs. Raise InvalidArgument for fewer than two
    reports, and ModuleNotFoundError without rich.
    """
    if len(reports) < 2:
        raise InvalidArgument("needs two reports at least", field="reports")
    out = io.StringIO()
    console = console_to(out, width or 44 + 32 * len(reports), by="the table of reports")
    table = new_table()
    table.add_column("figure", no_wrap=True)
    for at, (name, _) in enumerate(reports):
        table.add_column(name, justify="right", overflow="fold")
        if at:
            table.add_column("", justify="right", no_wrap=True)
    for row in [*_differing_settings(reports), *_compared(reports)]:
        table.add_row(*row)
    console.print(table)
    return rendered(out.getvalue())


def console_to(out: io.StringIO, width: int, *, by: str) -> Console:
    """Return a console that writes plain text. `by` names what needs rich, for the error without it."""
    with brought_by("serve", by=by):
        from rich.console import Console
    return Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)


def new_table(title: str | None = None, columns: Sequence[str] = ()) -> Table:
    """Return an empty table; its columns are aligned right, but for the first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at else "left", no_wrap=True)
    return table


def _fitting(
    console: Console, columns: Sequence[str], dropped: Sequence[str], make: Callable[[Sequence[str]], Table]
) -> Table:
    """Return what `make` gives for as many of the columns as fit into the console."""
    unlimited = console.options.update(width=_ANY_WIDTH)
    for count in range(len(dropped)):
        table = make([column for column in columns if column not in dropped[:count]])
        if console.measure(table, options=unlimited).maximum <= console.width:
            return table
    return make([column for column in columns if column not in dropped])


def _figures(report: Report, columns: Sequence[str]) -> Table:
    table = new_table(_TITLE, ("figure", *columns))
    for one in DISTRIBUTIONS:
        found: Distribution = getattr(report, one.name)
        if found.samples or not one.is_optional:
            table.add_row(titled(one.label, one.unit), *_statistics(found, columns))
    for figure in (*RATES, *(GOODPUT if report.goodput is not None else ())):
        table.add_row(figure.title, number(figure.value(report), 2), *[NOT_KNOWN] * (len(columns) - 1))
    return table


def _statistics(found: Distribution, columns: Sequence[str]) -> list[str]:
    if not found.samples:
        return [NOT_KNOWN] * len(columns)
    return [number(getattr(found, _STATISTICS.get(column, column)), 2) for column in columns]


def _counts(report: Report) -> str:
    counts = [(figure.label.lower(), getattr(report, figure.name)) for figure in COUNTS]
    shown = [f"{count:,} {label}" for at, (label, count) in enumerate(counts) if at < _ALWAYS or count]
    tokens = f"{report.total_input_tokens:,} input and {report.total_output_tokens:,} output tokens"
    took = f"in {number(report.duration_ms / 1000, 2)} s"
    wall = "" if report.wall_time_ms is None else f", replayed in {number(report.wall_time_ms / 1000, 2)} s"
    partly = "INTERRUPTED, this is what was done until then: " if report.is_interrupted else ""
    return f" {partly}{', '.join(shown)}; {tokens} {took}{wall}"


def _workers(report: Report, columns: Sequence[str]) -> Table:
    table = new_table("Workers", ("worker", *columns))
    for one in report.workers:
        table.add_row(worker_name(one), *(_worker_cell(one, _WORKER_COLUMNS[column]) for column in columns))
    table.caption = (
        f"greatest over mean: requests {number(report.request_balance.max_over_mean, 2)}, "
        f"computed tokens {number(report.token_balance.max_over_mean, 2)}, "
        f"running {number(report.load_balance.max_over_mean, 2)}"
    )
    return table


def _worker_cell(one: WorkerReport, name: str) -> str:
    if name in ("preemptions", "worker_seconds") and not one.worker_seconds:  # it is known from answers only
        return NOT_KNOWN
    value = getattr(one, name)
    return number(value, None if isinstance(value, int) else 2)


def _differing_settings(reports: Sequence[tuple[str, Report]]) -> Iterator[list[str]]:
    for name in differing_settings(report for _, report in reports):
        texts = [_setting(report.settings.get(name)) for _, report in reports]
        yield [name, texts[0], *(cell for text in texts[1:] for cell in (text, ""))]


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _compared(reports: Sequence[tuple[str, Report]]) -> Iterator[list[str]]:
    for figure, values in compared([report for _, report in reports]):
        cells = [_compared_number(values[0])]
        for value in values[1:]:
            cells += [_compared_number(value), difference(values[0], value)]
        yield [figure.title, *cells]


def _compared_number(value: float | None) -> str:
    return number(value, 0 if isinstance(value, int) else 2)
