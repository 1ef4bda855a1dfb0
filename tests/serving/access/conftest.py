"""A server's certificate as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.access.worlds import Certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """A valid certificate for 127.0.0.1 and localhost in files."""
    return Certificates(tmp_path).issue()
