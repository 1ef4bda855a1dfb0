"""Traces on disk, made of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.replay import Trace, read_trace

TraceOf = Callable[..., Trace]
"""Reads a trace of rows; a text is a line as it stands. Keywords are those of `read_trace`."""


def row(**fields: Any) -> dict[str, Any]:
    """Return a row of a Mooncake trace: one block and an answer of two tokens, and the given fields."""
    return {"hash_ids": [1], "output_length": 2, **fields}


def trace_in(folder: Path) -> TraceOf:
    """Return a reader of traces whose files are in that folder."""

    def read(*rows: dict[str, Any] | str, **settings: Any) -> Trace:
        path = folder / "trace.jsonl"
        path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows))
        return read_trace(path, **settings)

    return read
