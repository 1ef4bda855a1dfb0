"""Every async test runs on both loops in virtual time, every property test on the same examples each run."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from pipeline.testing import virtual_time
from tests.bundling import bundle, bundling

__all__ = ["bundling"]

ROOT = Path(__file__).parents[1]

settings.register_profile(
    "penstock",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=40,
    # Without the phase that explains a failure: it traces every line, and a failing test takes minutes.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    # The backend below has one clock for each test function; examples may share it, since its time only moves on.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# What `make slow-test` holds every property test over. A test that needs more or fewer names its share of this count.
settings.register_profile("thorough", settings.get_profile("penstock"), max_examples=100)
settings.load_profile("penstock")


WITH_SOCKETS = {
    "tests/engines/upstream/test_kv_events.py",
    "tests/pipeline/llm/kv_events/test_follower.py",
    "tests/serving/test_upstream_events.py",
}
"""Tests that wait for real sockets in real time: on asyncio always, on trio among the slow tests."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, a quarter of that time: there is none, all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    bundle(metafunc)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {ROOT / name for name in WITH_SOCKETS}
    for item in items:
        if "[trio" in item.name and item.path in files:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A loop whose clock jumps to the next deadline; new for each test, so no test starts late."""
    return virtual_time(request.param)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Take what is there already out of every later garbage collection: those that tests call for would look at it all
    again, and took more than half of their time."""
    gc.collect()
    gc.freeze()
