"""The disk of a shared folder is full: discovery stands still, and nothing else notices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from tests.processes.chaos import under_load
from tests.processes.worlds import deployment, until

pytestmark = pytest.mark.slow

FULL_S = 15.0
"""How long the disk is full: longer than a lease."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def keep_full(filler: Path) -> None:
    """Write to the file whatever its file system has room for, also what others free meanwhile."""
    with filler.open("wb", buffering=0) as file:
        while True:
            with suppress(OSError):
                while True:
                    file.write(bytes(512))
            await anyio.sleep(0.01)


async def test_a_full_disk_ends_no_request_and_no_lease(tmp_path: Path, small_disk: Path) -> None:
    with deployment(tmp_path, "file", runtime_folder=small_disk / "runtime") as world:
        async with under_load(world, seed=4) as chaos:
            late, filler = world.workers[0], small_disk / "filler"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep_full, filler)
                await anyio.sleep(FULL_S)
                late.kill()
                late.start()  # it cannot announce itself
                await until(lambda: not late.is_running, 60.0, "a worker that cannot announce itself ends")
                assert "No space left" in late.last_lines()
                assert all([await each.is_healthy() for each in (*world.workers[1:], *world.front_ends)])
                tasks.cancel_scope.cancel()
            filler.unlink()
            late.kill()
            late.start()
            await late.ready()
            await anyio.sleep(1.0)
        assert chaos.load.not_exact() == []
