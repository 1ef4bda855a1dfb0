"""Events between processes without a broker: delivered, numbered, repaired after faults, bounded."""

from __future__ import annotations

import gc
import logging
from itertools import pairwise
from threading import Thread
from typing import Any

import anyio
import anyio.to_thread
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context, InvalidArgument, StreamClosed
from pipeline.errors import CodecError
from pipeline.network import Event, Missed, Scope
from pipeline.network.direct_events import DirectEventLimits, DirectEventPlane
from pipeline.network.direct_events.channels import (
    EVENT_CHANNELS,
    ChannelRecord,
    ChannelRequest,
    EventBatch,
    EventRun,
    PublisherState,
    channel_key,
    channel_prefix,
)
from pipeline.network.discovery import Written
from pipeline.network.names import Instance, matches_prefix
from pipeline.protocols.field_rules import U64
from pipeline.wire import from_msgpack, to_json, to_msgpack
from tests.pipeline.network.direct_events.worlds import LEASE_TTL_S, Deployment, Process, deployment, processes

HERE = Scope("ns", "comp")
TOPIC = "load"


@frozen
class Load:
    """What the tests publish."""

    blocks: U64


def record(process: Process, scope: Scope = HERE, topic: str = TOPIC, kind: type[Any] = Load) -> list[Any]:
    """Subscribe; return the list of events and of reports of loss, which grows with them."""
    received: list[Any] = []
    process.events.missed(scope, topic).subscribe(received.append)
    process.events.subscribe(scope, topic, kind).subscribe(received.append, on_completed=lambda: received.append("end"))
    return received


def blocks(received: list[Any]) -> list[int]:
    """The payloads of the events among what was received."""
    return [event.payload.blocks for event in received if isinstance(event, Event)]


def losses(received: list[Any]) -> list[int | None]:
    """The publishers of which a loss was reported."""
    return [one.publisher_id for one in received if isinstance(one, Missed)]


async def channels(made: Deployment) -> list[str]:
    """The keys of all publishers in the store."""
    return list(await made.store.entries(EVENT_CHANNELS))


# -- delivery


async def test_events_come_to_other_processes_and_to_the_own_one_in_order() -> None:
    async with processes(3) as (_, (here, there, elsewhere)):
        publisher = here.events.publisher(HERE, TOPIC)
        received = [record(process) for process in (here, there, elsewhere)]
        await anyio.sleep(1)
        for number in range(200):
            publisher.publish(Load(number))
        await anyio.sleep(1)
        assert [blocks(one) for one in received] == [list(range(200))] * 3
        assert [losses(one) for one in received] == [[]] * 3
        first = received[1][0]
        assert (first.publisher_id, first.sequence, first.topic) == (publisher.publisher_id, 0, TOPIC)


async def test_a_payload_stays_the_same_object_here_and_is_read_by_its_type_elsewhere() -> None:
    async with processes(2) as (_, (here, there)):
        received, remote = record(here), record(there)
        publisher, load = here.events.publisher(HERE, TOPIC), Load(2**64 - 1)
        await anyio.sleep(1)
        publisher.publish(load)
        assert received[0].payload is load, "without a wait"
        await anyio.sleep(1)
        assert remote[0].payload == load


@pytest.mark.parametrize(
    ("scope", "topic"),
    [
        (Scope("ns"), TOPIC),
        (Scope("ns", "comp", "ep"), TOPIC),
        (HERE, "loads"),
        (Scope("ns", "co.mp"), TOPIC),
        (Scope("ns", "comp", "a/b%"), "x/y"),
    ],
)
async def test_a_subscriber_receives_exactly_its_scope_and_topic(scope: Scope, topic: str) -> None:
    async with processes(2) as (_, (here, there)):
        received = record(there, scope, topic)
        other, publisher = here.events.publisher(HERE, TOPIC), here.events.publisher(scope, topic)
        await anyio.sleep(1)
        other.publish(Load(1))
        publisher.publish(Load(2))
        await anyio.sleep(1)
        assert blocks(received) == [2]


