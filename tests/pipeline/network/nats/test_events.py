"""Events between processes over NATS: delivered, numbered, bounded, and what becomes of them in an outage."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import anyio.to_thread
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Context, InvalidArgument
from pipeline.errors import CodecError
from pipeline.network import Event, Missed, Scope
from pipeline.network.events import encode_event, encode_frame
from pipeline.network.nats import NatsEventPlane, event_outbox, events
from pipeline.network.nats.subjects import event_subject
from pipeline.protocols.field_rules import U64
from pipeline.rx import from_observable
from pipeline.wire import to_msgpack
from tests.pipeline.network.nats.worlds import NatsWorld, own_server
from tests.pipeline.network.worlds import eventually

TOPIC = "load"


@frozen
class Load:
    """What the tests publish."""

    blocks: U64
    note: str = ""


@pytest.fixture
def here(world: NatsWorld) -> Scope:
    """A scope of this test alone: the server is that of all."""
    return Scope(world.bucket, "comp")


def record(plane: NatsEventPlane, scope: Scope, topic: str = TOPIC, kind: type[Any] = Load) -> list[Any]:
    """Subscribe; return the list of events and of reports of loss, which grows with them."""
    received: list[Any] = []
    plane.missed(scope, topic).subscribe(received.append)
    plane.subscribe(scope, topic, kind).subscribe(received.append, on_completed=lambda: received.append("end"))
    return received


def blocks(received: list[Any]) -> list[int]:
    """The payloads of the events among what was received."""
    return [event.payload.blocks for event in received if isinstance(event, Event)]


async def settled(*planes: NatsEventPlane) -> None:
    """Wait until the servers have taken what was subscribed to and published."""
    for plane in planes:
        await plane._outbox.emptied()
        await plane._connection.session_now().round_trip()


async def test_events_come_to_other_processes_and_to_the_own_one_in_order(world: NatsWorld, here: Scope) -> None:
    async with world.events() as own, world.events() as other:
        received = [record(own, here), record(other, here)]
        await settled(other)
        publisher = own.publisher(here, TOPIC)
        for number in range(500):
            publisher.publish(Load(number))
        await eventually(lambda: all(len(one) == 500 for one in received))
        assert received[0] == received[1]
        assert received[0] == [Event(publisher.publisher_id, n, 1234, TOPIC, Load(n)) for n in range(500)]


async def test_a_subscriber_may_leave_out_its_own_events(world: NatsWorld, here: Scope) -> None:
    async with world.events() as own:
        mine, other = (own.publisher(here, TOPIC) for _ in range(2))
        received: list[Any] = []
        own.subscribe(here, TOPIC, Load, but=mine).subscribe(received.append)
        await settled(own)
        for publisher in (mine, other):
            publisher.publish_soon(lambda: Load(1))
        await eventually(lambda: len(received) == 1)
        assert received == [Event(other.publisher_id, 0, 1234, TOPIC, Load(1))]


async def test_a_subscription_in_the_same_process_misses_nothing_published_after_it(
    world: NatsWorld, here: Scope
) -> None:
    async with world.events() as plane:
        publisher = plane.publisher(here, TOPIC)
        publisher.publish(Load(0))
        received = record(plane, here)
        publisher.publish(Load(1))
        await eventually(lambda: blocks(received) == [1])
        assert received[0] == Missed(publisher.publisher_id)


@pytest.mark.parametrize("other", [Scope("ns"), Scope("ns", "comp", "ep"), Scope("ns", "comp2"), Scope("ns2", "comp")])
async def test_a_subscriber_receives_exactly_its_scope_and_topic(world: NatsWorld, other: Scope) -> None:
    async with world.events() as plane:
        received = record(plane, Scope("ns", "comp"))
        for scope, topic in ((other, TOPIC), (Scope("ns", "comp"), "kv"), (Scope("ns", "comp"), "*")):
            plane.publisher(scope, topic).publish(Load(1))
        mine = plane.publisher(Scope("ns", "comp"), TOPIC)
        mine.publish(Load(2))
        await eventually(lambda: len(received) == 1)
        assert received[0].publisher_id == mine.publisher_id


async def test_subscribers_of_several_types_share_a_subject(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        loads, plain = record(plane, here), record(plane, here, kind=dict)
        wrong = record(plane, here, kind=int)
        plane.publisher(here, TOPIC).publish(Load(7))
        await eventually(lambda: len(loads) == len(plain) == 1)
        assert plain[0].payload == {"blocks": 7, "note": ""}
        assert wrong == []
        assert plane.subscriptions == 6


async def test_a_disposed_subscriber_is_released_and_so_is_the_servers_interest(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        received: list[Any] = []
        publisher = plane.publisher(here, TOPIC)
        for _ in range(3):
            listening = plane.subscribe(here, TOPIC, Load).subscribe(received.append)
            publisher.publish(Load(1))
            await eventually(lambda: bool(received))
            listening.dispose()
            assert plane.subscriptions == 0
            received.clear()
            publisher.publish(Load(2))
            await settled(plane)
            assert received == []
            client = plane._connection.session_now()._client
            assert event_subject(here, TOPIC) not in {one.subject for one in client._subs.values()}


async def test_closing_completes_subscribers_and_sends_what_waits(world: NatsWorld, here: Scope) -> None:
    async with world.events() as other:
        received = record(other, here)
        await settled(other)
        async with world.events() as plane:
            own, publisher = record(plane, here), plane.publisher(here, TOPIC)
            for number in range(100):
                publisher.publish(Load(number))
        publisher.publish(Load(100))
        assert own[-1] == "end"
        assert record(plane, here) == ["end"]
        await eventually(lambda: blocks(received) == list(range(100)))


async def test_other_threads_publish_in_the_order_of_their_numbers(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        received, publisher = record(plane, here), plane.publisher(here, TOPIC)

        def publish() -> None:
            for number in range(200):
                publisher.publish(Load(number))

        threads = [Thread(target=publish) for _ in range(4)]
        for thread in threads:
            thread.start()
        await eventually(lambda: len(received) == 800)
        assert [event.sequence for event in received] == list(range(800))
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)


async def test_a_payload_that_has_no_wire_form_is_the_publishers_error_and_takes_no_number(
    world: NatsWorld, here: Scope
) -> None:
    async with world.events() as plane:
        received, publisher = record(plane, here), plane.publisher(here, TOPIC)
        with pytest.raises((CodecError, InvalidArgument)):
            publisher.publish(object())
        publisher.publish(Load(1))
        await eventually(lambda: [event.sequence for event in received] == [0])


async def test_an_event_that_the_server_does_not_take_leaves_a_gap(
    world: NatsWorld, here: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.events() as plane:
        received, publisher = record(plane, here), plane.publisher(here, TOPIC)
        for note in ("", "x" * 2 * 1024 * 1024, ""):
            publisher.publish(Load(1, note))
        await eventually(lambda: len(received) == 3)
        assert received[1] == Missed(publisher.publisher_id)
        assert [received[0].sequence, received[2].sequence] == [0, 2]
        assert plane.dropped == 1
        assert "dropping an event of 2097" in caplog.text
        assert plane._connection.sessions == 1


GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=60).map(encode_frame),
    st.builds(
        lambda number, payload, topic: encode_frame(encode_event(Event(1, number, 0, topic, payload))),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=20),
        st.text(max_size=5),
    ),
)


@settings(max_examples=15)
@given(st.lists(GARBAGE, min_size=1, max_size=20))
async def test_what_others_send_on_a_subject_never_ends_a_subscription(
    world: NatsWorld, here: Scope, caplog: pytest.LogCaptureFixture, garbage: list[bytes]
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with world.events() as plane, world.events() as other:
        received, publisher = record(plane, here), other.publisher(here, TOPIC)
        await settled(plane)
        async with other._connection.calling() as session:
            for data in garbage:
                await session.publish(event_subject(here, TOPIC), data)
        publisher.publish(Load(5))
        await eventually(
            lambda: any(isinstance(e, Event) and e.publisher_id == publisher.publisher_id for e in received)
        )
        assert "end" not in received


async def test_garbage_is_logged_at_a_bounded_rate(
    world: NatsWorld, here: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.events() as plane:
        record(plane, here)
        await settled(plane)
        async with plane._connection.calling() as session:
            for _ in range(1000):
                await session.publish(event_subject(here, TOPIC), b"garbage")
        publisher = plane.publisher(here, TOPIC)
        received = record(plane, here)
        publisher.publish(Load(1))
        await eventually(lambda: len(blocks(received)) == 1)
        assert caplog.text.count("passing over what is no event") == 1


async def test_an_event_that_comes_again_is_not_delivered_again(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        received = record(plane, here)
        await settled(plane)
        frames = [encode_frame(encode_event(Event(9, n, 0, TOPIC, to_msgpack(Load(n))))) for n in range(3)]
        async with plane._connection.calling() as session:
            for frame in (frames[0], frames[0], frames[2], frames[1]):
                await session.publish(event_subject(here, TOPIC), frame)
        await eventually(lambda: len(received) >= 3)
        await settled(plane)
        assert blocks(received) == [0, 2]
        assert received[1] == Missed(9)


# -- outages


async def test_what_is_published_without_a_server_waits_and_the_reconnect_is_reported(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.events() as plane:
            received, publisher = record(plane, Scope("ns")), plane.publisher(Scope("ns"), TOPIC)
            publisher.publish(Load(0))
            await eventually(lambda: blocks(received) == [0])
            await server.kill()
            await eventually(lambda: not plane._connection.is_connected)
            for number in range(1, 4):
                publisher.publish(Load(number))
            late = record(plane, Scope("ns"), "other")
            await server.start()
            await eventually(lambda: blocks(received) == [0, 1, 2, 3])
            assert [one for one in received if isinstance(one, Missed)] == [Missed()]
            plane.publisher(Scope("ns"), "other").publish(Load(9))
            await eventually(lambda: blocks(late) == [9])


async def test_more_than_the_buffer_holds_is_dropped_and_shows_as_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_outbox, "BUFFER_EVENTS", 10)
    async with own_server(tmp_path) as server:
        world = NatsWorld(server.url, tmp_path)
        async with world.events() as plane:
            received, publisher = record(plane, Scope("ns")), plane.publisher(Scope("ns"), TOPIC)
            await settled(plane)
            await server.kill()
            await eventually(lambda: not plane._connection.is_connected)
            for number in range(25):
                publisher.publish(Load(number))
            assert plane.dropped == 15
            await server.start()
            await eventually(lambda: blocks(received) == list(range(10)))
            publisher.publish(Load(25))
            await eventually(lambda: blocks(received) == [*range(10), 25])
            assert received[-2] == Missed(publisher.publisher_id)
            assert received[-1].sequence == 25


async def test_the_buffer_is_bounded_in_bytes(world: NatsWorld, here: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_outbox, "BUFFER_BYTES", 10_000)
    async with world.events() as plane:
        publisher = plane.publisher(here, TOPIC)
        for _ in range(100):
            publisher.publish(Load(1, "x" * 1000))
        assert plane.dropped > 80
        await settled(plane)
        publisher.publish(Load(1, "x" * 1000))
        assert plane.dropped < 100


async def test_a_subscriber_that_is_too_slow_loses_events_knows_it_and_holds_up_no_other(
    world: NatsWorld, here: Scope, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slow is a process that does not come to take what has arrived."""
    monkeypatch.setattr(events, "_WAITING_EVENTS", 20)
    monkeypatch.setattr(events, "_SLOW_REPORT_S", 0.1)
    async with world.events() as plane, world.events() as other:
        slow, quick = record(plane, here), list[Any]()
        other.subscribe(here, TOPIC, Load).subscribe(quick.append)
        await settled(plane, other)
        async with plane._connection.calling() as session:
            frames = [encode_frame(encode_event(Event(9, n, 0, TOPIC, to_msgpack(Load(n))))) for n in range(200)]
            for frame in frames:  # in one piece, so that all of it arrives in one turn of the loop
                await session.publish(event_subject(here, TOPIC), frame)
        await eventually(lambda: bool(slow) and slow[-1] == Missed())
        assert 20 <= len(blocks(slow)) < 200
        assert plane._connection.slow_drops == 200 - len(blocks(slow))
        assert caplog.text.count("this process reads too slowly") <= 2


async def test_a_reader_of_events_as_a_stream_is_released_when_it_is_killed(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        context = Context(None)
        async with from_observable(plane.subscribe(here, TOPIC, Load), context, buffer_items=8) as stream:
            plane.publisher(here, TOPIC).publish(Load(1))
            assert (await stream.__anext__()).payload == Load(1)
            context.kill()
            assert [event async for event in stream] == []
        assert plane.subscriptions == 0


async def test_the_failure_of_one_subscriber_is_its_own(
    world: NatsWorld, here: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.events() as plane:

        def fail(_: Event[Load]) -> None:
            raise LookupError("broken")

        plane.subscribe(here, TOPIC, Load).subscribe(fail)
        received, publisher = record(plane, here), plane.publisher(here, TOPIC)
        publisher.publish(Load(1))
        publisher.publish(Load(2))
        await eventually(lambda: blocks(received) == [1, 2])
        assert "a listener failed" in caplog.text


async def test_a_topic_that_is_too_long_for_a_subject_is_refused(world: NatsWorld, here: Scope) -> None:
    async with world.events() as plane:
        for use in (plane.publisher, plane.missed, lambda s, t: plane.subscribe(s, t, Load)):
            with pytest.raises(InvalidArgument):
                use(here, "t" * 2000)
