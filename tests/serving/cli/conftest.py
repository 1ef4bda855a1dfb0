"""The program without its process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from serving.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process, which saves a second each time; return exit code, output and errors."""

    def run(*arguments: str | Path | int) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def replay(penstock: Run) -> Run:
    """Run `penstock replay` in this process; return exit code, output and errors."""
    return partial(penstock, "replay")
