"""The shared folder of a deployment is removed under load: no request notices, and it is there again by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import anyio
import pytest

from tests.processes.load import Load
from tests.processes.worlds import deployment, until

pytestmark = pytest.mark.slow

LEASE_S = 10.0


async def test_a_folder_that_is_removed_under_load_ends_no_request_and_comes_back(tmp_path: Path) -> None:
    random, shared = Random(5), tmp_path / "runtime"
    with deployment(tmp_path, "file", workers=3, runtime_folder=shared) as every:
        await every.start()
        load = Load(lambda: random.choice(every.in_rotation), random, clients=8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await anyio.sleep(2)
            before = await every.registered()
            await anyio.to_thread.run_sync(shutil.rmtree, shared)
            await until((shared / "records" / ".id").exists, LEASE_S, "a worker makes the folder again")
            await anyio.sleep(2 * LEASE_S)  # what is not back by now is given up
            assert await every.registered() == before
            late = every.front_ends[0]  # knows nothing but what is in the folder
            every.in_rotation.remove(late)
            assert await late.stop() == 0
            late.start()
            await late.ready()
            every.in_rotation.append(late)
            await until(
                lambda: any(result.front_end is late and result.life == 2 for result in load.results),
                60,
                "the front end that came late answers",
            )
            load.is_over = True
        assert load.not_exact() == []
        assert load.counts()["exact"] > 20
        assert all(program.is_running for program in every.programs)
