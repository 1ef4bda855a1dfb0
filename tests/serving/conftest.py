"""The programs as fixtures; all other builders are imported from `worlds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving import worlds


@pytest.fixture
def program() -> Callable[..., Any]:
    """`worlds.program`."""
    return worlds.program


@pytest.fixture
def post() -> Callable[..., Any]:
    """`worlds.post`."""
    return worlds.post
