"""What routers tell each other: wire form, batches, and taking it in."""

from __future__ import annotations

from typing import Any

import pytest

from operators.kv.active_sequences import ActiveSequences, SequenceLoad
from operators.kv.active_sequences_events import (
    ActiveSequenceEvent,
    AddRequest,
    Free,
    MarkPrefillCompleted,
    SequenceEventData,
    apply_events,
    batches,
)
from operators.kv.worker_rank import WorkerRank
from pipeline import InvalidArgument
from pipeline.codec import from_json, from_msgpack, to_json, to_msgpack

WORKER, HERE, ELSEWHERE = WorkerRank(7, 1), 1, 2


def event(data: SequenceEventData, request_id: str = "r1", worker: WorkerRank = WORKER) -> ActiveSequenceEvent:
    return ActiveSequenceEvent(request_id, worker, data, ELSEWHERE)


def added(request_id: str = "r1", tokens: int = 4) -> ActiveSequenceEvent:
    return ActiveSequenceEvent.added(request_id, WORKER, SequenceLoad([1, 2], tokens), ELSEWHERE)


def test_a_booking_elsewhere_counts_here_until_it_is_freed() -> None:
    sequences = ActiveSequences()
    applied = apply_events(sequences, [added()], HERE, 0.0)
    loads = sequences.project([], [WORKER], 0.0)
    assert (applied.loads_changed, applied.dropped) == (True, 0)
    assert (loads.decode_blocks[0], loads.prefill_tokens[0], loads.requests[0]) == (2, 4, 1)
    apply_events(sequences, [event(MarkPrefillCompleted())], HERE, 1.0)
    assert sequences.project([], [WORKER], 1.0).prefill_tokens[0] == 0
    assert apply_events(sequences, [event(Free())], HERE, 2.0).loads_changed
    assert (len(sequences), sequences.ranks()) == (0, [])


def test_own_events_are_passed_over() -> None:
    """KV-097"""
    sequences = ActiveSequences()
    applied = apply_events(sequences, [added()], ELSEWHERE, 0.0)
    assert (len(sequences), applied.loads_changed, applied.capacity_changed) == (0, False, False)


def test_a_booking_on_an_unknown_worker_registers_it_unless_registration_is_required() -> None:
    """KV-097"""
    lazy, strict = ActiveSequences(), ActiveSequences()
    apply_events(lazy, [added()], HERE, 0.0)
    assert lazy.ranks() == [WORKER]
    assert apply_events(strict, [added()], HERE, 0.0, registered_only=True).dropped == 1
    assert strict.ranks() == []


def test_ends_are_resolved_by_our_own_table() -> None:
    sequences = ActiveSequences()
    apply_events(sequences, [added()], HERE, 0.0)
    apply_events(sequences, [event(Free(), worker=WorkerRank(99))], HERE, 0.0)
    assert len(sequences) == 0


def test_duplicates_are_dropped_and_ends_of_the_unknown_are_nothing() -> None:
    sequences = ActiveSequences()
    applied = apply_events(sequences, [added(), added(), event(Free(), "r9")], HERE, 0.0)
    assert (applied.dropped, len(sequences)) == (1, 1)


def test_marks_alone_wake_the_queue_and_publish_nothing() -> None:
    """KV-098"""
    sequences = ActiveSequences()
    apply_events(sequences, [added()], HERE, 0.0)
    applied = apply_events(sequences, [event(MarkPrefillCompleted())], HERE, 0.0)
    assert (applied.loads_changed, applied.capacity_changed) == (False, True)


def test_events_are_applied_in_batches_of_256() -> None:
    """KV-098"""
    events = [added(f"r{n}") for n in range(300)]
    assert [len(batch) for batch in batches(events)] == [256, 44]
    assert [one for batch in batches(events) for one in batch] == events


