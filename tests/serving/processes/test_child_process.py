"""Real child processes: their lines, notices and ends; none is left when the process above them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from serving.processes import LaunchedProcesses, ProcessGroup, Program
from serving.retry import Retry

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans")]

ROOT = str(Path(__file__).parents[3])
SERVES = """
import os, signal, sys, time
from serving.processes import notify_ready
print("begins", flush=True)
notify_ready(os.environ, "Serving m")
time.sleep(600)
"""
IGNORES = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begins', flush=True); time.sleep(600)"
)
STARTS_TWO = """
import sys, tempfile
from pathlib import Path
import anyio
from serving.processes import LaunchedProcesses, ProcessGroup, Program

async def write(name, lines): pass

async def main():
    programs = [Program(f"p-{n}", [sys.executable, "-c", "import time; time.sleep(600)"], {}) for n in (1, 2)]
    launched = LaunchedProcesses(Path(sys.argv[1]), write)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ProcessGroup(programs, launched.start).run)
        await anyio.sleep(float(sys.argv[2]))
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def program(name: str, code: str, **fields: object) -> Program:
    environment = {"PYTHONPATH": ROOT, "PATH": os.environ["PATH"]}
    return Program(name, [sys.executable, "-c", code], environment, **fields)  # type: ignore[arg-type]


class Lines:
    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self._came = anyio.Event()

    async def write(self, name: str, lines: Sequence[str]) -> None:
        self.all += [(name, line) for line in lines]
        self._came.set()
        self._came = anyio.Event()

    async def until(self, chars: int = 1) -> None:
        """Return once so many characters have come."""
        while sum(len(line) for _, line in self.all) < chars:
            await self._came.wait()


def children_in(folder: Path) -> list[int]:
    """The processes that have the folder in their environment."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if str(folder).encode() in (each / "environ").read_bytes():
                    found.append(int(each.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_is_ready_when_it_says_so_prints_and_ends_on_request(backend: str, tmp_path: Path) -> None:
    async def main() -> None:
        lines, ready = Lines(), anyio.Event()

        def served(_: Program, line: str) -> None:
            assert line == "Serving m"
            ready.set()

        launched = LaunchedProcesses(tmp_path, lines.write)
        group = ProcessGroup([program("one", SERVES)], launched.start, on_ready=served)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await ready.wait()
                assert children_in(tmp_path)
                group.end()
        assert lines.all == [("one", "begins")]
        assert not children_in(tmp_path)

    anyio.run(main, backend=backend)


def test_a_program_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        lines = Lines()
        group = ProcessGroup([program("one", IGNORES, end_s=0.3)], LaunchedProcesses(tmp_path, lines.write).start)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await lines.until()
                group.end()
        assert not children_in(tmp_path)

    anyio.run(main)


def test_what_a_program_has_started_and_left_behind_is_killed(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('begins', flush=True); sys.exit(1)"

    async def main() -> None:
        lines = Lines()
        launched = LaunchedProcesses(tmp_path, lines.write)
        group = ProcessGroup([program("one", code)], launched.start, retry=Retry(first_s=60.0))
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await lines.until()
                while children_in(tmp_path):  # noqa: ASYNC110  (they are no children of this process)
                    await anyio.sleep(0.05)
                group.end()
        assert group.states()[0].last_end == "ended with exit code 1"

    anyio.run(main)


def test_a_line_without_end_is_written_in_parts(tmp_path: Path) -> None:
    async def main() -> None:
        lines = Lines()
        code = "import sys; sys.stdout.write('x' * 1_000_000); sys.exit(1)"
        group = ProcessGroup(
            [program("one", code)], LaunchedProcesses(tmp_path, lines.write).start, retry=Retry(first_s=60.0)
        )
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await lines.until(1_000_000)
                group.end()
        assert max(len(line) for _, line in lines.all) < 200_000

    anyio.run(main)


def test_a_cancelled_group_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        launched = LaunchedProcesses(tmp_path, Lines().write)
        with anyio.move_on_after(0.5):
            await ProcessGroup([program("one", IGNORES), program("two", IGNORES)], launched.start).run()
        assert not children_in(tmp_path)

    anyio.run(main)


@pytest.mark.parametrize("after_s", ["0.001", "0.01", "0.02", "0.5"])
def test_no_program_outlives_the_killed_process_above_it(after_s: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", STARTS_TWO, str(tmp_path), after_s], cwd=ROOT, check=False)
    assert ran.returncode == -signal.SIGKILL
    ends_s = time.monotonic() + 5.0
    while children_in(tmp_path) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert not children_in(tmp_path)


def test_a_program_that_there_is_not_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        lines = Lines()
        group = ProcessGroup([Program("one", ["no-such-program"])], LaunchedProcesses(tmp_path, lines.write).start)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await lines.until()
                group.end()
        assert lines.all[0] == ("one", "no-such-program cannot be run: No such file or directory")

    anyio.run(main)
