"""Tests with processes wait for them in real time, on asyncio: the load, not what is tested, runs in this process."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {}
