"""Reports side by side as a table. A door of rich."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline import InvalidArgument

from ..terminal import rendered
from .report import Report
from .table import COUNTS, DISTRIBUTIONS, NOT_KNOWN, RATES

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
    for row in [*_settings(reports), *_figures(reports)]:
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


def _figures(reports: Sequence[tuple[str, Report]]) -> Iterator[list[str]]:
    for label, name in DISTRIBUTIONS:
        of_each = [getattr(report, name) for _, report in reports]
        if any(figures.samples for figures in of_each):
            for what, statistic in _STATISTICS:
                known = [getattr(one, statistic) if one.samples else None for one in of_each]
                yield [f"{label}, {what}", *_cells(known)]
    for label, name in RATES:
        yield [label, *_cells([getattr(report, name) for _, report in reports])]
    for label, name in _BALANCES:
        yield [label, *_cells([getattr(report, name).max_over_mean for _, report in reports])]
    for label, name in COUNTS:
        counts = [getattr(report, name) for _, report in reports]
        if any(counts):
            yield [label.capitalize(), *_cells(counts)]
    yield ["Seconds", *_cells([report.duration_ms / 1000 for _, report in reports])]


def _cells(values: Sequence[float | None]) -> list[str]:
    first = values[0]
    cells = [_number(first)]
    for value in values[1:]:
        cells += [_number(value), difference(first, value)]
    return cells


def difference(first: float | None, other: float | None) -> str:
    """By how many percent the other is more than the first; nothing where that says nothing."""
    if first is None or other is None or (first == 0 and other != 0):
        return ""
    percent = 0.0 if first == other else 100.0 * (other - first) / abs(first)
    return f"{percent:+,.1f} %" if round(percent, 1) else "="


def _number(value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
