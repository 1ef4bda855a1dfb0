"""Connections are tested on both loops of asyncio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The programs run on uvloop: what asyncio's own loop does is among the slow tests."""
    folder = Path(__file__).parent
    for item in items:
        if "[asyncio" in item.name and item.path.parent == folder:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}
