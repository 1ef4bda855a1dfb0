"""Fixtures of the tests of graphs in front of servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.edge.model_folder import write_model_folder
from tests.serving.upstream_worlds import Site, site_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model `tiny`; no test changes it."""
    write_model_folder(path := tmp_path_factory.mktemp("model") / "tiny")
    return path


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[Site]:
    """Servers by URL, and graphs in front of them; at its end no server has an open connection or a request."""
    async with site_of(folder) as made:
        yield made
