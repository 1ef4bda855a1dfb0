"""The pytest plugin of penstock: its testing tools as fixtures.

Every pytest run in an environment that has penstock installed loads this file, those of unrelated projects too. So it
imports nothing but pytest until one of its fixtures is used, and looks then whether a project's own `pipeline` or
`engines` stands in the place of penstock's.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipeline.testing import OpenStreams

_HOME = Path(__file__).resolve().parent
"""The folder that penstock's packages are in: this file is installed beside them."""


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both backends in virtual time. Make it the suite's with `anyio_backend = virtual_time_backend` in a conftest."""
    backend: tuple[str, dict[str, Any]] = _testing(request).virtual_time(request.param)
    return backend


@pytest.fixture
def open_streams(request: pytest.FixtureRequest) -> Iterator[OpenStreams]:
    """Watches every stream that the test makes, and fails it if one was neither closed nor read to its end."""
    testing = _testing(request)
    is_anyio = request.config.pluginmanager.has_plugin("anyio") and "anyio_backend" in request.fixturenames
    if is_anyio and iscoroutinefunction(request.function):
        # Holds the test's loop until this fixture has looked: what a task of its own closes as the loop cancels it,
        # was open when the test ended.
        request.getfixturevalue("_penstock_loop")
    with testing.watch_streams() as streams:
        yield streams
        if streams.unclosed:
            pytest.fail("\n".join(["streams were left unclosed:", *streams.unclosed]), pytrace=False)


@pytest.fixture
async def _penstock_loop(anyio_backend: Any) -> AsyncIterator[None]:
    """Keeps the loop of anyio's test runner until its own end."""
    yield  # noqa: PT022  (a fixture that returns would let the loop go)


@pytest.fixture
def check_engine(request: pytest.FixtureRequest) -> Any:
    """`await check_engine(factory, request=...)`: see `pipeline.testing.check_engine`."""
    return _testing(request).check_engine


@pytest.fixture
def check_operator(request: pytest.FixtureRequest) -> Any:
    """`await check_operator(factory, request=..., items=[...])`: see `pipeline.testing.check_operator`."""
    return _testing(request).check_operator


@pytest.fixture
def run_conformance(request: pytest.FixtureRequest) -> Any:
    """`await run_conformance(MyEngine)`: see `engines.run_conformance`."""
    _expect_own("pipeline", request.fixturename)
    _expect_own("engines", request.fixturename)
    return import_module("engines").run_conformance


def _testing(request: pytest.FixtureRequest) -> Any:
    _expect_own("pipeline", request.fixturename)
    return import_module("pipeline.testing")


def _expect_own(package: str, fixture: str | None) -> None:
    """Fail the test, naming both files, if importing the package would not give penstock's."""
    own = _HOME / package / "__init__.py"
    found = _file_of(package)
    if found is None or Path(found).resolve() != own:
        pytest.fail(
            f"the fixture {fixture!r} of penstock needs penstock's package {package!r} ({own}), but "
            f"`import {package}` gives {found or 'something else'}: rename that one, or take it off sys.path",
            pytrace=False,
        )


def _file_of(package: str) -> str | None:
    """The file that the package is, or would be, loaded from; it is not imported for this."""
    if (loaded := sys.modules.get(package)) is not None:
        return getattr(loaded, "__file__", None)
    spec = find_spec(package)
    return None if spec is None else spec.origin
