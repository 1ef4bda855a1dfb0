"""The bar while a model is loaded."""

from __future__ import annotations

import io

import pytest

from engines.torch import LoadingProgress
from serving.cli.progress import loading_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_shows_the_step_and_how_many_tensors_it_has_done() -> None:
    file = Terminal()
    with loading_bar(file) as report:
        report(LoadingProgress("reading"))
        report(LoadingProgress("loading weights", 12, 272))
    assert "loading weights" in file.getvalue()
    assert "12/272" in file.getvalue()


def test_a_file_that_is_no_terminal_gets_nothing() -> None:
    file = io.StringIO()
    with loading_bar(file) as report:
        report(LoadingProgress("loading weights", 12, 272))
    assert file.getvalue() == ""


def test_an_engine_that_reports_nothing_shows_no_bar() -> None:
    file = Terminal()
    with loading_bar(file):
        pass
    assert file.getvalue() == ""


def test_a_report_after_the_end_draws_nothing() -> None:
    file = Terminal()
    with loading_bar(file) as report:
        report(LoadingProgress("reading"))
    before = file.getvalue()
    report(LoadingProgress("loading weights", 1, 2))
    assert file.getvalue() == before
