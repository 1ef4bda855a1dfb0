"""Traces on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from .worlds import TraceOf, trace_in


@pytest.fixture
def trace_of(tmp_path: Path) -> TraceOf:
    return trace_in(tmp_path)
