"""Every program is replaced while requests run, and no request notices."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.processes.chaos import under_load
from tests.processes.worlds import deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["nats", "file"])
async def test_a_rolling_restart_of_all_workers_and_front_ends_fails_no_request(kind: str, tmp_path: Path) -> None:
    with deployment(tmp_path, kind) as world:
        async with under_load(world, seed=3) as chaos:
            for worker in world.workers:
                assert await worker.stop() == 0, worker.last_lines()
                worker.start()
                await worker.ready()
            for front_end in world.front_ends:
                world.in_rotation.remove(front_end)  # as a Service does before a pod's signal
                await anyio.sleep(1.0)
                assert await front_end.stop() == 0, front_end.last_lines()
                front_end.start()
                await front_end.ready()
                world.in_rotation.append(front_end)
            await anyio.sleep(1.0)
        assert chaos.load.not_exact() == []
        assert {each.lives for each in (*world.workers, *world.front_ends)} == {2}
