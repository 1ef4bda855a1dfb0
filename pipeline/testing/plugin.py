"""The pytest plugin: the testing tools as fixtures. Loaded by its entry point, imports nothing until one is used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .probe import OpenStreams


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both backends in virtual time. Make it the suite's with `anyio_backend = virtual_time_backend` in a conftest."""
    from .clock import virtual_time

    return virtual_time(request.param)


@pytest.fixture
def open_streams() -> Iterator[OpenStreams]:
    """Watches every stream the test makes; the test fails if one is open when it ends."""
    from .probe import watch_streams

    with watch_streams() as streams:
        yield streams
        gc.collect()
        assert not streams.open, f"left open: {[stream.context for stream in streams.open]}"


@pytest.fixture
def check_engine() -> Any:
    """`await check_engine(factory, request=...)`: see `pipeline.testing.check_engine`."""
    from .check import check_engine

    return check_engine


@pytest.fixture
def check_operator() -> Any:
    """`await check_operator(factory, request=..., items=[...])`: see `pipeline.testing.check_operator`."""
    from .check import check_operator

    return check_operator
