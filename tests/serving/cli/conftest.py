"""The program without its process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.cli import main

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Replay:
    """Run `penstock replay` in this process, which saves a second each time; return exit code, output and errors."""

    def run(*options: str | Path | int) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "replay", *map(str, options)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run