async def test_publishers_of_one_process_share_a_stream_and_have_their_own_numbers() -> None:
    async with processes(2) as (made, (here, there)):
        received = record(there)
        publishers = [here.events.publisher(HERE, TOPIC) for _ in range(3)]
        await anyio.sleep(1)
        for publisher in publishers * 2:
            publisher.publish(Load(1))
        await anyio.sleep(1)
        assert there.events.incoming.streams == 1 == here.events.outgoing.readers
        assert len(await channels(made)) == 3
        assert [(event.publisher_id, event.sequence) for event in received] == [
            (publisher.publisher_id, number) for number in range(2) for publisher in publishers
        ]


async def test_a_publisher_that_is_made_later_in_a_known_process_is_heard_from_its_first_event_on() -> None:
    async with processes(2) as (_, (here, there)):
        received, first = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        later = here.events.publisher(HERE, TOPIC)
        later.publish(Load(1))
        await anyio.sleep(1)
        assert (blocks(received), losses(received)) == ([1], [])
        assert later.publisher_id != first.publisher_id


async def test_subscribers_of_one_process_share_a_stream_and_each_has_its_type() -> None:
    async with processes(2) as (_, (here, there)):
        typed, plain = record(there), record(there, kind=dict)
        publisher = here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(5))
        await anyio.sleep(1)
        with there.events.subscribe(HERE, TOPIC, list).subscribe(lambda _: None):
            assert len(there.events.incoming._followed[HERE, TOPIC]._fanouts) == 3
        assert len(there.events.incoming._followed[HERE, TOPIC]._fanouts) == 2
        assert (typed[0].payload, plain[0].payload) == (Load(5), {"blocks": 5})
        assert there.events.incoming.streams == 1


async def test_a_stream_is_there_as_long_as_there_is_a_subscriber() -> None:
    async with processes(2) as (_, (here, there)):
        publisher = here.events.publisher(HERE, TOPIC)
        received: list[Any] = []
        listening = [there.events.subscribe(HERE, TOPIC, Load).subscribe(received.append) for _ in range(2)]
        losing = there.events.missed(HERE, TOPIC).subscribe(received.append)
        await anyio.sleep(1)
        listening[0].dispose()
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert (len(received), here.events.outgoing.readers) == (1, 1)
        listening[1].dispose()
        losing.dispose()
        await anyio.sleep(1)
        assert there.events.incoming._missed == {}
        assert (here.events.outgoing.readers, there.events.incoming.streams) == (0, 0)
        assert there.events.incoming.subscriptions == 0


async def test_threads_publish_and_all_arrives_in_the_order_of_the_numbers() -> None:
    async with processes(2) as (_, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)

        def publish() -> None:
            for number in range(100):
                publisher.publish(Load(number))

        for _ in range(2):
            await anyio.to_thread.run_sync(publish)
        await anyio.sleep(1)
        assert blocks(received) == list(range(100)) * 2
        assert [event.sequence for event in received] == list(range(200))


async def test_threads_faster_than_the_loop_lose_the_oldest_events_and_the_numbers_show_it() -> None:
    async with processes(1, limits=DirectEventLimits(events=10)) as (_, (here,)):
        received, publisher = record(here), here.events.publisher(HERE, TOPIC)

        def publish() -> None:
            for number in range(100):
                publisher.publish(Load(number))

        thread = Thread(target=publish)
        thread.start()
        thread.join()  # the loop does nothing meanwhile
        await anyio.sleep(1)
        assert blocks(received) == list(range(90, 100))
        assert [event.sequence for event in received[1:]] == list(range(90, 100))
        assert received[0] == Missed(publisher.publisher_id)


