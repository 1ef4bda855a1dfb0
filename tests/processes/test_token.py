"""Processes with another token are of another deployment, whoever has announced them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest

from tests.processes.load import Load
from tests.processes.worlds import deployment, until

pytestmark = pytest.mark.slow


async def test_a_worker_with_another_token_gets_no_request_and_costs_none(tmp_path: Path) -> None:
    with deployment(tmp_path, "file", workers=2, front_ends=1, step_ms=1.0) as world:
        good, other = world.workers
        other.environment = {**other.environment, "PENSTOCK_RUNTIME_TOKEN": "another"}
        await world.start()
        load = Load(lambda: world.front_ends[0], Random(5), clients=4, tokens=(5, 30))
        served = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await until(lambda: len(load.results) >= 20, 60, "answers")
            assert load.not_exact() == []
            good.kill()
            await until(lambda: {each.outcome for each in load.results[-20:]} == {"refused"}, 60, "refusals alone")
            served, before = load.counts()["exact"], len(load.results)
            await until(lambda: len(load.results) >= before + 20, 60, "more refusals")
            load.is_over = True
        assert load.counts()["exact"] == served
        assert load.counts()["wrong"] == 0
        assert "does not know the token" in "".join(log for _, log in world.logs())
