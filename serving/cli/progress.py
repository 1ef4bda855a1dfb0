"""A bar on a terminal while a model is loaded, or a replay runs: with its rate and what is left. A door of rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from engines.torch import LoadingProgress, ReportProgress


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
def loading_bar(file: TextIO) -> Iterator[ReportProgress]:
    """Show a bar from the first report until the block ends; reports may come from any thread, and too late.

    There is no bar in a file that is not a terminal.
    """
    if not file.isatty():
        yield lambda progress: None
        return
    loading = _LoadingBar(file)
    try:
        yield loading.report
    finally:
        loading.end()


class _LoadingBar:
    """The bar of `loading_bar`; the lock keeps a late report from starting it again."""

    def __init__(self, file: TextIO) -> None:
        columns = (TextColumn("Loading the model: {task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(file=file), transient=True)
        self._task: TaskID | None = None
        self._has_ended = False
        self._lock = Lock()

    def report(self, progress: LoadingProgress) -> None:
        total = progress.total or None
        with self._lock:
            if self._has_ended:
                return
            if self._task is None:
                self._task = self._bar.add_task(progress.step, total=total)
                self._bar.start()
            self._bar.update(self._task, description=progress.step, completed=progress.done, total=total)

    def end(self) -> None:
        with self._lock:
            self._has_ended = True
            if self._task is not None:
                self._bar.stop()


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
