"""Events over connections that break, hang and are slow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import frozen

from pipeline.network import Event, Missed, Scope
from pipeline.network.direct_events import DirectEventLimits
from pipeline.network.direct_events.channels import ChannelRecord, channel_key
from pipeline.network.names import Instance
from pipeline.protocols.field_rules import U64
from pipeline.wire import to_json
from tests.pipeline.network.direct_events.worlds import Process, deployment
from tests.pipeline.network.memory_network import MemoryNetwork

HERE, TOPIC = Scope("ns", "comp"), "load"


@frozen
class Load:
    """What the tests publish."""

    blocks: U64
    text: str = ""


def record(process: Process) -> list[Any]:
    """Subscribe; return the list of numbers, and of reports of loss, which grows with them."""
    received: list[Any] = []

    def note(event: Event[Load]) -> None:
        received.append(event.payload.blocks)

    process.events.missed(HERE, TOPIC).subscribe(received.append)
    process.events.subscribe(HERE, TOPIC, Load).subscribe(note)
    return received


@asynccontextmanager
async def site(limits: DirectEventLimits | None = None) -> AsyncIterator[tuple[MemoryNetwork, Process, Process]]:
    """Give two processes and the network between them."""
    async with deployment(has_network=True) as made, made.process(limits) as here, made.process(limits) as there:
        assert made.network is not None
        yield made.network, here, there


async def test_events_go_over_one_connection_in_order() -> None:
    async with site() as (network, here, there):
        received, publishers = record(there), [here.events.publisher(HERE, TOPIC) for _ in range(2)]
        await anyio.sleep(1)
        for number in range(500):
            publishers[number % 2].publish(Load(number))
        await anyio.sleep(1)
        assert received == list(range(500))
        assert (len(network.links), network.dialled) == (2, 1)


async def test_what_is_published_while_the_network_is_cut_is_reported_when_it_is_back() -> None:
    async with site() as (network, here, there):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        network.is_reachable = False
        network.cut()
        publisher.publish(Load(2))
        await anyio.sleep(60)
        assert received == [1]
        network.is_reachable = True
        await anyio.sleep(12)
        assert received == [1, Missed(publisher.publisher_id)]
        publisher.publish(Load(3))
        await anyio.sleep(1)
        assert received[2:] == [3]


async def test_a_connection_that_hangs_is_replaced_and_the_loss_reported() -> None:
    async with site() as (network, here, there):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        network.freeze()
        publisher.publish(Load(1))
        await anyio.sleep(40)
        assert received == [Missed(publisher.publisher_id)]
        publisher.publish(Load(2))
        await anyio.sleep(1)
        assert received[1:] == [2]
        assert here.events.outgoing.readers == 1


@pytest.mark.parametrize("transport", [{}, *[{"tcp": at} for at in ("", "nowhere", "here:99999999", "[::1:5", ":")]])
async def test_a_process_whose_address_makes_no_sense_harms_no_other(transport: dict[str, str]) -> None:
    async with site() as (_, here, there):
        server = Instance("ns", "strange", "channels", 7, transport)
        await here.store.create(channel_key((HERE, TOPIC), 7), to_json(ChannelRecord(HERE, TOPIC, 7, server)))
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(30)
        publisher.publish(Load(1))
        await anyio.sleep(1)
        assert received == [1]


async def test_a_flood_over_a_slow_connection_is_bounded_and_ends_with_the_newest_events() -> None:
    async with site(DirectEventLimits(events=100, size_bytes=50_000)) as (network, here, there):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        await anyio.sleep(1)
        network.bytes_per_s = 100_000.0
        for number in range(20_000):
            publisher.publish(Load(number, "x" * 200))
            if number % 100 == 0:
                await anyio.sleep(0.01)
            (queue,) = here.events.outgoing._readers[HERE, TOPIC]
            assert len(queue) <= 100
            assert queue.size_bytes <= 50_000
        await anyio.sleep(60)
        numbers = [one for one in received if not isinstance(one, Missed)]
        assert numbers == sorted(set(numbers))
        assert numbers[-100:] == list(range(19_900, 20_000))
        assert len(numbers) < 15_000
        assert Missed(publisher.publisher_id) in received


async def test_other_calls_go_on_beside_a_flood_of_events() -> None:
    async with site() as (network, here, there):
        received, publisher = record(there), here.events.publisher(HERE, TOPIC)
        other = here.events.publisher(HERE, "other")
        heard: list[float] = []
        there.events.subscribe(HERE, "other", Load).subscribe(lambda _: heard.append(anyio.current_time()))
        await anyio.sleep(1)
        network.bytes_per_s = 1_000_000.0
        for number in range(50_000):
            publisher.publish(Load(number, "x" * 200))
        await anyio.sleep(1)
        sent_s = anyio.current_time()
        other.publish(Load(1))
        await anyio.sleep(120)
        assert len(heard) == 1
        assert heard[0] - sent_s < 3
        assert received[-1] == 49_999
