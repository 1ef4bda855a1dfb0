"""Groups of processes that may use only a share of a core, by the cpu controller of Linux control groups.

    <hierarchy>/penstock-<pid>-<number>/     cgroup.procs: the process
                                             cpu.cfs_quota_us of cpu.cfs_period_us (version 1), or cpu.max (version 2)

With a share each, many processes can be measured on few cores: what they wait for is their own share, and not a core
that the others and the load use too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from attrs import frozen

PERIOD_US = 10_000
"""The share is a time in each period. Shorter is smoother: a process is held up until the end of the period."""
_QUOTA_MIN_US = 1_000
"""The kernel takes no shorter time."""
_REMOVED_S = 2.0
"""A group may count a process for a moment after it has left."""
_numbers = count()


@frozen
class CpuGroups:
    """The hierarchy below which groups are made."""

    root: Path
    version: int

    @classmethod
    def find(cls, mounts: str | None = None) -> CpuGroups:
        """Return the hierarchy with a cpu controller. Raise SystemExit if there is none that may be written to.

        `mounts` is the text of /proc/mounts.
        """
        for line in (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines():
            _, folder, kind, options, *_ = line.split()
            root = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), folder))
            if kind == "cgroup" and "cpu" in options.split(","):
                return cls(root, 1)._checked()
            if kind == "cgroup2" and "cpu" in _words(root / "cgroup.controllers"):
                return cls(root, 2)._checked()
        raise SystemExit("a share of a core needs control groups of Linux with the cpu controller: none is mounted")

    @contextmanager
    def limited(self, pids: Sequence[int], share: float) -> Iterator[list[Path]]:
        """Let each process, with all its threads, use so much of a core, in a group of its own, until the block ends.

        Give the groups. They are removed in the end, and processes that live on go back to where they were. Raise
        SystemExit for a share that is out of range or a process that has ended.
        """
        quota_us = round(share * PERIOD_US)
        if quota_us < _QUOTA_MIN_US:
            raise SystemExit(f"a share of a core is at least {_QUOTA_MIN_US / PERIOD_US:g}, got {share:g}")
        with ExitStack() as groups:
            yield [groups.enter_context(self._group(pid, quota_us)) for pid in pids]

    @contextmanager
    def _group(self, pid: int, quota_us: int) -> Iterator[Path]:
        group = self.root / f"penstock-{os.getpid()}-{next(_numbers)}"
        before = self._group_of(pid)
        group.mkdir()
        try:
            if self.version == 1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            (group / "cgroup.procs").write_text(str(pid))
            yield group
        except ProcessLookupError as error:
            raise SystemExit(f"process {pid} has ended") from error
        finally:
            self._remove(group, before)

    def _group_of(self, pid: int) -> Path:
        """Return the group that a process is in."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            raise SystemExit(f"process {pid} has ended") from error
        for line in lines:
            number, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(",") if self.version == 1 else number == "0":
                found = self.root / path.lstrip("/")
                return found if found.is_dir() else self.root
        return self.root

    def _remove(self, group: Path, before: Path) -> None:
        """Remove a group; its processes go where they were."""
        ends_s = time.monotonic() + _REMOVED_S
        while True:
            for pid in _words(group / "cgroup.procs"):
                with suppress(OSError):  # it has ended
                    (before / "cgroup.procs").write_text(pid)
            try:
                group.rmdir()
                return
            except OSError:
                if time.monotonic() > ends_s:
                    raise
            time.sleep(0.01)

    def _checked(self) -> CpuGroups:
        """Return it if groups can be made below it; raise SystemExit otherwise."""
        probe = self.root / f"penstock-{os.getpid()}-{next(_numbers)}"
        try:
            if self.version == 2 and "cpu" not in _words(self.root / "cgroup.subtree_control"):
                (self.root / "cgroup.subtree_control").write_text("+cpu")
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise SystemExit(f"a share of a core needs the right to make groups in {self.root}: {error}") from error
        return self


def throttled_s(group: Path) -> float:
    """Return for how long the group's process has waited for its next share so far, in seconds of the clock."""
    stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(stat["throttled_time"]) / 1e9 if "throttled_time" in stat else int(stat["throttled_usec"]) / 1e6


def _words(file: Path) -> list[str]:
    """Return the words of a file; none if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []
