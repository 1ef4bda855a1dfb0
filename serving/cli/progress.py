"""A bar on a terminal while a model is loaded, or a replay runs: with its rate and what is left. A door of rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from engines.torch import ReportProgress


@contextmanager
def progress(total: int, file: TextIO) -> Iterator[Callable[[int], object]]:
    """Show a bar until the block ends; give the function that reports how many requests have ended.

    There is no bar in a file that is not a terminal.
    """
    with _bar(file, *_columns(), total=total) as update:
        update()
        yield lambda ended: update(completed=ended)


@contextmanager
def sweep_progress(runs: int, file: TextIO) -> Iterator[tuple[Callable[[int, int], object], Callable[[], object]]]:
    """Show a bar as `progress` does; give the functions that report ended requests of a total, and an ended run."""
    done = count(1)
    with _bar(file, TextColumn(f"{{task.fields[done]}}/{runs} runs"), *_columns(), done=0) as update:
        update()
        yield lambda ended, of: update(completed=ended, total=of), lambda: update(done=next(done))


@contextmanager
def loading_bar(file: TextIO) -> Iterator[ReportProgress]:
    """Show a bar from the first report until the block ends; reports may come from any thread, and too late.

    There is no bar in a file that is not a terminal.
    """
    step = TextColumn("Loading the model: {task.description}")
    with _bar(file, step, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as update:
        yield lambda loading: update(description=loading.step, completed=loading.done, total=loading.total or None)


def _columns() -> tuple[ProgressColumn, ...]:
    return BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()


@contextmanager
def _bar(
    file: TextIO, *columns: ProgressColumn, total: int | None = None, **fields: Any
) -> Iterator[Callable[..., object]]:
    """Give the function that changes a bar, shown from its first call until the block ends; later calls do nothing."""
    if not file.isatty():
        yield lambda **changed: None
        return
    bar = Progress(*columns, console=Console(file=file), transient=True)
    task = bar.add_task("", start=False, total=total, **fields)
    lock, is_over = Lock(), False

    def update(**changed: Any) -> None:
        with lock:
            if not is_over:
                bar.start()
                bar.start_task(task)
                bar.update(task, **changed)

    try:
        yield update
    finally:
        with lock:
            is_over = True
        if bar.live.is_started:
            bar.stop()


class _Rate(ProgressColumn):
    """Shows the recent rate of requests."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} requests/s")
