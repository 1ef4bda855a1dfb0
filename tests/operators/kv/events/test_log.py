"""What a worker keeps of a rank's events, and what it answers to a router that missed some."""

from __future__ import annotations

import pytest

from operators.kv import EventLog, KvIndex, WorkerRank
from operators.kv.events import EventCursor, Sight
from pipeline import InvalidArgument
from pipeline.protocols.kv import (
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvRemoved,
    KvStored,
    RecoveredEvents,
    RecoveredTree,
    RouterEvent,
    StoredBlock,
    TooNew,
)

RANK = WorkerRank(3, 1)


class CountedIndex(KvIndex):
    """Counts its dumps, and fails those that a test names."""

    dumps = 0
    fails = False

    def dump(self, rank: WorkerRank | None = None) -> list[RouterEvent]:
        self.dumps += 1
        if self.fails:
            raise OSError("gone")
        return super().dump(rank)


def root(block: int) -> KvStored:
    return KvStored(None, [StoredBlock(block, block)])


def log_of(count: int, *, kept: int = 5, first_id: int = 1) -> EventLog:
    log = EventLog(RANK, CountedIndex(), kept_events=kept, first_id=first_id)
    for block in range(1, count + 1):
        log.record(root(block))
    return log


def ids(answer: object) -> list[int]:
    assert isinstance(answer, RecoveredEvents)
    return [event.event.event_id for event in answer.events]


def test_ids_count_up_from_one_without_a_gap() -> None:
    log = EventLog(RANK)
    events = [log.record(root(1)), log.record(KvRemoved([77])), log.record(root(2), "disk"), log.record(KvCleared())]
    assert [event.event.event_id for event in events] == [1, 2, 3, 4]
    assert {(event.worker_id, event.event.dp_rank) for event in events} == {RANK}
    assert events[2].storage_tier == "disk"
    assert log.newest == 4


def test_a_question_is_answered_from_what_is_kept_or_by_the_whole_tree() -> None:
    log = log_of(10, first_id=5)
    assert ids(log.recover(11)) == [11, 12, 13, 14]
    tree = log.recover(7)
    assert isinstance(tree, RecoveredTree)
    assert tree.last_event_id == 14
    restored = KvIndex()
    for event in tree.events:
        restored.apply(event)
    assert [restored.find_matches([block]) for block in range(1, 11)] == [{RANK: 1}] * 10
    assert log.recover(15, 10) == InvalidRange(15, 10)
    assert log.recover(100, 200) == TooNew(100, 200, 14)


def test_without_a_start_or_an_event_the_answer_is_the_tree() -> None:
    assert EventLog(RANK).recover() == RecoveredTree([], 0)
    assert EventLog(RANK).recover(4) == RecoveredTree([], 0)
    assert isinstance(log_of(3).recover(), RecoveredTree)
    assert ids(log_of(3).recover(1)) == [1, 2, 3]


def test_the_answer_reaches_beyond_the_requested_end() -> None:
    assert ids(log_of(5).recover(2, 3)) == [2, 3, 4, 5]
    assert log_of(5).recover(6, 6) == TooNew(6, 6, 5)


def test_an_answer_begins_at_the_last_clear() -> None:
    log = log_of(2, kept=20)
    log.record(KvCleared())
    log.record(root(8))
    log.record(KvCleared())
    log.record(root(9))
    assert ids(log.recover(1)) == [5, 6]
    assert ids(log.recover(6)) == [6]


def test_one_walk_serves_several_questions() -> None:
    """Also while a few events have come since, which are then added."""
    log = log_of(10, kept=6)
    index = log.index
    assert isinstance(index, CountedIndex)
    assert log.recover() == log.recover(1)
    last = [log.record(root(20)), log.record(KvRemoved([1])), log.record(root(21))]
    answer = log.recover()
    assert isinstance(answer, RecoveredTree)
    assert (answer.events[-3:], answer.last_event_id, index.dumps) == (last, 13, 1)
    log.record(root(22))
    log.recover()
    assert index.dumps == 2


def test_a_clear_makes_the_dump_void() -> None:
    log = log_of(3)
    log.recover()
    log.record(KvCleared())
    assert log.recover() == RecoveredTree([], 4)


def test_a_failed_dump_is_reported_and_not_kept() -> None:
    log = log_of(3)
    index = log.index
    assert isinstance(index, CountedIndex)
    index.fails = True
    assert log.recover() == DumpFailed("gone")
    index.fails = False
    assert isinstance(log.recover(), RecoveredTree)


def test_ranks_may_share_an_index_and_answer_for_themselves() -> None:
    index = KvIndex()
    logs = [EventLog(WorkerRank(1, rank), index) for rank in range(2)]
    for log in logs:
        log.record(root(1))
    answer = logs[1].recover()
    assert isinstance(answer, RecoveredTree)
    assert [event.event.dp_rank for event in answer.events] == [1]


def test_at_least_one_event_is_kept() -> None:
    with pytest.raises(InvalidArgument):
        EventLog(RANK, kept_events=0)


def test_a_cursor_distinguishes_new_old_and_lost() -> None:
    assert EventCursor().sight(7) is Sight.INITIAL
    assert EventCursor().expected is None
    cursor = EventCursor(7)
    assert [cursor.sight(event_id) for event_id in (6, 7, 8, 10)] == [
        Sight.STALE,
        Sight.STALE,
        Sight.CONTIGUOUS,
        Sight.GAP,
    ]
    assert cursor.expected == 8
