"""Traces on disk, made of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.replay import Trace, read_trace

TraceOf = Callable[..., Trace]


@pytest.fixture
def trace_of(tmp_path: Path) -> TraceOf:
    """Reads a trace of rows; a text is a line as it stands."""

    def read(*rows: dict[str, Any] | str, **settings: Any) -> Trace:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return read_trace(path, **settings)

    return read
