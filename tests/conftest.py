"""Every async test runs on both loops in virtual time, every property test on the same examples each run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from pipeline.testing import virtual_time

settings.register_profile(
    "penstock",
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=100,
    # Without the phase that explains a failure: it traces every line, and a failing test takes minutes.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    # The backend below has one clock for each test function; examples may share it, since its time only moves on.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("penstock")


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