def test_a_modelled_prompt_begins_when_it_is_heard_of() -> None:
    sequences = ActiveSequences()
    told = ActiveSequenceEvent.added("r1", WORKER, SequenceLoad([], 100, 10.0), ELSEWHERE)
    apply_events(sequences, [told], HERE, 3.0)
    assert sequences.project([], [WORKER], 8.0).prefill_tokens[0] == 50


def test_an_untracked_prompt_counts_no_tokens() -> None:
    sequences = ActiveSequences()
    apply_events(sequences, [event(AddRequest([1], track_prefill_tokens=False, prefill_tokens=9))], HERE, 0.0)
    assert sequences.project([], [WORKER], 0.0).prefill_tokens[0] == 0


@pytest.mark.parametrize(
    "data",
    [
        AddRequest(),
        AddRequest([1, 2**64 - 1], True, 100, 12),
        AddRequest([], False, None, 12, 1.25),
        MarkPrefillCompleted(),
        Free(),
    ],
)
def test_events_travel_and_come_back_equal(data: SequenceEventData) -> None:
    told = ActiveSequenceEvent("r1", WORKER, data, 2**64 - 1, "adapter")
    assert from_json(to_json(told), ActiveSequenceEvent) == told
    assert from_msgpack(to_msgpack(told), ActiveSequenceEvent) == told


def test_the_wire_form_is_that_of_other_routers() -> None:
    told = ActiveSequenceEvent.added("r1", WORKER, SequenceLoad([1], 5, 1.5), 3)
    assert told.to_wire() == {
        "request_id": "r1",
        "worker": {"worker_id": 7, "dp_rank": 1},
        "data": {
            "AddRequest": {
                "token_sequence": [1],
                "track_prefill_tokens": True,
                "expected_output_tokens": None,
                "prefill_load_hint": {
                    "initial_effective_prefill_tokens": 5,
                    "expected_prefill_duration": {"secs": 1, "nanos": 500_000_000},
                },
            }
        },
        "router_id": 3,
        "lora_name": None,
    }
    assert event(Free()).to_wire()["data"] == "Free"


def test_absent_parts_have_their_defaults() -> None:
    told = ActiveSequenceEvent.from_wire(
        {"request_id": "r1", "worker": {"worker_id": 7}, "data": {"AddRequest": {}}, "router_id": 3, "more": 1}
    )
    assert told == ActiveSequenceEvent("r1", WorkerRank(7), AddRequest(), 3)


GOOD: dict[str, Any] = {"request_id": "r", "worker": {"worker_id": 1}, "data": "Free", "router_id": 1}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": 1}, "request_id"),
        ({"worker": None}, "worker"),
        ({"worker": {"worker_id": -1}}, "worker.worker_id"),
        ({"worker": {"worker_id": 1, "dp_rank": 2**32}}, "worker.dp_rank"),
        ({"router_id": True}, "router_id"),
        ({"lora_name": 3}, "lora_name"),
        ({"data": "Add"}, "data"),
        ({"data": {"AddRequest": {}, "Free": {}}}, "data"),
        ({"data": {"AddRequest": {"token_sequence": "ab"}}}, "data.AddRequest.token_sequence"),
        ({"data": {"AddRequest": {"token_sequence": [-1]}}}, "data.AddRequest.token_sequence"),
        ({"data": {"AddRequest": {"track_prefill_tokens": 1}}}, "data.AddRequest.track_prefill_tokens"),
        (
            {"data": {"AddRequest": {"prefill_load_hint": {}}}},
            "data.AddRequest.prefill_load_hint.initial_effective_prefill_tokens",
        ),
    ],
)
def test_what_is_no_event_is_refused_at_its_place(change: dict[str, Any], field: str) -> None:
    assert from_json(to_json(GOOD), ActiveSequenceEvent).data == Free()
    with pytest.raises(InvalidArgument) as refused:
        from_json(to_json(GOOD | change), ActiveSequenceEvent)
    assert refused.value.field == field
