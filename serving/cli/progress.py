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
    """Show a bar on a terminal until the block ends; give the function that reports how many requests have ended.

    There is no bar in a file that is not a terminal.
    """
    if not file.isatty():
        yield lambda ended: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        task = bar.add_task("", total=total)

        def on_progress(ended: int) -> None:
            bar.update(task, completed=ended)

        yield on_progress


@contextmanager
def sweep_progress(runs: int, file: TextIO) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
    """Show a bar as `progress` does; give the functions that report ended requests of a total, and an ended run."""
    if not file.isatty():
        yield lambda ended, of: None, lambda: None
        return
    columns = (_Runs(), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=file), transient=True) as bar:
        task = bar.add_task("", total=None, done=0, runs=runs)

        def on_progress(ended: int, of: int) -> None:
            bar.update(task, completed=ended, total=of)

        def run_ended() -> None:
            bar.update(task, done=bar.tasks[0].fields["done"] + 1)

        yield on_progress, run_ended


class _Runs(ProgressColumn):
    """Shows how many runs have ended."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['done']}/{task.fields['runs']} runs")


class _Rate(ProgressColumn):
    """Shows the recent rate of requests."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} requests/s")
