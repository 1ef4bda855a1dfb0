"""Tasks in processes: one round of them, in which some break, shows all that a task can meet."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from pipeline import BackendError
from serving.replay.sweeping import run_in_processes

WORKS = """
import logging, os, signal, time

class Unreadable:
    def __reduce__(self):
        return nowhere_to_be_found, ()

def nowhere_to_be_found():
    raise ModuleNotFoundError("No module named 'nowhere'")

def work(shared, task, heard):
    if task == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "raises":
        raise ValueError("no such task")
    if task == "talks":
        logging.getLogger("task").warning("it is said")
        logging.getLogger("task").info("it is not said")
        os.write(2, b"." * 500_000 + b" all of it\\n")
    if task == "is heard":
        heard(7)
        time.sleep(0.5)
    if task == "blocked":
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return shared["name"], task
"""


@define
class Told:
    """What a round told."""

    results: dict[int, Any] = field(factory=dict)
    errors: dict[int, BaseException] = field(factory=dict)
    counts: list[tuple[int, int]] = field(factory=list)
    said: str = ""

    def heard(self, at: int, count: int) -> None:
        self.counts.append((at, count))

    def ended(self, at: int, result: Any, error: BaseException | None) -> None:
        if error is None:
            self.results[at] = result
        else:
            self.errors[at] = error


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module of functions that processes find as well, with a folder of its own for temporary files."""
    folder = tmp_path_factory.mktemp("works")
    (folder / "task_works.py").write_text(WORKS)
    (folder / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        import task_works  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        yield task_works


TASKS = ["plain", "dies", "raises", "talks", "is heard", "blocked"]


@pytest.fixture(scope="module")
def told(works: Any) -> Told:
    """One round in two processes, a second for all tests."""
    told = Told()
    tasks = [*TASKS, works.Unreadable(), lambda: None, "last"]
    with redirect_stderr(io.StringIO()) as said:
        run_in_processes(works.work, {"name": "shared"}, tasks, 2, told.heard, told.ended)
    told.said = said.getvalue()
    return told


def test_a_task_has_what_is_shared_and_its_own(told: Told) -> None:
    assert told.results[TASKS.index("plain")] == ("shared", "plain")


def test_a_process_that_is_killed_takes_only_its_task_along(told: Told) -> None:
    error = told.errors[TASKS.index("dies")]
    assert isinstance(error, BackendError)
    assert str(error) == "its process crashed or was killed"
    assert (len(told.results), len(told.errors)) == (5, 4)
    assert told.results[8] == ("shared", "last")


def test_what_a_task_raises_is_its_own_end(told: Told) -> None:
    assert repr(told.errors[TASKS.index("raises")]) == "ValueError('no such task')"


def test_a_task_that_cannot_be_sent_or_read_says_so(told: Told) -> None:
    unreadable, unsendable = told.errors[6], told.errors[7]
    assert repr(unreadable) == "ModuleNotFoundError(\"No module named 'nowhere'\")"
    assert "pickle local object" in str(unsendable)


def test_what_processes_write_to_their_standard_error_is_written_to_ours(told: Told) -> None:
    """The level of messages is ours too; much of it keeps no process waiting."""
    lines = told.said.splitlines()
    assert "WARNING task: it is said" in lines
    assert "INFO task: it is not said" not in lines
    assert "." * 500_000 + " all of it" in lines


def test_how_far_a_task_is_is_heard_while_it_runs(told: Told) -> None:
    assert set(told.counts) == {(TASKS.index("is heard"), 7)}


def test_processes_do_not_hear_interrupts_and_we_do_again(told: Told) -> None:
    assert told.results[TASKS.index("blocked")] is True
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


UNGUARDED = """
from serving.replay.sweeping import run_in_processes
run_in_processes(print, {}, [1, 2, 3], 2, print, print)
"""


def test_a_script_that_would_start_itself_over_and_over_is_told_and_no_file_is_left(
    told: Told, works: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    with pytest.raises(BackendError, match=r"no process can be started: RuntimeError.*__main__"):
        run_in_processes(works.work, {}, [1, 2, 3], 2, told.heard, told.ended)
    assert os.listdir(tempfile.gettempdir()) == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
