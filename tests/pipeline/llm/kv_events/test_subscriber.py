"""EngineSubscriber: over real sockets of this machine, with the mock engine's publisher, and by its messages alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import anyio
import pytest

from engines.mocker.zmq_events import EngineEvent, ZmqPublisher
from operators.kv import kv_router
from operators.kv.prompt import PromptBlocks
from operators.kv.types import WorkerRank
from pipeline import ContractViolation, InvalidArgument
from pipeline.llm import block_hashes
from pipeline.llm.kv_events import EngineSubscriber, WireLimits
from pipeline.network import static_workers
from pipeline.protocols.kv import KvCleared, KvEvent, KvRemoved, KvStored, RouterEvent, StoredBlock
from pipeline.testing import ScriptedEngine
from pipeline.wire import to_msgpack

zmq = pytest.importorskip("zmq")

BLOCK = 4
WAIT_S = 5.0
"""How long what must come is waited for; nothing takes that long."""


def subscriber(endpoint: str = "tcp://127.0.0.1:1", **settings: Any) -> tuple[EngineSubscriber, list[RouterEvent]]:
    made, received = EngineSubscriber(endpoint, worker_id=7, block_size_tokens=BLOCK, **settings), list[RouterEvent]()
    made.events.subscribe(received.append)
    return made, received


def message(sequence: int, *events: Any, rank: int | None = None) -> list[bytes]:
    return [b"", sequence.to_bytes(8, "big"), to_msgpack([1.0, list(events), rank])]


def stored(first: int, parent: int | None = None) -> EngineEvent:
    """A block of four tokens from the first on, under the name of the first."""
    tokens = list(range(first, first + BLOCK))
    local = block_hashes(tokens, BLOCK)
    return EngineEvent(KvStored(parent, [StoredBlock(first, local[0])]), tokens)


# -- messages


def test_the_events_of_each_rank_are_numbered_without_a_gap() -> None:
    made, received = subscriber()
    made.receive(message(0, ["BlockRemoved", [1]], ["BlockRemoved", [2], "FOO"], ["BlockRemoved", [3], "CPU"]))
    made.receive(message(1, ["BlockRemoved", [4]], rank=3))
    made.receive(message(2, ["AllBlocksCleared"], ["Unheard"]))
    assert received == [
        RouterEvent(7, KvEvent(1, KvRemoved([1]))),
        RouterEvent(7, KvEvent(2, KvRemoved([3])), "host_pinned"),
        RouterEvent(7, KvEvent(1, KvRemoved([4]), 3)),
        RouterEvent(7, KvEvent(3, KvCleared())),
    ]
    assert made.filtered == {"unknown_medium": 1, "undecodable": 1}


def test_an_engine_that_began_anew_has_nothing_of_what_it_had() -> None:
    made, received = subscriber()
    for sequence in (0, 1, 4):
        made.receive(message(sequence, ["BlockRemoved", [1]], rank=sequence % 2))
    assert made.lost_batches == 2
    made.receive(message(0, ["BlockRemoved", [2]]))
    made.receive(message(3, ["BlockRemoved", [3]]))
    assert [(event.event.dp_rank, event.event.event_id, event.event.data) for event in received[3:]] == [
        (0, 3, KvCleared()),
        (1, 2, KvCleared()),
        (0, 4, KvRemoved([2])),
        (0, 5, KvRemoved([3])),
    ]
    assert made.lost_batches == 4


def test_what_was_published_before_it_joined_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    made, received = subscriber()
    made.receive(message(18, ["BlockRemoved", [1]]))
    assert (made.lost_batches, len(received)) == (18, 1)
    assert "18 messages" in caplog.text


def test_a_message_that_is_none_is_counted_and_spoils_no_other(caplog: pytest.LogCaptureFixture) -> None:
    made, received = subscriber()
    for _ in range(5):
        made.receive([b"", b"", b""])
    made.receive(message(0, ["BlockRemoved", [1]]))
    assert (made.malformed, len(received), len(caplog.records)) == (5, 1, 3)


@pytest.mark.parametrize(
    ("limits", "frames", "reason"),
    [
        (WireLimits(message_bytes=40), message(1, ["BlockRemoved", list(range(40))]), "too_large"),
        (WireLimits(message_bytes=40), [bytes(20), bytes(8), bytes(20)], "too_large"),
        (WireLimits(events=2), message(1, *[["BlockRemoved", [1]]] * 3), "too_many_events"),
        (WireLimits(ranks=4), message(1, ["BlockRemoved", [1]], rank=4), "rank_too_high"),
        (WireLimits(), message(1, ["BlockRemoved", [1]], rank=1024), "rank_too_high"),
    ],
)
def test_a_message_over_a_limit_is_refused_and_counted(
    limits: WireLimits, frames: list[bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, received = subscriber(limits=limits)
    made.receive(message(0, ["BlockRemoved", [1]]))
    for _ in range(5):
        made.receive(frames)
    assert (made.refused, made.malformed, len(received)) == ({reason: 5}, 0, 1)
    assert [reason in record.getMessage() for record in caplog.records] == [True] * 3
    made.receive(message(2, ["BlockRemoved", [1]]))
    assert (len(received), made.lost_batches) == (2, 1), "what was in it is lost"


def test_a_message_at_the_limits_is_taken() -> None:
    frames = message(0, *[["BlockRemoved", [1]]] * 3, rank=3)
    made, received = subscriber(limits=WireLimits(message_bytes=sum(map(len, frames)), events=3, ranks=4))
    made.receive(frames)
    assert (len(received), made.refused) == (1, {})


@pytest.mark.parametrize("field", ["message_bytes", "events", "ranks"])
def test_a_limit_below_one_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        WireLimits(**{field: 0})
    assert raised.value.field == field


def test_what_is_logged_of_a_wrong_message_is_short(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = subscriber()
    made.receive(message(0, ["x" * 10_000], ["BlockRemoved", ["y" * 10_000]]))
    made.receive([b"", bytes(8), to_msgpack([1.0, [], "z" * 10_000])])
    assert [len(record.getMessage()) < 200 for record in caplog.records] == [True] * 3


# -- sockets


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """In real time: sockets know no other."""
    backend: str = request.param
    return backend


def publisher(port: int = 0) -> closing[ZmqPublisher]:
    return closing(ZmqPublisher(port, block_size_tokens=BLOCK, clock=lambda: 12.5))


async def until_received(made: ZmqPublisher, received: list[RouterEvent], count: int = 1) -> None:
    """A subscription takes a moment: publishes the removal of a block that no worker has until so many events came."""
    with anyio.fail_after(WAIT_S):
        while len(received) < count:
            made.publish([EngineEvent(KvRemoved([0]))])
            await anyio.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S * 1000)):
        if condition():
            return
        await anyio.sleep(0.001)
    raise AssertionError("it never came")


async def test_what_an_engine_publishes_decides_where_a_prompt_goes() -> None:
    workers = static_workers({worker_id: ScriptedEngine([]) for worker_id in (3, 7)})
    with publisher() as engine, kv_router(workers, block_size_tokens=BLOCK) as router:
        made, received = subscriber(engine.endpoint)
        with router.follow(made.events):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(router.run)
                tasks.start_soon(made.run)
                await until_received(engine, received)
                engine.publish([stored(100), stored(104, parent=100)])
                blocks = PromptBlocks(list(range(100, 112)), BLOCK)
                await until(lambda: router.overlap_blocks(blocks, WorkerRank(7)) == 2)
                assert router.overlap_blocks(blocks, WorkerRank(3)) == 0
                tasks.cancel_scope.cancel()
    assert [event.event.event_id for event in received] == list(range(1, len(received) + 1))


async def test_it_connects_again_to_an_engine_that_was_restarted_and_takes_a_burst() -> None:
    with publisher() as first:
        made, received = subscriber(first.endpoint)
        port, count = int(first.endpoint.rpartition(":")[2]), 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await until_received(first, received)
            before, lost = len(received), made.lost_batches
            for number in range(500):
                first.publish([EngineEvent(KvRemoved([number]))])
            await until(lambda: len(received) >= before + 500)
            assert made.lost_batches == lost
            first.close()
            with publisher(port) as second:
                count = len(received)
                await until_received(second, received, count + 2)
            tasks.cancel_scope.cancel()
    assert received[count].event.data == KvCleared()


async def test_a_message_that_is_too_large_does_not_end_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ does not read it, and ends the connection for good."""
    with publisher() as engine:
        made, received = subscriber(engine.endpoint, limits=WireLimits(message_bytes=2000))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await until_received(engine, received)
            count = len(received)
            engine.publish([EngineEvent(KvRemoved(list(range(2**60, 2**60 + 1000))))])
            await until_received(engine, received, count + 2)
            tasks.cancel_scope.cancel()
    assert made.refused == {"too_large": 1}
    assert "the connection broke over one" in caplog.text
    assert made.lost_batches > 0
    assert all(event.event.data in (KvRemoved([0]), KvCleared()) for event in received)


async def test_it_runs_once_at_a_time_and_leaves_nothing_open() -> None:
    with publisher() as engine:
        made, received = subscriber(engine.endpoint)
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(made.run)
                await until_received(engine, received, len(received) + 1)
                with pytest.raises(ContractViolation):
                    await made.run()
                tasks.cancel_scope.cancel()


async def test_an_endpoint_that_is_none_is_refused() -> None:
    made, _ = subscriber("nowhere")
    with pytest.raises(InvalidArgument) as raised:
        await made.run()
    assert raised.value.field == "endpoint"


async def test_without_pyzmq_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidArgument, match=r"penstock\[zmq\]"):
        await subscriber()[0].run()