async def test_a_payload_without_a_wire_form_is_refused_and_shows_as_a_gap() -> None:
    async with processes(2) as (_, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        with pytest.raises(CodecError):
            publisher.publish(Load(2**64))
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert (blocks(received), losses(received)) == ([1], [publisher.publisher_id])


# -- loss


async def test_a_subscriber_that_comes_late_is_told_that_it_missed_something_without_another_event() -> None:
    async with processes(2) as (_, (here, there)):
        silent, busy = (here.events.publisher(HERE, TOPIC) for _ in range(2))
        busy.publish(Load(1))
        received = record(there)
        await anyio.sleep(1)
        assert received == [Missed(busy.publisher_id)]
        for publisher in (silent, busy):
            publisher.publish(Load(2))
        await anyio.sleep(1)
        assert (blocks(received), len(losses(received))) == ([2, 2], 1)


@pytest.mark.parametrize("published", [0, 3])
async def test_a_stream_that_breaks_is_opened_again_and_shows_what_was_lost(published: int) -> None:
    async with processes(2) as (made, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(0))
        await anyio.sleep(1)
        made.faults.cut.add(here.number)
        made.faults.break_streams()
        await anyio.sleep(20)
        for number in range(published):
            publisher.publish(Load(10 + number))
        made.faults.cut.clear()
        await anyio.sleep(6)
        assert losses(received) == [publisher.publisher_id] * bool(published), "before any other event"
        publisher.publish(Load(100))
        await anyio.sleep(1)
        assert blocks(received) == [0, 100]
        assert len(losses(received)) == bool(published)
        assert (here.events.outgoing.readers, there.events.incoming.streams) == (1, 1)


async def test_attempts_to_reach_a_process_become_rarer() -> None:
    async with processes(2) as (made, (here, there)):
        publisher = here.events.publisher(HERE, TOPIC)
        made.faults.cut.add(here.number)
        received = record(there)
        await anyio.sleep(100)
        waits_s = [after_s - before_s for before_s, after_s in pairwise(made.faults.refused_at_s)]
        assert waits_s[0] <= 0.1
        assert all(2.5 <= wait_s <= 5 for wait_s in waits_s[6:])
        assert len(waits_s) >= 20
        made.faults.cut.clear()
        await anyio.sleep(6)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert blocks(received) == [1]


async def test_a_slow_reader_holds_up_nobody_and_gets_the_newest_events() -> None:
    limits = DirectEventLimits(events=50, batch_events=5)
    async with processes(3, limits=limits) as (made, (here, slow, fast)):
        received, publisher = [record(one) for one in (slow, fast)], here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        made.faults.held = anyio.Event()
        for number in range(20):
            publisher.publish(Load(number))
        made.faults.held.set()
        await anyio.sleep(1)
        assert [blocks(one) for one in received] == [list(range(20))] * 2
        made.faults.held = anyio.Event()
        for number in range(1000):
            publisher.publish(Load(number))
            await anyio.sleep(0.001)
        queues = here.events.outgoing._readers[HERE, TOPIC]
        assert all(len(queue) == 50 for queue in queues)
        made.faults.held.set()
        await anyio.sleep(1)
        for one in received:
            numbers = blocks(one)[20:]
            assert numbers == sorted(set(numbers)), "in order, none twice"
            assert numbers[-50:] == list(range(950, 1000))
            assert len(numbers) < 70
            assert len(losses(one)) == 1


async def test_a_publisher_whose_events_make_room_for_those_of_another_is_reported() -> None:
    async with processes(2, limits=DirectEventLimits(events=2)) as (made, (here, there)):
        received = record(there)
        quiet, loud, kept = (here.events.publisher(HERE, TOPIC) for _ in range(3))
        await anyio.sleep(1)
        made.faults.held = anyio.Event()
        kept.publish(Load(0))  # the item that the reader holds in its hand
        await anyio.sleep(1)
        quiet.publish(Load(1))
        for number in range(5):
            loud.publish(Load(number))
        made.faults.held.set()
        await anyio.sleep(1)
        assert blocks(received) == [0, 3, 4]
        assert losses(received) == [quiet.publisher_id, loud.publisher_id]
        quiet.publish(Load(2))
        await anyio.sleep(1)
        assert (blocks(received)[3:], len(losses(received))) == ([2], 2)


async def test_what_waits_is_bounded_in_bytes_and_a_single_event_may_be_larger() -> None:
    async with processes(2, limits=DirectEventLimits(size_bytes=10_000)) as (made, (here, there)):
        received, publisher = record(there, kind=str), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        made.faults.held = anyio.Event()
        for _ in range(100):
            publisher.publish("x" * 1000)
            await anyio.sleep(0.01)
        (queue,) = here.events.outgoing._readers[HERE, TOPIC]
        assert queue.size_bytes <= 10_000
        publisher.publish("y" * 50_000)
        assert (len(queue), queue.size_bytes > 50_000) == (1, True)
        made.faults.held.set()
        await anyio.sleep(1)
        assert received[-1].payload == "y" * 50_000
        assert (len(queue), queue.size_bytes) == (0, 0)


# -- who is there


async def test_a_publisher_that_is_dropped_is_removed() -> None:
    async with processes(2) as (made, (here, there)):
        record(there)
        publisher, kept = here.events.publisher(HERE, TOPIC), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher_id = publisher.publisher_id
        del publisher
        gc.collect()
        await anyio.sleep(1)
        assert await channels(made) == [channel_key((HERE, TOPIC), kept.publisher_id)]
        assert channel_key((HERE, TOPIC), publisher_id) not in await channels(made)
        assert (here.events.outgoing.publishers, there.events.incoming.streams) == (1, 1)
        del kept
        gc.collect()
        await anyio.sleep(1)
        assert (here.events.outgoing.publishers, there.events.incoming.streams) == (0, 0)
        assert (await channels(made), here.events.outgoing.readers) == ([], 0)


async def test_publishers_that_come_and_go_leave_nothing_at_their_readers() -> None:
    async with processes(2) as (_, (here, there)):
        kept, received = here.events.publisher(HERE, TOPIC), record(there)
        await anyio.sleep(1)
        kept.publish(Load(0))
        for number in range(1, 30):
            passing = here.events.publisher(HERE, TOPIC)
            await anyio.sleep(0.1)
            passing.publish(Load(number))
            await anyio.sleep(0.1)
            del passing
            gc.collect()
            await anyio.sleep(0.1)
        assert blocks(received) == list(range(30))
        (followed,) = there.events.incoming._followed.values()
        (remote,) = followed._remotes.values()
        assert len(remote.sequences._expected) == len(remote.publishers) == 1


async def test_a_stop_ends_a_stream_of_events() -> None:
    async with processes(2) as (_, (here, there)):
        publisher, request = here.events.publisher(HERE, TOPIC), Context(ChannelRequest(HERE, TOPIC))
        server = here.events.outgoing.server
        assert server is not None
        async with await there.requests.engine(server, EventBatch).generate(request) as stream:
            assert (await stream.__anext__()).publishers == [PublisherState(publisher.publisher_id, 0)]
            request.stop()
            with anyio.fail_after(1):
                assert await stream.collect() == []
        assert here.events.outgoing.readers == 0


async def test_a_publisher_dropped_while_it_is_being_registered_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with processes(1) as (made, (here,)):
        create = here.store.create

        async def create_slowly(key: str, value: bytes) -> Written:
            await anyio.sleep(1)
            return await create(key, value)

        monkeypatch.setattr(here.store, "create", create_slowly)
        publisher = here.events.publisher(HERE, TOPIC)
        await anyio.sleep(0.5)
        del publisher
        gc.collect()
        await anyio.sleep(1)
        assert await made.store.entries() == {}


async def test_a_publisher_that_is_made_again_has_another_id_and_begins_anew() -> None:
    async with processes(2) as (_, (here, there)):
        received, ids = record(there), list[int]()
        for _ in range(2):
            publisher = here.events.publisher(HERE, TOPIC)
            ids.append(publisher.publisher_id)
            await anyio.sleep(1)
            publisher.publish(Load(1))
            await anyio.sleep(1)
            del publisher
            gc.collect()
            await anyio.sleep(1)
        assert [(event.publisher_id, event.sequence) for event in received] == [(one, 0) for one in ids]
        assert len(set(ids)) == 2


async def test_a_process_that_crashes_is_followed_until_its_lease_lapses() -> None:
    async with processes(2) as (made, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(1))
        here.crash()
        await anyio.sleep(LEASE_TTL_S - 1)
        assert there.events.incoming.streams == 1
        await anyio.sleep(2)
        assert there.events.incoming.streams == 0
        assert await channels(made) == []
        assert blocks(received) in ([], [1])


async def test_a_process_that_hung_is_heard_again_with_what_it_published_meanwhile_missed() -> None:
    async with processes(2) as (made, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        (key,) = await channels(made)
        value = (await made.store.entries())[key]
        made.store.abandon(key)
        await anyio.sleep(LEASE_TTL_S + 1)
        assert there.events.incoming.streams == 0
        publisher.publish(Load(2))
        await made.store.create(key, value)
        await anyio.sleep(1)
        assert losses(received) == [publisher.publisher_id]
        publisher.publish(Load(3))
        await anyio.sleep(1)
        assert blocks(received) == [1, 3]


async def test_with_the_store_away_events_go_on_and_new_publishers_are_registered_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with processes(2) as (made, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        made.faults.is_store_away = True
        other = here.events.publisher(Scope("other"), TOPIC)
        publisher.publish(Load(1))
        await anyio.sleep(30)
        assert blocks(received) == [1]
        made.faults.is_store_away = False
        await anyio.sleep(6)
        assert channel_key((Scope("other"), TOPIC), other.publisher_id) in await channels(made)
        assert ["is not registered" in record.getMessage() for record in caplog.records] == [True], "logged once"


async def test_a_publisher_dropped_while_the_store_is_away_is_never_registered() -> None:
    async with processes(1) as (made, (here,)):
        made.faults.is_store_away = True
        publisher = here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        del publisher
        gc.collect()
        await anyio.sleep(1)
        made.faults.is_store_away = False
        await anyio.sleep(10)
        assert await channels(made) == []


async def test_a_process_with_another_address_is_read_there() -> None:
    async with processes(2) as (made, (here, there)):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        key, server = channel_key((HERE, TOPIC), publisher.publisher_id), here.events.outgoing.server
        assert server is not None
        moved = Instance(
            server.namespace,
            server.component,
            server.endpoint,
            server.instance_id,
            {**server.transport, "tcp": "elsewhere:1"},
        )
        written = await made.store.get(key)
        assert written is not None
        again = to_json(ChannelRecord(HERE, TOPIC, publisher.publisher_id, moved))
        await made.store.replace(key, again, written.revision)
        await anyio.sleep(1)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert (blocks(received), losses(received)) == ([1], [])
        assert (here.events.outgoing.readers, there.events.incoming.streams) == (1, 1)


# -- ends


async def test_closing_completes_subscribers_and_leaves_nothing() -> None:
    async with deployment() as made, made.process() as there:
        async with made.process() as here:
            received, publisher = [record(here), record(there)], here.events.publisher(HERE, TOPIC)
            await anyio.sleep(1)
            publisher.publish(Load(1))
            await anyio.sleep(1)
        assert received[0][-1] == "end"
        await anyio.sleep(1)
        assert (there.events.incoming.streams, await channels(made)) == (0, [])
        publisher.publish(Load(2))
        assert blocks(received[0]) == [1] == blocks(received[1])
        assert record(here) == ["end"]


async def test_closing_does_not_wait_long_for_a_store_that_is_away() -> None:
    async with deployment() as made:
        async with made.process() as here:
            kept = [here.events.publisher(HERE, TOPIC) for _ in range(3)]
            await anyio.sleep(1)
            made.faults.is_store_away = True
            began_s = anyio.current_time()
        assert anyio.current_time() - began_s <= 2
        made.faults.is_store_away = False
        assert len(kept) == 3


async def test_a_plane_that_is_not_open_has_no_publishers() -> None:
    async with processes(1) as (made, (here,)):
        plane = DirectEventPlane(made.store, here.requests, here.scheduler, lambda: 0, here._rng)
        with pytest.raises(StreamClosed):
            plane.publisher(HERE, TOPIC)
        with plane.subscribe(HERE, TOPIC, Load).subscribe(lambda _: None):
            assert plane.incoming.subscriptions == 1
        await plane.close()


# -- bad peers


@frozen
class Strange:
    """A server of channels that sends what it is given."""

    batches: list[Any]

    async def serve(self, process: Process, publisher_id: int = 7) -> None:
        """Serve the batches to the subscribers of the deployment, as a publisher of this process."""
        from collections.abc import AsyncIterator

        from pipeline import function_engine

        async def read(request: ChannelRequest, context: Context[Any]) -> AsyncIterator[Any]:
            for batch in self.batches:
                yield batch
            await context.control.stopped()

        wanted = Instance("ns", "strange", "channels", publisher_id)
        server, _ = await process.requests.serve(wanted, function_engine(read))
        record = ChannelRecord(HERE, TOPIC, publisher_id, server)
        await process.store.create(channel_key((HERE, TOPIC), publisher_id), to_json(record))


def run(sequence: int, *payloads: Any) -> EventRun:
    """Events as they are sent; by default one, with its number as its load."""
    return EventRun(7, sequence, [0] * max(1, len(payloads)), list(payloads) or [to_msgpack(Load(sequence))])


async def test_repeated_and_reordered_events_are_dropped_and_lost_ones_reported() -> None:
    async with processes(2) as (_, (here, there)):
        runs = [run(number) for number in (0, 1, 1, 4, 2, 3, 5, 0)]
        await Strange([EventBatch([PublisherState(7, 0)]), EventBatch(runs=runs)]).serve(here)
        received = record(there)
        await anyio.sleep(1)
        assert blocks(received) == [0, 1, 4, 5]
        assert received[2] == Missed(7)
        assert losses(received) == [7]


BAD: list[Any] = [b"", b"\xff\x00", b"\x02\0\0\0\0", b"\xc1", 5, None, "text", [b"x"], to_msgpack({"blocks": "many"})]


async def test_malformed_events_are_passed_over_and_those_behind_them_arrive(caplog: pytest.LogCaptureFixture) -> None:
    async with processes(2) as (_, (here, there)):
        good = [to_msgpack(Load(number)) for number in (0, 10, 12)]
        uneven = EventRun(7, 11, [0, 0], [to_msgpack(Load(11))])
        runs = [run(0, good[0], *BAD, good[1]), uneven, run(12, good[2])]
        await Strange([EventBatch([PublisherState(7, 0)]), EventBatch(runs=runs)]).serve(here)
        received = record(there)
        await anyio.sleep(1)
        assert blocks(received) == [0, 10, 12]
        assert losses(received) == [7] * (len(BAD) + 2), "what was uneven is reported, and is a gap"
    assert [record.levelname for record in caplog.records if "passing over" in record.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(
    "batch", [5, {"runs": 5}, {"runs": [{"publisher_id": 7}]}, {"publishers": [{"publisher_id": -1}]}, b"x", None]
)
async def test_a_malformed_batch_breaks_its_own_stream_only(batch: Any) -> None:
    async with processes(2) as (_, (here, there)):
        await Strange([batch]).serve(here)
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(30)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert blocks(received) == [1]
        assert there.events.incoming.streams == 2


async def test_a_process_whose_streams_break_at_once_is_asked_ever_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pipeline.network.direct_events")
    async with processes(2) as (_, (here, there)):
        await Strange([EventBatch([PublisherState(7, 0)]), 5]).serve(here)
        record(there)
        await anyio.sleep(100)
        attempts = [one.levelno for one in caplog.records if "opening the stream" in one.getMessage()]
        assert 20 <= len(attempts) <= 50
        assert attempts.count(logging.INFO) == 1


async def test_a_stream_that_was_there_for_long_is_opened_again_soon() -> None:
    async with processes(2) as (made, (here, there)):
        kept = here.events.publisher(HERE, TOPIC)
        received = record(there)
        for number in range(10):
            await anyio.sleep(6)
            made.faults.break_streams()
            await anyio.sleep(0.2)
            kept.publish(Load(number))
        await anyio.sleep(1)
        assert (blocks(received), losses(received)) == (list(range(10)), [])


@pytest.mark.parametrize("value", [b"\xff", b"{}", b"[]", b'{"scope": 1}'])
async def test_a_malformed_record_is_passed_over(value: bytes) -> None:
    async with processes(2) as (_, (here, there)):
        key = f"{channel_prefix((HERE, TOPIC))}/5"
        await here.store.create(key, value)
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(1))
        await here.store.delete(key)
        await anyio.sleep(1)
        assert blocks(received) == [1]


@pytest.mark.parametrize("transport", [{}, {"process": "nobody"}, {"process": "77"}])
async def test_a_process_whose_address_makes_no_sense_harms_no_other(transport: dict[str, str]) -> None:
    async with processes(2) as (made, (here, there)):
        server = Instance("ns", "strange", "channels", 7, transport)
        await here.store.create(channel_key((HERE, TOPIC), 7), to_json(ChannelRecord(HERE, TOPIC, 7, server)))
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(30)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert blocks(received) == [1]
        assert made.faults.refused_at_s == []


@pytest.mark.parametrize(("scope", "topic"), [(Scope("\ud800"), "t"), (Scope("ns", "\ud800"), "t"), (HERE, "\udfff")])
async def test_a_name_that_is_no_text_is_refused(scope: Scope, topic: str) -> None:
    async with processes(1) as (_, (here,)):
        with pytest.raises(InvalidArgument):
            here.events.publisher(scope, topic)
        with pytest.raises(InvalidArgument):
            here.events.subscribe(scope, topic, Load)


# -- keys


NAMES = st.text(min_size=1, max_size=8)
CHANNELS = st.tuples(
    st.one_of(st.builds(Scope, NAMES), st.builds(Scope, NAMES, NAMES), st.builds(Scope, NAMES, NAMES, NAMES)),
    NAMES,
)


@given(CHANNELS, CHANNELS)
def test_the_keys_of_a_channel_are_below_its_prefix_and_below_no_other(one: Any, other: Any) -> None:
    assert matches_prefix(channel_key(one, 7), channel_prefix(one))
    assert matches_prefix(channel_key(one, 7), channel_prefix(other)) == (one == other)
    assert set(channel_key(one, 7).removeprefix(EVENT_CHANNELS)) <= set(
        "/%-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )


U64S = st.integers(0, 2**64 - 1)


@given(
    st.lists(st.tuples(U64S, U64S)), st.lists(st.builds(EventRun, U64S, U64S, st.lists(U64S), st.lists(st.binary())))
)
def test_the_messages_of_a_stream_survive_their_bytes(states: list[tuple[int, int]], runs: list[EventRun]) -> None:
    batch = EventBatch([PublisherState(*state) for state in states], runs)
    assert from_msgpack(to_msgpack(batch), EventBatch) == batch
    request = ChannelRequest(HERE, TOPIC)
    assert from_msgpack(to_msgpack(request), ChannelRequest) == request
