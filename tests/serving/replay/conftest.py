"""Traces on disk, made of rows; and the program, without its process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.cli import main
from serving.replay import Trace, read_trace

TraceOf = Callable[..., Trace]
Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace_of(tmp_path: Path) -> TraceOf:
    """Reads a trace of rows; a text is a line as it stands."""

    def read(*rows: dict[str, Any] | str, **settings: Any) -> Trace:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return read_trace(path, **settings)

    return read


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Replay:
    """The program without the process, which would cost a second each time: its exit code, output and errors."""

    def run(*options: str | Path | int) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "replay", *map(str, options)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run
