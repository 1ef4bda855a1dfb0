"""A bar on a terminal while a replay runs, with its rate and what is left. A door of rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


@contextmanager
def progress(total: int, file: TextIO) -> Iterator[Callable[[int], object]]:
    """Show a bar until the block ends; give the function that reports how many requests have ended.

    There is no bar in a file that is not a terminal.
    """
    with _bar(file, total=total) as update:
        yield lambda ended: update(completed=ended)


@contextmanager
def sweep_progress(runs: int, file: TextIO) -> Iterator[tuple[Callable[[int, int], object], Callable[[], object]]]:
    """Show a bar as `progress` does; give the functions that report ended requests of a total, and an ended run."""
    done = count(1)
    with _bar(file, TextColumn("{task.fields[done]}/{task.fields[runs]} runs"), done=0, runs=runs) as update:
        yield lambda ended, of: update(completed=ended, total=of), lambda: update(done=next(done))


@contextmanager
def _bar(
    file: TextIO, *first: ProgressColumn, total: int | None = None, **fields: Any
) -> Iterator[Callable[..., object]]:
    if not file.isatty():
        yield lambda **changed: None
        return
    columns = (*first, BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        yield partial(bar.update, bar.add_task("", total=total, **fields))


class _Rate(ProgressColumn):
    """Shows the recent rate of requests."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} requests/s")
