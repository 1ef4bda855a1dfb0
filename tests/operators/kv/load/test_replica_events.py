"""What routers publish for each other: wire form, batches, and how it is applied."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.load import (
    BOOKED,
    COMPUTED,
    ENDED,
    ActiveRequest,
    ActiveSequenceEvent,
    ActiveSequences,
    AddRequest,
    Applied,
    Duration,
    Free,
    MarkPrefillCompleted,
    PrefillLoadHint,
    RouterSteps,
    SequenceEventData,
    SequenceLoad,
    apply_events,
)
from operators.kv.load.ranks import Slot
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument
from pipeline.wire import from_json, from_msgpack, from_plain, record_reader, to_json, to_msgpack, to_plain

WORKER, ELSEWHERE = WorkerRank(7, 1), 2


def event(data: SequenceEventData, request_id: str = "r1", worker: WorkerRank = WORKER) -> ActiveSequenceEvent:
    return ActiveSequenceEvent(request_id, worker, data, ELSEWHERE)


def added(request_id: str = "r1", tokens: int = 4) -> ActiveSequenceEvent:
    return ActiveSequenceEvent(request_id, WORKER, AddRequest.of(SequenceLoad([1, 2], tokens)), ELSEWHERE)


def take(
    sequences: ActiveSequences, *events: ActiveSequenceEvent, at_s: float = 0.0, registered_only: bool = False
) -> Applied:
    return apply_events(sequences, [(at_s, event) for event in events], registered_only=registered_only)


def test_a_booking_elsewhere_counts_here_until_it_is_freed() -> None:
    sequences = ActiveSequences()
    assert take(sequences, added()) == Applied(loads_changed=True, made_room=False, dropped=0)
    loads = sequences.project([], [WORKER], 0.0)
    assert (loads.decode_blocks[0], loads.prefill_tokens[0], loads.requests[0]) == (2, 4, 1)
    take(sequences, event(MarkPrefillCompleted()), at_s=1.0)
    assert sequences.project([], [WORKER], 1.0).prefill_tokens[0] == 0
    assert take(sequences, event(Free()), at_s=2.0) == Applied(loads_changed=True, made_room=True, dropped=0)
    assert (len(sequences), sequences.ranks()) == (0, [])


def test_a_booking_on_an_unknown_worker_registers_it_unless_registration_is_required() -> None:
    lazy, strict = ActiveSequences(), ActiveSequences()
    take(lazy, added())
    assert lazy.ranks() == [WORKER]
    assert take(strict, added(), registered_only=True) == Applied(False, False, dropped=1)
    assert strict.ranks() == []


def test_ends_are_resolved_by_our_own_table() -> None:
    sequences = ActiveSequences()
    take(sequences, added())
    take(sequences, event(Free(), worker=WorkerRank(99)))
    assert len(sequences) == 0


def test_the_same_id_of_two_routers_and_booked_here_is_three_bookings() -> None:
    sequences = ActiveSequences()
    own = sequences.book("r1", WORKER, SequenceLoad([9]), 0.0)
    take(sequences, added(), evolve(added(), router_id=3))
    assert len(sequences) == 3
    take(sequences, event(Free()))
    assert (len(sequences), sequences.is_live(own)) == (2, True)


def test_a_booking_published_again_replaces_the_one_before() -> None:
    sequences = ActiveSequences()
    take(sequences, added())
    assert take(sequences, added(tokens=9)) == Applied(loads_changed=True, made_room=True, dropped=0)
    assert sequences.project([], [WORKER], 0.0).prefill_tokens[0] == 9


def test_ends_of_the_unknown_are_nothing() -> None:
    nothing = Applied(loads_changed=False, made_room=False, dropped=0)
    assert take(ActiveSequences(), event(Free()), event(MarkPrefillCompleted())) == nothing


def test_marks_alone_wake_the_queue_and_publish_nothing() -> None:
    sequences = ActiveSequences()
    take(sequences, added())
    assert take(sequences, event(MarkPrefillCompleted())) == Applied(loads_changed=False, made_room=True, dropped=0)


def test_a_modelled_prompt_begins_when_its_event_is_received() -> None:
    sequences = ActiveSequences()
    booking = [
        ActiveSequenceEvent(name, WORKER, AddRequest.of(SequenceLoad([], 100, 10.0)), ELSEWHERE) for name in "ab"
    ]
    apply_events(sequences, [(3.0, booking[0]), (5.0, booking[1])])
    assert sequences.project([], [WORKER], 8.0).prefill_tokens[0] == 150
    take(sequences, event(MarkPrefillCompleted(), "a"), at_s=8.0)
    assert sequences.project([], [WORKER], 13.0).prefill_tokens[0] == 50


def test_an_untracked_prompt_counts_no_tokens() -> None:
    sequences = ActiveSequences()
    take(sequences, event(AddRequest([1], track_prefill_tokens=False, prefill_load_hint=PrefillLoadHint(9))))
    assert sequences.project([], [WORKER], 0.0).prefill_tokens[0] == 0


@pytest.mark.parametrize(
    "data",
    [
        AddRequest(),
        AddRequest([1, 2**64 - 1], True, 100, PrefillLoadHint(12)),
        AddRequest([], False, None, PrefillLoadHint(12, Duration.of(1.25))),
        MarkPrefillCompleted(),
        Free(),
    ],
)
def test_events_travel_and_come_back_equal(data: SequenceEventData) -> None:
    booking = ActiveSequenceEvent("r1", WORKER, data, 2**64 - 1, "adapter")
    assert from_json(to_json(booking), ActiveSequenceEvent) == booking
    assert from_msgpack(to_msgpack(booking), ActiveSequenceEvent) == booking


def test_the_wire_form_is_that_of_other_routers() -> None:
    booking = ActiveSequenceEvent("r1", WORKER, AddRequest.of(SequenceLoad([1], 5, 1.5)), 3)
    assert to_plain(booking) == {
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
    assert to_plain(event(Free()))["data"] == "Free"


def test_absent_parts_have_their_defaults() -> None:
    plain = {"request_id": "r1", "worker": {"worker_id": 7}, "data": {"AddRequest": {}}, "router_id": 3, "more": 1}
    booking = from_plain(plain, ActiveSequenceEvent)
    assert booking == ActiveSequenceEvent("r1", WorkerRank(7), AddRequest(), 3)


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
        ({"data": {"AddRequest": {"token_sequence": [-1]}}}, "data.AddRequest.token_sequence[0]"),
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


# -- steps that leave together

u64 = st.integers(0, 2**64 - 1)
loads = st.builds(SequenceLoad, st.lists(u64, max_size=4), u64, st.none() | st.floats(0, 1e6, allow_nan=False))
steps = st.lists(
    st.tuples(st.sampled_from([BOOKED, COMPUTED, ENDED]), st.text(), u64, st.integers(0, 2**32 - 1), loads), max_size=9
)


def booked_on(request_id: str, rank: WorkerRank) -> ActiveRequest:
    request = ActiveRequest(request_id)
    request.slot = Slot(rank, 1, lazy=False)
    return request


def data_of(kind: str, load: SequenceLoad) -> SequenceEventData:
    return AddRequest.of(load) if kind == BOOKED else MarkPrefillCompleted() if kind == COMPUTED else Free()


@given(steps)
def test_steps_that_leave_together_are_the_same_as_one_by_one(given: list[Any]) -> None:
    published = [
        (kind, booked_on(name, WorkerRank(worker_id, dp_rank)), load if kind == BOOKED else None)
        for kind, name, worker_id, dp_rank, load in given
    ]
    together = RouterSteps.of(ELSEWHERE, published)
    events = list(record_reader(RouterSteps)(to_msgpack(together)).events())
    assert [(event.request_id, event.data, event.router_id) for event in events] == [
        (name, data_of(kind, load), ELSEWHERE) for kind, name, _, _, load in given
    ]
    assert [event.worker for event in events if isinstance(event.data, AddRequest)] == [
        WorkerRank(worker_id, dp_rank) for kind, _, worker_id, dp_rank, _ in given if kind == BOOKED
    ]


STEPS = RouterSteps(ELSEWHERE, "bce", ["a", "a", "b"], [7], [1], [[1, 2]], [4], [None])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kinds": "bcx"}, "kinds"),
        ({"kinds": "bc"}, "request_ids"),
        ({"kinds": "bbe"}, ""),
        ({"request_ids": ["a", "a"]}, "request_ids"),
        ({"worker_ids": []}, ""),
        ({"dp_ranks": [1, 2]}, ""),
        ({"dp_ranks": [2**32]}, "dp_ranks[0]"),
        ({"hashes": []}, ""),
        ({"hashes": [[-1]]}, "hashes[0][0]"),
        ({"prefill_tokens": [None]}, "prefill_tokens[0]"),
        ({"prefill_durations_ns": []}, ""),
        ({"prefill_durations_ns": [0.5]}, "prefill_durations_ns[0]"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any], field: str) -> None:
    good = to_plain(STEPS)
    assert record_reader(RouterSteps)(to_msgpack(good)) == STEPS
    with pytest.raises(InvalidArgument) as refused:
        record_reader(RouterSteps)(to_msgpack(good | change))
    assert refused.value.field == field


def test_a_duration_of_centuries_is_the_longest_there_is() -> None:
    request = booked_on("a", WORKER)
    together = RouterSteps.of(ELSEWHERE, [(BOOKED, request, SequenceLoad([], 1, 1e300))])
    assert from_msgpack(to_msgpack(together), RouterSteps).prefill_durations_ns == [10**19]
