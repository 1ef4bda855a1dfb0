"""What is printed of an error that ends a program."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline import CannotConnect, InvalidArgument, Unknown
from pipeline.errors import BackendUnknown
from serving.failure_report import HINT
from serving.failure_report import report as whole_report

OWN = """
import json

def missing():
    return {}["name"]

def nested():
    return missing()

def silent():
    raise RuntimeError

def library():
    json.loads("{")

def caused():
    try:
        missing()
    except KeyError as error:
        raise RuntimeError("cannot\\nload") from error

def group():
    errors = []
    for fails in (missing, silent):
        try:
            fails()
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("two tasks", errors)

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the current folder."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("own", tmp_path / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(error: BaseException, place: str = "") -> list[str]:
    """Without the frames of this file, which are foreign too."""
    return [line for line in whole_report(error, place) if Path(__file__).name not in line]


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("missing", ["Error: KeyError: 'name'", "  own.py:5 in missing"]),
        ("nested", ["Error: KeyError: 'name'", "  own.py:8 in nested", "  own.py:5 in missing"]),
        ("silent", ["Error: RuntimeError", "  own.py:11 in silent"]),
        ("leaves", ["Error: SystemExit: 3", "  own.py:32 in leaves"]),
        (
            "caused",
            [
                "Error: RuntimeError: cannot load",
                "  own.py:20 in caused",
                "  because of KeyError: 'name'",
                "    own.py:18 in caused",
                "    own.py:5 in missing",
            ],
        ),
        (
            "group",
            [
                "Error: ExceptionGroup: two tasks (2 sub-exceptions)",
                "  own.py:29 in group",
                "  KeyError: 'name'",
                "    own.py:26 in group",
                "    own.py:5 in missing",
                "  RuntimeError",
                "    own.py:26 in group",
                "    own.py:11 in silent",
            ],
        ),
    ],
)
def test_an_error_of_foreign_code_shows_its_class_and_its_own_frames(
    own: ModuleType, name: str, lines: list[str]
) -> None:
    foreign = raised_by(getattr(own, name))
    text = f"SystemExit: {foreign}" if isinstance(foreign, SystemExit) else str(foreign) or type(foreign).__name__
    assert report(BackendUnknown(text, cause=foreign)) == [*lines, f"  {HINT}"]


def test_frames_of_libraries_and_of_this_project_are_left_out(own: ModuleType) -> None:
    lines = report(BackendUnknown("", cause=raised_by(own.library)))
    assert [line for line in lines if ".py:" in line] == ["  own.py:14 in library"]


def test_where_only_installed_code_failed_its_last_frames_are_shown() -> None:
    def installed() -> None:
        space: dict[str, Any] = {}
        exec(compile("def load():\n    raise OSError('no device')\n", "/x/site-packages/engine.py", "exec"), space)
        space["load"]()

    foreign = raised_by(installed)
    *_, last = traceback.walk_tb(foreign.__traceback__)
    while foreign.__traceback__ is not None and foreign.__traceback__.tb_frame is not last[0]:
        foreign.__traceback__ = foreign.__traceback__.tb_next
    assert report(Unknown("no device", cause=foreign)) == [
        "Error: OSError: no device",
        "  /x/site-packages/engine.py:2 in load",
        f"  {HINT}",
    ]


@pytest.mark.parametrize(
    ("error", "place", "line"),
    [
        (
            InvalidArgument("must be at least 1, got 0", field="workers"),
            "--workers: ",
            "--workers: must be at least 1, got 0",
        ),
        (InvalidArgument("--workers: is odd"), "--workers: ", "--workers: is odd"),
        (OSError(98, "Address already in use"), "", "[Errno 98] Address already in use"),
        (Unknown("the scheduler\nbroke"), "", "the scheduler broke"),
    ],
)
def test_an_error_written_for_its_reader_is_one_line(error: Exception, place: str, line: str) -> None:
    assert report(error, place) == [f"Error: {line}"]


def test_a_failure_of_a_library_under_a_message_of_ours_is_one_line() -> None:
    foreign = raised_by(lambda: json.loads("{"))
    *_, last = traceback.walk_tb(foreign.__traceback__)
    while foreign.__traceback__ is not None and foreign.__traceback__.tb_frame is not last[0]:
        foreign.__traceback__ = foreign.__traceback__.tb_next
    assert report(CannotConnect("no connection to http://x", cause=foreign)) == ["Error: no connection to http://x"]


def test_a_wrong_argument_that_foreign_code_refuses_shows_where(own: ModuleType) -> None:
    error = InvalidArgument("own:missing: KeyError: 'name'", field="engine", cause=raised_by(own.missing))
    assert report(error, "--engine: ") == [
        "Error: --engine: own:missing: KeyError: 'name'",
        "  own.py:5 in missing",
        f"  {HINT}",
    ]


def test_an_error_of_the_tree_that_foreign_code_raised_shows_where(own: ModuleType, tmp_path: Path) -> None:
    code = compile("def load(Error):\n    raise Error('no weights')\n", str(tmp_path / "own.py"), "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    error = raised_by(lambda: space["load"](BackendUnknown))
    assert report(error) == ["Error: no weights", "  own.py:2 in load", f"  {HINT}"]
    assert "own" not in sys.modules
