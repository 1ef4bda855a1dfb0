"""A report as tables for people. The door of rich in this folder.

Reports side by side as a table. A door of rich.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline import InvalidArgument

from ...terminal import rendered
from .distribution import Distribution
from .figures import (
    COUNTS,
    DISTRIBUTIONS,
    GOODPUT,
    NOT_KNOWN,
    RATES,
    compared,
    difference,
    number,
    plain_figures,
    titled,
)
from .report import Report, WorkerReport

TITLE = "Penstock replay"
_COLUMNS = ("avg", "min", "max", "p99", "p90", "p75", "p50", "std")
_NAMES = {"avg": "mean", "p50": "median"}
"""Of the columns that a distribution names otherwise."""
_DROPPED = ("p75", "std", "min", "p90", "max", "p99")
"""The columns that a narrow terminal goes without, in this order."""
_OF_WORKERS: Sequence[str] = ("requests", "input", "output", "hit rate", "running", "preempted", "seconds")
_DROPPED_OF_WORKERS = ("preempted", "running", "seconds")
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
    for one in DISTRIBUTIONS:
        found: Distribution = getattr(report, one.name)
        if found.samples or not one.is_optional:
            table.add_row(titled(one.label, one.unit), *_cells(found, columns))
    plain = plain_figures(report)
    for figure in (*RATES, *(GOODPUT if report.goodput is not None else ())):
        table.add_row(figure.title, number(figure.value(report, plain), 2), *[NOT_KNOWN] * (len(columns) - 1))
    return table


def _cells(figures: Distribution, columns: Sequence[str]) -> list[str]:
    if not figures.samples:
        return [NOT_KNOWN] * len(columns)
    return [number(getattr(figures, _NAMES.get(column, column)), 2) for column in columns]


def _counts(report: Report) -> str:
    counts = [(figure.label.lower(), getattr(report, figure.name)) for figure in COUNTS]
    shown = [f"{count:,} {label}" for at, (label, count) in enumerate(counts) if at < _ALWAYS or count]
    tokens = f"{report.total_input_tokens:,} input and {report.total_output_tokens:,} output tokens"
    took = f"in {number(report.duration_ms / 1000, 2)} s"
    wall = "" if report.wall_time_ms is None else f", replayed in {number(report.wall_time_ms / 1000, 2)} s"
    partial = "INTERRUPTED, this is what was done until then: " if report.is_interrupted else ""
    return f" {partial}{', '.join(shown)}; {tokens} {took}{wall}"


def _workers(report: Report, columns: Sequence[str]) -> Table:
    table = _table("Workers", ("worker", *columns))
    for one in report.workers:
        cells: dict[str, str] = dict(zip(_OF_WORKERS, _worker_cells(one), strict=True))
        table.add_row(_name(one), *(cells[column] for column in columns))
    table.caption = (
        f"greatest over mean: requests {number(report.request_balance.max_over_mean, 2)}, "
        f"computed tokens {number(report.token_balance.max_over_mean, 2)}, "
        f"running {number(report.load_balance.max_over_mean, 2)}"
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
        NOT_KNOWN if one.hit_rate is None else number(one.hit_rate, 2),
        number(one.mean_running, 2),
        f"{one.preemptions:,}" if is_known else NOT_KNOWN,
        number(one.worker_seconds, 2) if is_known else NOT_KNOWN,
    ]


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
    for figure, values in compared([report for _, report in reports]):
        yield [figure.title, *_compared_cells(values)]


def _compared_cells(values: Sequence[float | None]) -> list[str]:
    first = values[0]
    cells = [_compared_number(first)]
    for value in values[1:]:
        cells += [_compared_number(value), difference(first, value)]
    return cells


def _compared_number(value: float | None) -> str:
    return number(value, 0 if isinstance(value, int) else 2)
