"""Fixtures of the kit's tests. A broken engine for each rule: on asyncio always, on trio among the slow tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conformance.worlds import RECORDED

BROKEN_ENGINES = {
    f"test_{name}" for name in ("endings", "failures", "holds", "kills", "life_cycle", "limits", "tokens")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path)
        if path.parent.name == "conformance" and path.stem in BROKEN_ENGINES and "[trio" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _no_engines_of_other_tests() -> Iterator[None]:
    yield
    RECORDED.clear()
