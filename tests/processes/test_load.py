"""The clients of these tests tell an answer that is right from one that is not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest

from tests.ports import reserved_port
from tests.processes.chaos import errors
from tests.processes.load import Load
from tests.processes.worlds import Program, penstock, until

pytestmark = pytest.mark.slow


async def outcomes(folder: Path, *engine: str, answers: int, kill: bool = False) -> Load:
    """Return a load after so many answers of a server, which may be killed before the last ones."""
    port = reserved_port()
    command = penstock("serve", "--port", str(port), "--model-name", "mock", *engine)
    server = Program("server", command, folder, health_url=f"http://127.0.0.1:{port}/health")
    load = Load(lambda: server if server.is_running else None, Random(1), clients=3, tokens=(5, 20))
    server.start()
    try:
        await server.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await until(lambda: len(load.results) >= answers, 60, f"{answers} answers")
            if kill:
                server.kill()
            load.is_over = True
    finally:
        server.kill()
    return load


async def test_answers_of_the_mock_engine_are_exact(tmp_path: Path) -> None:
    load = await outcomes(tmp_path, "--engine", "mocker", answers=10)
    assert load.counts().keys() == {"exact"}


async def test_answers_of_another_engine_are_wrong(tmp_path: Path) -> None:
    load = await outcomes(tmp_path, "--engine", "echo", answers=3)
    assert load.counts().keys() == {"wrong"}


async def test_requests_that_no_worker_can_take_are_refused(tmp_path: Path) -> None:
    load = await outcomes(tmp_path, "--engine", "mocker", "--engine-arg", "max_model_len=4", answers=3)
    assert load.counts().keys() == {"refused"}
    assert "400" in load.results[0].detail


async def test_answers_of_a_server_that_is_killed_are_cut(tmp_path: Path) -> None:
    slow = ("--engine", "mocker", "--engine-arg", "speedup_ratio=0.3")
    load = await outcomes(tmp_path, *slow, answers=1, kill=True)
    assert load.counts()["cut"] >= 1
    assert load.counts().keys() <= {"exact", "cut"}


def test_errors_of_requests_that_may_fail_are_left_out_of_a_log_and_no_others() -> None:
    first, second = (
        f"ERROR serving.endpoint: a request failed [request={request_id} model=mock]\n"
        "Traceback (most recent call last):\nDisconnected: it was lost\n"
        for request_id in ("1", "12")
    )
    other = "WARNING pipeline: lost\nERROR serving.endpoint: a call failed\nTraceback (most recent call last):\n"
    assert errors(first + second, {"1", "12"}) == []
    assert errors(first + second, {"1"}) == second.splitlines()[:2]
    assert errors(first + other, {"1"}) == other.splitlines()[1:]
    assert errors(first + other) == [*first.splitlines()[:2], *other.splitlines()[1:]]
