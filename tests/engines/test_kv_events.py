"""KV events of one rank on their way to the routers."""

from __future__ import annotations

from engines import KvEventPublisher, PushSource
from pipeline.protocols.kv import KvCleared, RouterEvent


def test_changes_are_numbered_from_one_without_a_gap_for_worker_and_rank() -> None:
    sent: list[RouterEvent] = []
    publisher = KvEventPublisher(7, 2, sent.append)
    for _ in range(3):
        publisher.publish(KvCleared())
    assert [event.event.event_id for event in sent] == [1, 2, 3]
    assert {(event.worker_id, event.event.dp_rank) for event in sent} == {(7, 2)}
    assert publisher.last_event_id == 3


def test_each_rank_counts_by_itself() -> None:
    sent: list[RouterEvent] = []
    for publisher in [KvEventPublisher(7, rank, sent.append) for rank in (0, 1)]:
        publisher.publish(KvCleared())
    assert [(event.event.dp_rank, event.event.event_id) for event in sent] == [(0, 1), (1, 1)]


def test_a_source_belongs_to_the_first_rank_by_default() -> None:
    assert PushSource(print).dp_rank == 0
    assert PushSource(print, 3).dp_rank == 3
