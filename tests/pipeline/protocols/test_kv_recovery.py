"""A router's request for missed KV events and a worker's answers, on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.protocols.kv import (
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvEvent,
    KvStored,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    StoredBlock,
    TooNew,
    recovery_endpoint,
)
from pipeline.wire import from_json, from_plain, to_json, to_plain

EVENTS = [
    RouterEvent(7, KvEvent(4, KvCleared(), 1)),
    RouterEvent(7, KvEvent(5, KvStored(None, [StoredBlock(1, 2)]), 1), "host_pinned"),
]
ANSWERS: list[tuple[str, RecoveryAnswer]] = [
    ("Events", RecoveredEvents(EVENTS)),
    ("Events", RecoveredEvents([])),
    ("TreeDump", RecoveredTree(EVENTS, 5)),
    ("TooNew", TooNew(9, None, 5)),
    ("TooNew", TooNew(9, 10, 5)),
    ("InvalidRange", InvalidRange(5, 4)),
    ("TreeDumpFailed", DumpFailed("busy")),
]


@pytest.mark.parametrize(("key", "answer"), ANSWERS)
def test_an_answer_crosses_under_the_one_key_of_its_kind(key: str, answer: RecoveryAnswer) -> None:
    reply = RecoveryReply.of(answer)
    assert list(to_plain(reply)) == [key]
    assert from_json(to_json(reply), RecoveryReply).answer == reply.answer == answer


@pytest.mark.parametrize(("key", "answer"), ANSWERS)
def test_the_publisher_that_answers_crosses_beside_the_answer(key: str, answer: RecoveryAnswer) -> None:
    reply = RecoveryReply.of(answer, 71)
    assert to_plain(reply).keys() == {key, "publisher_id"}
    read = from_json(to_json(reply), RecoveryReply)
    assert (read.answer, read.publisher_id) == (answer, 71)


def test_a_publisher_alone_is_no_reply() -> None:
    with pytest.raises(InvalidArgument):
        from_plain({"publisher_id": 71}, RecoveryReply)


@pytest.mark.parametrize("plain", [{}, {"Unknown": {}}, {"Events": {"events": []}, "InvalidRange": {"start_id": 1}}])
def test_a_reply_without_exactly_one_answer_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        from_plain(plain, RecoveryReply)


def test_a_reply_holds_exactly_one_answer() -> None:
    with pytest.raises(InvalidRecord):
        RecoveryReply(events=RecoveredEvents([]), dump_failed=DumpFailed("busy"))
    with pytest.raises(InvalidRecord):
        RecoveryReply()


def test_a_request_without_a_start_is_for_everything() -> None:
    assert from_plain({"worker_id": 7, "dp_rank": 3}, RecoveryRequest) == RecoveryRequest(3)
    for request in (RecoveryRequest(3), RecoveryRequest(3, 11, 12)):
        assert from_json(to_json(request), RecoveryRequest) == request


def test_each_rank_has_an_endpoint_of_its_own() -> None:
    assert recovery_endpoint(3) == "worker_kv_indexer_query_dp3"
