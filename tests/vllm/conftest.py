"""Real vLLM servers as fixtures; `make vllm-test` names the interpreter that has vLLM by `VLLM_PYTHON`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.servers import AGGREGATED, Servers, VllmServer
from tests.vllm.tiny_model import TinyLlama


@pytest.fixture
def anyio_backend() -> str:
    """Real time: the servers know no other. Both backends run the same code against the fakes of the normal suite."""
    return "asyncio"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with tokenizer and chat template."""
    return TinyLlama().write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def servers(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Every server that a test has taken is ended with the run, also with one that failed."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("needs VLLM_PYTHON, the interpreter of an environment with vLLM: run `make vllm-test`")
    servers = Servers(python, model_folder, tmp_path_factory.mktemp("logs"))
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture
def server(servers: Servers) -> VllmServer:
    """One aggregated server."""
    return servers.take(AGGREGATED)[0]


@pytest.fixture
def pair(servers: Servers) -> tuple[VllmServer, VllmServer]:
    """Two aggregated servers over the same model, with empty prefix caches."""
    first, second = servers.take(AGGREGATED, AGGREGATED)
    for each in (first, second):
        each.forget()
    return first, second
