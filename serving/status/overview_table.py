"""Overviews as tables of text. A door of rich."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..terminal import one_line, rendered
from .overview import FrontendRow, Overview, WorkerRow

_UNKNOWN = "-"
_SILENT = "no answer"


def overview_text(overview: Overview, width: int) -> str:
    """Return the tables as plain text of so many columns."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(overview_tables(overview))
    return rendered(out.getvalue())


@contextmanager
def live_overview() -> Iterator[Callable[[Overview], None]]:
    """Give a function that shows an overview in the terminal, in the place of the one before."""
    with Live(console=Console(), auto_refresh=False) as live:
        yield lambda overview: live.update(overview_tables(overview), refresh=True)


def overview_tables(overview: Overview) -> Group:
    """Return the tables of workers and of front ends, for a console of rich."""
    if not (overview.workers or overview.frontends):
        return Group(Text("no process is registered"))
    parts = []
    if overview.workers:
        columns = ("role", "model", "worker", "address", "streams", "decode blocks", "prefill tokens", "KV used", "of")
        parts.append(_table("Workers", columns, 4, [_worker(row) for row in overview.workers]))
    if overview.frontends:
        parts.append(_table("Front ends", ("url", "models", "id", "streams"), 3, [*map(_frontend, overview.frontends)]))
    return Group(*parts)


def _table(title: str, columns: Sequence[str], texts: int, rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first columns, so many, are texts."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(
            column, justify="left" if at < texts else "right", overflow="fold" if at < texts else "ellipsis"
        )
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def _worker(row: WorkerRow) -> list[str]:
    used = _UNKNOWN
    if row.kv_used_blocks is not None and row.kv_total_blocks:
        used = f"{row.kv_used_blocks / row.kv_total_blocks:.0%}"
    streams = _SILENT if row.streams is None else str(row.streams)
    numbers = [_number(row.decode_blocks), _number(row.prefill_tokens), used, _number(row.kv_total_blocks)]
    return [row.role, row.model, row.instance, row.address, streams, *numbers]


def _frontend(row: FrontendRow) -> list[str]:
    return [row.url, ", ".join(row.models), row.instance, _SILENT if row.streams is None else str(row.streams)]


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"
