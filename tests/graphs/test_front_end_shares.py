"""The parts of `benchmarks.front_ends`: which processes it counts, and the groups in which front ends have a share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cpu_shares import CpuGroups, throttled_s
from benchmarks.front_ends import Processes

BUSY = "while True: pass"


@contextmanager
def started(code: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that is killed in the end."""
    with subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def mounts(kind: str, options: str, folder: Path) -> str:
    escaped = str(folder).replace(" ", r"\040")
    return f"proc /proc proc rw 0 0\n{kind} {escaped} {kind} {options} 0 0\n"


def test_a_hierarchy_is_found_by_its_cpu_controller(tmp_path: Path) -> None:
    first = tmp_path / "a cpu"
    first.mkdir()
    assert CpuGroups.find(mounts("cgroup", "rw,cpu,cpuacct", first)) == CpuGroups(first, 1)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert CpuGroups.find(mounts("cgroup2", "rw", tmp_path)) == CpuGroups(tmp_path, 2)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert {path.name for path in tmp_path.iterdir()} == {"a cpu", "cgroup.controllers", "cgroup.subtree_control"}


@pytest.mark.parametrize(("kind", "options"), [("cgroup", "rw,memory"), ("cgroup2", "rw"), ("tmpfs", "rw,cpu")])
def test_without_a_cpu_controller_nothing_is_measured(tmp_path: Path, kind: str, options: str) -> None:
    with pytest.raises(SystemExit, match="none is mounted"):
        CpuGroups.find(mounts(kind, options, tmp_path))


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2"])
def test_a_hierarchy_without_the_right_to_write_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu")
    (tmp_path / "cgroup.subtree_control").mkdir()
    folder = tmp_path if kind == "cgroup2" else tmp_path / "absent"
    with pytest.raises(SystemExit, match="the right to make groups"):
        CpuGroups.find(mounts(kind, "rw,cpu", folder))


@pytest.mark.parametrize("share", [0.0, -1.0, 0.05])
def test_a_share_below_what_the_kernel_takes_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(SystemExit, match=r"at least 0\.1"), CpuGroups(tmp_path, 1).limited([1], share):
        pass
    assert not list(tmp_path.iterdir())


def are_told_apart(found: Processes) -> bool:
    """Return whether all of them run. One that has just been started is still the same as the one above it."""
    return (len(found.serving), len(found.workers), len(found.front)) == (2, 1, 3) and min(found.cpu_s()) > 0


def test_front_ends_and_workers_are_told_apart_among_the_processes_below_one() -> None:
    nested = f"""
import subprocess, sys
for word in ("serve", "serve", "worker"):
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", word])
print("started", flush=True)
{BUSY.replace("pass", "sys.stdin.read(1) or sys.exit()")}
"""
    with started(BUSY, "serve"), started(nested, "up") as above:
        ends_s = time.monotonic() + 20
        while not are_told_apart(found := Processes.below(above.pid)) and time.monotonic() < ends_s:
            time.sleep(0.02)
        assert (len(found.serving), len(found.workers), len(found.front)) == (2, 1, 3)
        assert above.pid in found.front
        assert set(found.serving) < found.front
        front_s, workers_s = found.cpu_s()
        assert front_s > 0 < workers_s
    with pytest.raises(OSError, match="No such file"):
        found.cpu_s()  # they have ended


@pytest.mark.slow
class TestRealGroups:
    """Needs Linux and the right to make groups; passed over otherwise."""

    @pytest.fixture
    def groups(self) -> CpuGroups:
        try:
            return CpuGroups.find()
        except (SystemExit, OSError) as error:
            pytest.skip(str(error))

    def test_a_busy_process_gets_its_share_and_no_more(self, groups: CpuGroups) -> None:
        with started(BUSY, "serve") as process, groups.limited([process.pid], 0.2) as (group,):
            assert (group / "cgroup.procs").read_text().split() == [str(process.pid)]
            processes, begun_s = Processes.below(process.pid), time.monotonic()
            used_s = -processes.cpu_s()[0]
            time.sleep(1.0)
            used_s += processes.cpu_s()[0]
            assert used_s < 0.25 * (time.monotonic() - begun_s)
            assert throttled_s(group) > 0.1
        assert not group.exists()

    def test_groups_are_removed_after_an_error_and_processes_live_on_where_they_were(self, groups: CpuGroups) -> None:
        kept: list[Path] = []

        def fail(made: list[Path]) -> None:
            kept.extend(made)
            two.kill()
            two.wait()
            raise RuntimeError

        with started(BUSY) as one, started(BUSY) as two:
            before = Path(f"/proc/{one.pid}/cgroup").read_text()
            with pytest.raises(RuntimeError), groups.limited([one.pid, two.pid], 0.2) as made:
                fail(made)
            assert len(kept) == 2
            assert not any(group.exists() for group in kept)
            assert one.poll() is None
            assert Path(f"/proc/{one.pid}/cgroup").read_text() == before

    def test_a_process_that_has_ended_is_named_and_leaves_no_group(self, groups: CpuGroups) -> None:
        with started(BUSY) as one, started(BUSY) as two:
            two.kill()
            two.wait()
            before = sorted(groups.root.iterdir())
            with (
                pytest.raises(SystemExit, match=f"process {two.pid} has ended"),
                groups.limited([one.pid, two.pid], 0.2),
            ):
                pass
            assert sorted(groups.root.iterdir()) == before
