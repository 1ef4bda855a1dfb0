"""Tasks in processes: one round, in which some of them fail in every possible way."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import define, field

from pipeline import BackendError
from serving.replay.sweeping import processes, run_in_processes

WORKS = """
import logging, os, signal, time

class Unreadable:
    def __reduce__(self):
        return nowhere_to_be_found, ()

def nowhere_to_be_found():
    raise ModuleNotFoundError("No module named 'nowhere'")

def work(shared, task, on_progress):
    if task == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "raises":
        raise ValueError("no such task")
    if task == "talks":
        logging.getLogger("task").warning("a warning")
        logging.getLogger("task").info("a remark")
        os.write(2, b"." * 500_000 + b" all of it\\n")
    if task == "reports":
        on_progress(7)
        time.sleep(3)
    if task == "sleeps":
        time.sleep(600)
    if task == "blocked":
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return shared["name"], task
"""


@define
class Round:
    """What the callbacks of one round received."""

    results: dict[int, Any] = field(factory=dict)
    errors: dict[int, BaseException] = field(factory=dict)
    counts: list[tuple[int, int]] = field(factory=list)
    stderr: str = ""

    def progress(self, at: int, count: int) -> None:
        self.counts.append((at, count))

    def ended(self, at: int, result: Any, error: BaseException | None) -> None:
        if error is None:
            self.results[at] = result
        else:
            self.errors[at] = error


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of functions that processes can import, with its own folder for temporary files."""
    folder = tmp_path_factory.mktemp("works")
    (folder / "task_works.py").write_text(WORKS)
    (folder / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        import task_works  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        yield task_works


TASKS = ["plain", "dies", "raises", "talks", "reports", "blocked"]


@pytest.fixture(scope="module")
def outcome(works: ModuleType) -> Round:
    """One round in two processes for all tests, because it takes some seconds."""
    outcome = Round()
    tasks = [*TASKS, works.Unreadable(), lambda: None, "last"]
    with redirect_stderr(io.StringIO()) as stderr:
        run_in_processes(works.work, {"name": "shared"}, tasks, 2, outcome.progress, outcome.ended)
    outcome.stderr = stderr.getvalue()
    return outcome


def test_a_task_gets_the_shared_value_and_its_own(outcome: Round) -> None:
    assert outcome.results[TASKS.index("plain")] == ("shared", "plain")


def test_a_process_that_is_killed_takes_only_its_task_along(outcome: Round) -> None:
    error = outcome.errors[TASKS.index("dies")]
    assert isinstance(error, BackendError)
    assert str(error) == "its process crashed or was killed"
    assert (len(outcome.results), len(outcome.errors)) == (5, 4)
    assert outcome.results[8] == ("shared", "last")


def test_the_error_of_a_task_ends_only_that_task(outcome: Round) -> None:
    assert repr(outcome.errors[TASKS.index("raises")]) == "ValueError('no such task')"


def test_a_task_that_cannot_be_pickled_or_unpickled_ends_with_that_error(outcome: Round) -> None:
    unreadable, unsendable = outcome.errors[6], outcome.errors[7]
    assert repr(unreadable) == "ModuleNotFoundError(\"No module named 'nowhere'\")"
    assert "pickle local object" in str(unsendable)


def test_the_standard_error_of_processes_is_written_to_that_of_the_caller(outcome: Round) -> None:
    """Log messages have the level of the caller; a long text does not block the process."""
    lines = outcome.stderr.splitlines()
    assert "WARNING task: a warning" in lines
    assert "INFO task: a remark" not in lines
    assert "." * 500_000 + " all of it" in lines


def test_the_progress_of_a_task_is_reported_while_it_runs(outcome: Round) -> None:
    assert set(outcome.counts) == {(TASKS.index("reports"), 7)}


def test_processes_block_interrupts_and_the_caller_receives_them_again(outcome: Round) -> None:
    assert outcome.results[TASKS.index("blocked")] is True
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Raise interrupts also in tests that run in the background of a shell, whose programs ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_that_comes_while_locks_of_futures_are_taken_leaves_none_behind(
    works: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the loop needs them to end: it would wait for good."""
    ended: list[int] = []

    def interrupted_wait(futures: set[Future[Any]], *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)  # where `wait` takes and releases the locks
        try:
            return wait(futures, *arguments)
        finally:
            ended.append(len(futures))

    monkeypatch.setattr(processes, "wait", interrupted_wait)
    outcome = Round()
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(works.work, {}, ["sleeps", "sleeps"], 2, outcome.progress, outcome.ended)
    assert ended == [2]
    assert os.listdir(tempfile.gettempdir()) == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


UNGUARDED = """
from serving.replay.sweeping import run_in_processes
run_in_processes(print, {}, [1, 2, 3], 2, print, print)
"""


def test_a_script_that_would_start_itself_again_is_refused_and_leaves_no_file(
    outcome: Round, works: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises(BackendError, match=r"no process can be started: RuntimeError.*__main__"):
        run_in_processes(works.work, {}, [1, 2, 3], 2, outcome.progress, outcome.ended)
    assert os.listdir(tempfile.gettempdir()) == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
