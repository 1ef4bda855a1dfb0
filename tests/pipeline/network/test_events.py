"""Publishing, listening, numbering; events as bytes."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context, PenstockError
from pipeline.errors import InvalidMessage
from pipeline.network import EndpointId, Event, Missed, Scope
from pipeline.network.events import (
    EventIdentity,
    Sequences,
    decode_event,
    decode_frame,
    decode_identity,
    encode_event,
    encode_frame,
)
from pipeline.network.inprocess import InProcessEventPlane
from pipeline.rx import from_observable

HERE = Scope("ns", "comp", "ep")


def plane() -> InProcessEventPlane:
    return InProcessEventPlane(lambda: 1234, Random(7))


def record(events: InProcessEventPlane, scope: Scope = HERE, topic: str = "load") -> list[Any]:
    received: list[Any] = []
    events.subscribe(scope, topic, object).subscribe(received.append, on_completed=lambda: received.append("completed"))
    return received


def test_events_are_numbered_from_zero_and_dated() -> None:
    events = plane()
    received, publisher = record(events), events.publisher(HERE, "load")
    publisher.publish("a")
    publisher.publish("b")
    assert received == [Event(publisher.publisher_id, n, 1234, "load", item) for n, item in enumerate("ab")]


def test_two_publishers_have_different_ids() -> None:
    events = plane()
    received, publishers = record(events), [events.publisher(HERE, "load") for _ in range(2)]
    for publisher in publishers:
        publisher.publish("x")
    assert [(e.publisher_id, e.sequence) for e in received] == [(p.publisher_id, 0) for p in publishers]
    assert len({p.publisher_id for p in publishers}) == 2
    assert all(0 < p.publisher_id < 2**53 for p in publishers)


@pytest.mark.parametrize(
    ("scope", "topic"),
    [
        (Scope("ns", "comp"), "load"),
        (Scope("ns"), "load"),
        (Scope("ns", "comp", "ep2"), "load"),
        (HERE, "kv"),
    ],
)
def test_a_subscriber_receives_exactly_its_scope_and_topic(scope: Scope, topic: str) -> None:
    events = plane()
    received = record(events, scope, topic)
    events.publisher(Scope.of(EndpointId("ns", "comp", "ep")), "load").publish("x")
    assert received == []
    events.publisher(scope, topic).publish("mine")
    assert len(received) == 1


def test_a_disposed_subscriber_receives_nothing_and_is_released() -> None:
    events = plane()
    received: list[Any] = []
    listening = events.subscribe(HERE, "load", object).subscribe(received.append)
    other = record(events)
    publisher = events.publisher(HERE, "load")
    listening.dispose()
    publisher.publish("x")
    assert received == []
    assert len(other) == 1
    assert events.subscriptions == 1


async def test_closing_completes_listeners() -> None:
    events = plane()
    received, publisher = record(events), events.publisher(HERE, "load")
    await events.close()
    publisher.publish("x")
    assert received == ["completed"] == record(events)
    assert events.subscriptions == 0


async def test_a_cancelled_reader_of_events_is_released() -> None:
    """Read as a stream."""
    events, context = plane(), Context(None)
    async with from_observable(events.subscribe(HERE, "load", str), context, buffer_items=8) as stream:
        events.publisher(HERE, "load").publish("x")
        assert (await stream.__anext__()).payload == "x"
        context.kill()
        assert [event async for event in stream] == []
    assert events.subscriptions == 0


async def test_another_threads_events_arrive_in_their_order() -> None:
    events = plane()
    received, publisher = record(events), events.publisher(HERE, "load")

    def publish() -> None:
        for number in range(100):
            publisher.publish(number)

    await anyio.to_thread.run_sync(publish)
    await anyio.sleep(0.1)
    assert [(event.sequence, event.payload) for event in received] == [(n, n) for n in range(100)]


# -- loss


def test_numbers_show_loss_and_repetition_for_each_publisher() -> None:
    sequences = Sequences()
    seen = [sequences.take(publisher_id, number) for publisher_id, number in [(1, 0), (2, 1), (1, 1), (1, 4), (2, 2)]]
    assert seen == ["next", "gap", "next", "gap", "next"]
    assert [sequences.take(1, number) for number in (0, 4, 3, 5)] == ["repeated", "repeated", "repeated", "next"]


def test_a_number_to_go_on_with_shows_loss_without_an_event() -> None:
    sequences = Sequences()
    assert [sequences.skip_to(1, number) for number in (0, 0, 2, 2)] == [False, False, True, False]
    assert sequences.take(1, 2) == "next"
    assert not sequences.skip_to(1, 3)
    sequences.forget(1)
    assert sequences.skip_to(1, 3)


def test_the_numbers_of_bounded_many_publishers_are_known() -> None:
    sequences = Sequences(limit=2)
    assert [sequences.take(publisher_id, 0) for publisher_id in (1, 2, 1, 3)] == ["next", "next", "repeated", "next"]
    assert [sequences.take(publisher_id, 1) for publisher_id in (3, 2, 1)] == ["next", "next", "gap"]


@given(st.lists(st.integers(0, 30)))
def test_numbers_that_are_taken_go_up(numbers: list[int]) -> None:
    sequences = Sequences()
    taken = [number for number in numbers if sequences.take(1, number) != "repeated"]
    assert taken == sorted(set(taken))


async def test_a_plane_that_loses_nothing_reports_nothing() -> None:
    events = plane()
    received, reported = record(events), list[Missed]()
    with events.missed(HERE, "load").subscribe(reported.append):
        publisher = events.publisher(HERE, "load")
        publisher.publish("a")
    assert (len(received), reported) == (1, [])


# -- bytes


def test_an_empty_frame_is_its_header() -> None:
    assert encode_frame(b"") == b"\x01\0\0\0\0"
    assert decode_frame(encode_frame(b"")) == b""


@given(st.binary(max_size=50))
def test_a_frame_gives_its_payload_back_and_is_never_half_read(payload: bytes) -> None:
    frame = encode_frame(payload)
    assert decode_frame(frame) == payload
    for length in range(len(frame)):
        with pytest.raises(PenstockError, match="incomplete"):
            decode_frame(frame[:length])


def test_a_frame_of_another_version_is_refused() -> None:
    with pytest.raises(PenstockError, match="unsupported version 2"):
        decode_frame(b"\x02\0\0\0\0")


@given(st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1), st.text(), st.binary())
def test_an_envelope_gives_its_event_back(publisher_id: int, sequence: int, topic: str, payload: bytes) -> None:
    """And its identity alone."""
    sent = Event(publisher_id, sequence, 5, topic, payload)
    assert decode_event(encode_event(sent)) == sent
    assert decode_identity(encode_event(sent)) == EventIdentity(publisher_id, sequence)


@pytest.mark.parametrize("data", [b"\xc1", b"", b"\x01", encode_event(Event(1, 0, 0, "t", "text"))])  # type: ignore[arg-type]
def test_a_malformed_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_event(data)


@pytest.mark.parametrize("data", [b"\xc1", b"", b"\x01", b"\x80"])
def test_a_malformed_envelope_has_no_identity(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_identity(data)


def test_a_subscriber_may_leave_out_the_events_of_one_publisher() -> None:
    events, received = plane(), list[Any]()
    mine, other = (events.publisher(HERE, "load") for _ in range(2))
    events.subscribe(HERE, "load", object, but=mine).subscribe(received.append)
    for publisher in (mine, other):
        publisher.publish_soon(lambda: "x")
    assert [(event.publisher_id, event.sequence, event.payload) for event in received] == [(other.publisher_id, 0, "x")]
