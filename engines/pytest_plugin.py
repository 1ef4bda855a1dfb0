"""The pytest plugin: the conformance kit as a fixture. Loaded by its entry point."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def run_conformance() -> Any:
    """`await run_conformance(MyEngine)`: see `engines.run_conformance`."""
    from .conformance import run_conformance

    return run_conformance
