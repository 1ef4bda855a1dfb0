"""Tests that compute with a model run in real time: the engine has a thread of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.testing import virtual_time


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """A real clock for tests marked `torch`, a virtual one for all others."""
    return request.param if request.node.get_closest_marker("torch") else virtual_time(request.param)
