"""A broken engine for each rule of the kit: on asyncio always, on trio among the slow tests, for there are many."""

from __future__ import annotations

from pathlib import Path

import pytest

BROKEN_ENGINES = {f"test_conformance_{name}" for name in ("endings", "failures", "holds", "limits", "tokens")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).stem in BROKEN_ENGINES and "[trio" in item.name:
            item.add_marker(pytest.mark.slow)
