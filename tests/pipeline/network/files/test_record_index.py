"""What one process sees and does in the folder, step by step, while others write between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import define, field

from pipeline.network.discovery import Put
from pipeline.network.files import record_index
from pipeline.network.files.folder import S_NS, Folder
from pipeline.network.files.record_index import RecordIndex

TTL_NS = 10 * S_NS


@define
class Steps:
    """Processes that share a folder and one clock."""

    path: Path
    now_ns: int = 1_000_000 * S_NS
    indexes: dict[str, RecordIndex] = field(factory=dict)

    def process(self, name: str) -> RecordIndex:
        if name not in self.indexes:
            folder = Folder(self.path, lambda: self.now_ns)
            folder.make()
            self.indexes[name] = RecordIndex(folder, TTL_NS)
        return self.indexes[name]

    def watch(self, seconds: int) -> None:
        """Let the watcher look again and again, and remove nothing."""
        for _ in range(4 * seconds):
            self.now_ns += S_NS // 4
            self.process("watcher").look(self.now_ns)


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    made = Steps(tmp_path / "shared")
    made.process("watcher").look(made.now_ns)
    return made


def test_what_has_run_out_is_swept(steps: Steps) -> None:
    watcher = steps.process("watcher")
    steps.process("dead").create(Put("a/k", b"1", 1))
    steps.watch(12)
    watcher.sweep()
    assert not list((steps.path / "records").glob("[!.]*"))
    assert not list((steps.path / "leases").iterdir())


def test_a_record_that_another_process_has_taken_since_the_look_stays(steps: Steps) -> None:
    watcher, heir = steps.process("watcher"), steps.process("heir")
    steps.process("dead").create(Put("a/k", b"1", 1))
    steps.watch(12)
    assert heir.create(Put("a/k", b"2", 2)).outcome == "created"
    watcher.sweep()
    assert heir.get("a/k") == Put("a/k", b"2", 2)


def test_a_process_that_is_back_since_the_look_keeps_its_records(steps: Steps) -> None:
    watcher, late = steps.process("watcher"), steps.process("late")
    put = Put("a/k", b"1", 1)
    late.create(put)
    steps.watch(12)
    assert late.renew({"a/k": put}) == {}
    watcher.sweep()
    assert late.get("a/k") == put
    assert watcher.look(steps.now_ns + TTL_NS).alive == {"a/k": put}


def test_a_record_removed_while_its_process_stood_still_is_written_again(steps: Steps) -> None:
    """Also if the process that removed it was killed before it removed the lease."""
    late, put = steps.process("late"), Put("a/k", b"1", 1)
    late.create(put)
    steps.watch(12)
    for record in (steps.path / "records").glob("[!.]*"):
        record.unlink()
    assert late.renew({"a/k": put}) == {}
    assert late.get("a/k") == put


def test_a_process_that_ends_late_leaves_what_another_has_taken(steps: Steps) -> None:
    late, heir = steps.process("late"), steps.process("heir")
    late.create(Put("a/k", b"1", 1))
    steps.watch(12)
    heir.create(Put("a/k", b"2", 2))
    late.leave(["a/k"])
    assert heir.get("a/k") == Put("a/k", b"2", 2)


def test_a_change_that_no_date_shows_is_seen(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes at one moment, of one size, on a file system that uses an inode again."""
    monkeypatch.setattr(record_index, "_stamp", lambda stat: (0, stat.st_mtime_ns, stat.st_size))
    watcher, writer = steps.process("watcher"), steps.process("writer")
    writer.create(Put("a/k", b"1", 1))
    assert watcher.look(steps.now_ns).alive == {"a/k": Put("a/k", b"1", 1)}
    writer.replace(Put("a/k", b"2", 2), 1)
    steps.watch(1)
    assert watcher.view.alive == {"a/k": Put("a/k", b"2", 2)}


def test_a_clock_that_is_set_back_keeps_no_dead_process(steps: Steps) -> None:
    steps.process("dead").create(Put("a/k", b"1", 1))
    steps.watch(1)
    steps.now_ns -= 3600 * S_NS
    steps.watch(30)
    assert steps.process("watcher").view.alive == {}
