"""Parts of bodies that break the protocol: a typed error, a line in the log, and nothing that stays."""

from __future__ import annotations

import anyio
import pytest
from attrs import evolve

from pipeline import Context, PenstockError
from pipeline.network.tcp import framing, parts
from pipeline.network.tcp.parts import part_frame
from pipeline.testing import OpenStreams, ScriptedEngine
from pipeline.wire import to_msgpack
from tests.pipeline.network.tcp.worlds import (
    CALL_HEAD,
    OPTIONS,
    RawPeer,
    frame,
    pair,
    proves_itself,
    raw_caller,
    raw_worker,
    read_from,
    settled,
)

SMALL = evolve(OPTIONS, message_limit_bytes=1000)
LIMIT = 1000 + framing.HEADROOM_BYTES


def part(stream: int, size: int, data: bytes = b"a") -> bytes:
    return b"".join(part_frame(stream, size, data))


CALL_FAULTS: list[tuple[list[bytes], str]] = [
    ([part(0, 9)], "opened twice"),
    ([frame(framing.CALL, 1, CALL_HEAD), part(1, 9)], "opened twice"),
    ([part(2, 9), part(1, 9)], "opened twice"),
    ([part(1, 9), frame(framing.CALL, 1, CALL_HEAD)], "opened twice"),
    ([part(1, 9), frame(framing.KILL, 1), part(1, 9)], "opened twice"),
    ([part(1, 9), frame(framing.CLOSE, 1), part(1, 9)], "opened twice"),
    ([part(1, 9), part(1, 8)], "parts that are not of one body"),
    ([part(1, 9), part(1, 9, b"a" * 9)], "parts that are not of one body"),
    ([part(1, 9, b"a" * 10)], "parts that are not of one body"),
    ([part(1, LIMIT + 1)], "MessageTooLarge"),
    ([part(n, LIMIT) for n in (1, 2, 3)], "too many bodies in parts"),
    ([part(n, 9) for n in range(1, parts.BODIES_MAX + 2)], "too many bodies in parts"),
    ([frame(framing.PART, 1, [9, b"a"])], "expected a part"),
    ([frame(framing.PART, 1)], "expected a part"),
    ([part(1, 9, b"")], "expected a part"),
    ([part(1, 9)[:-2] + b"\x07a"], "expected a part"),  # another length of the part than the frame has
    ([part(1, 4, b"none")], "holds no CallHead"),
]


@pytest.mark.parametrize(("sent", "text"), CALL_FAULTS)
async def test_a_fault_in_the_parts_of_a_caller_is_named_to_it_and_in_the_log(
    sent: list[bytes], text: str, caplog: pytest.LogCaptureFixture, open_streams: OpenStreams
) -> None:
    local = ScriptedEngine([4])
    async with pair(SMALL) as world:
        serving, engine = await world.serve(local)
        peer = await raw_caller(world)
        peer.send(*sent)
        await settled()
        assert peer.has_ended
        assert peer.kinds()[-1] == framing.ERROR
        assert text in caplog.text
        assert (serving.running, local.open) == (0, 0)
        assert await (await engine.generate(Context(None))).collect() == [4]


BEGUN = frame(framing.BEGUN, 1)
ITEM = to_msgpack([7])


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([part(1, len(ITEM), ITEM)], "outside of their stream's window"),
        ([BEGUN, part(7, 9)], "never opened"),
        ([BEGUN, part(1, 9), frame(framing.END, 1)], "ended within an item"),
        ([BEGUN, part(1, 9), part(1, 8)], "parts that are not of one body"),
        ([BEGUN, part(1, LIMIT + 1)], "more than the limit|exceed|limit"),
        ([BEGUN, part(1, 2, b"ab")], "expected a list of items"),
        ([BEGUN, part(1, 9), frame(framing.ERROR, 1, {"error_type": "Unknown", "message": "broken"})], "broken"),
        ([BEGUN, part(1, 9)], "was lost"),
    ],
)
async def test_a_fault_in_the_parts_of_a_worker_is_an_error_of_the_call(sent: list[bytes], text: str) -> None:
    with pytest.raises(PenstockError, match=text):
        await read_from(sent, SMALL)


async def test_items_in_parts_are_items() -> None:
    long = to_msgpack(["abc"])
    sent = [BEGUN, part(1, len(long), long[:2]), part(1, len(long), long[2:]), frame(framing.END, 1)]
    assert await read_from(sent, SMALL) == ["abc"]


async def test_late_parts_of_a_closed_stream_are_no_fault_and_take_nothing() -> None:
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer)
        peer.send(BEGUN, frame(framing.ITEMS, 1, [1]), part(1, 900))

    async with pair(SMALL) as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        async with await engine.generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
            await settled()
        peer.send(part(1, 900), part(1, LIMIT + 1))
        await settled()
        assert not peer.has_ended
        (connection,) = world.caller._outgoing.connections()
        assert (connection._parts_in._bodies, connection._parts_in._stated_bytes) == ({}, 0)
        assert peer.link is not None
        peer.link.abort()


async def test_a_body_that_does_not_come_to_its_end_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    """The other side sends heartbeats, so it has nothing to send."""
    async with pair(SMALL) as world:
        await world.serve(ScriptedEngine([4]))
        peer = await raw_caller(world)
        peer.send(part(1, 9))
        for _ in range(20):
            await anyio.sleep(OPTIONS.heartbeat_s - 0.5)
            peer.send(frame(framing.BEAT, 0))
        assert peer.has_ended
        assert "does not come to its end" in caplog.text
