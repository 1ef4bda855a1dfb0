"""A bar on a terminal while a replay runs, with its rate and what is left. A door of rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text


@contextmanager
def progress(total: int, file: TextIO) -> Iterator[Callable[[int], None]]:
    """What to tell how many have ended. The bar is gone when the block ends; a file that is no terminal has none."""
    if not file.isatty():
        yield lambda ended: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        task = bar.add_task("", total=total)

        def heard(ended: int) -> None:
            bar.update(task, completed=ended)

        yield heard


@contextmanager
def sweep_progress(runs: int, file: TextIO) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
    """What to tell how many requests have ended of how many, and that a run has. Else as `progress`."""
    if not file.isatty():
        yield lambda ended, of: None, lambda: None
        return
    columns = (_Runs(), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        task = bar.add_task("", total=None, done=0, runs=runs)

        def heard(ended: int, of: int) -> None:
            bar.update(task, completed=ended, total=of)

        def run_ended() -> None:
            bar.update(task, done=bar.tasks[0].fields["done"] + 1)

        yield heard, run_ended


class _Runs(ProgressColumn):
    """How many runs have ended."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['done']}/{task.fields['runs']} runs")


class _Rate(ProgressColumn):
    """How many a second, of late."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} requests/s")
