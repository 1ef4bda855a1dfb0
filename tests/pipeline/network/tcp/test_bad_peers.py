"""Processes that break the protocol, by accident or on purpose: their connection ends, and nothing else does."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import CannotConnect, Context, Disconnected, PenstockError
from pipeline.network.tcp import Address, framing, service
from pipeline.network.tcp.parts import part_frame
from pipeline.testing import OpenStreams, ScriptedEngine, Stall
from pipeline.wire import to_msgpack
from tests.pipeline.network.tcp.worlds import (
    CALL_HEAD,
    OPTIONS,
    Pair,
    RawPeer,
    frame,
    hello,
    pair,
    proves_itself,
    raw_caller,
    raw_worker,
    read_from,
    settled,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
heads = st.dictionaries(
    st.sampled_from(["metadata", "trace", "is_stopped", "has_short_items", "payload"]), values, max_size=3
).map(lambda changed: CALL_HEAD | changed)
bodies = values.map(to_msgpack) | st.binary(min_size=1, max_size=20) | heads.map(to_msgpack)
any_frames = st.builds(frame, st.integers(0, 14), st.integers(0, 4) | st.just(2**32 - 1), bodies)
any_parts = st.builds(
    lambda stream, size, part: b"".join(part_frame(stream, size, part)),
    st.integers(0, 4),
    st.integers(0, 40) | st.just(2**32 - 1),
    st.binary(max_size=20) | st.just(to_msgpack(CALL_HEAD)[:20]),
)
noise = st.binary(min_size=1, max_size=40)
talk = st.lists(any_frames | any_parts | noise, min_size=1, max_size=6)


async def expect_service(world: Pair, engine: Any) -> None:
    """Others are served as before."""
    assert await (await engine.generate(Context("good"))).collect() == [1, 2]


def script(payload: Any) -> Any:
    return [1, 2] if payload == "good" else [1, Stall()]


EXAMPLES = settings().max_examples // 2


@settings(max_examples=EXAMPLES)
@given(st.lists(noise, min_size=1, max_size=4), st.booleans())
async def test_any_bytes_instead_of_the_first_frames_end_the_connection_only(sent: list[bytes], after: bool) -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine(script))
        peer = RawPeer()
        await world.network.dial(Address.parse(world.worker.transport["tcp"]), peer)
        peer.send(hello() if after else b"", *sent)
        await anyio.sleep(OPTIONS.connect_timeout_s + 0.1)
        assert peer.has_ended
        await expect_service(world, engine)


@settings(max_examples=EXAMPLES)
@given(talk)
async def test_any_frames_of_a_caller_end_its_connection_at_most(sent: list[bytes]) -> None:
    local = ScriptedEngine(script)
    async with pair() as world:
        serving, engine = await world.serve(local)
        peer = await raw_caller(world)
        for data in sent:
            peer.send(data)
            await anyio.sleep(0.001)
        await expect_service(world, engine)
        if peer.link is not None:
            peer.link.abort()
        await settled()
        assert (serving.running, local.open) == (0, 0)


@settings(max_examples=EXAMPLES)
@given(talk, st.booleans())
async def test_any_frames_of_a_worker_are_items_or_a_typed_error(sent: list[bytes], has_begun: bool) -> None:
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer)
        peer.send(frame(framing.BEGUN, 1) if has_begun else b"", *sent)
        await settled()
        if peer.link is not None:
            peer.link.abort()

    async with pair() as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        try:
            items = await (await engine.generate(Context(None))).collect()
        except PenstockError:
            items = []
        assert isinstance(items, list)
        _, good = await world.serve(ScriptedEngine(script))
        await expect_service(world, good)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([frame(framing.CALL, 1, CALL_HEAD), frame(framing.CALL, 1, CALL_HEAD)], "opened twice"),
        ([frame(framing.CALL, 0, CALL_HEAD)], "opened twice"),
        ([frame(framing.CALL, 1, {"id": "r"})], "holds no CallHead: instance: is required"),
        ([frame(framing.CALL, 1, CALL_HEAD | {"metadata": {"a": 1}})], "metadata.a: expected a string"),
        ([frame(framing.STOP, 1)], "never opened"),
        ([frame(framing.CREDIT, 9, [1, 1])], "never opened"),
        ([frame(framing.CALL, 1, CALL_HEAD), frame(framing.CREDIT, 1, [1000, 1])], "more credit than was used"),
        ([frame(framing.CALL, 1, CALL_HEAD), frame(framing.CREDIT, 1, [-1, 0])], "expected credit"),
        ([frame(framing.CALL, 1, CALL_HEAD), frame(framing.CREDIT, 1, "x")], "expected a list"),
        ([frame(framing.ITEMS, 1, [1])], "kind 6 is not expected"),
        ([frame(framing.HELLO, 0, {})], "kind 1 is not expected"),
        ([b"\xff\xff\xff\xff" + frame(framing.CALL, 1)[4:]], "MessageTooLarge"),
        ([b"\x00\x00\x00\x09no frame at all"], "no frame of the request plane"),
    ],
)
async def test_a_fault_of_a_caller_is_named_to_it_and_in_the_log(
    sent: list[bytes], text: str, caplog: pytest.LogCaptureFixture, open_streams: OpenStreams
) -> None:
    local = ScriptedEngine(script)
    async with pair() as world:
        serving, engine = await world.serve(local)
        peer = await raw_caller(world)
        peer.send(*sent)
        await settled()
        assert peer.has_ended
        assert peer.kinds()[-1] == framing.ERROR
        assert text in caplog.text
        assert (serving.running, local.open) == (0, 0)
        await expect_service(world, engine)


async def test_a_call_behind_a_fault_is_not_served(open_streams: OpenStreams) -> None:
    """Both came in one piece."""
    local = ScriptedEngine(script)
    async with pair() as world:
        serving, _ = await world.serve(local)
        for fault in (frame(framing.ERROR, 0, {"error_type": "Unknown"}), frame(framing.CALL, 1, {})):
            peer = await raw_caller(world)
            peer.send(fault, frame(framing.CALL, 2, CALL_HEAD))
            await settled()
            assert peer.has_ended
            assert all(request.is_killed for request in local.requests)
            assert (serving.running, world.worker.open_calls) == (0, 0)


async def test_a_caller_with_a_fault_that_reads_nothing_does_not_stay() -> None:
    async with pair() as world:
        peer = await raw_caller(world)
        (_, far) = world.network.links
        far.is_frozen = True
        peer.send(frame(framing.CALL, 0))
        await anyio.sleep(OPTIONS.close_timeout_s + 0.1)
        assert world.worker._incoming == set()
        assert peer.link is not None
        peer.link.abort()
        await settled()


BEGUN = frame(framing.BEGUN, 1)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([frame(framing.ITEMS, 1, [1])], "outside of their stream's window"),
        ([BEGUN, BEGUN], "began twice"),
        ([BEGUN, frame(framing.ITEMS, 1, [])], "outside of their stream's window"),
        ([BEGUN, frame(framing.ITEMS, 1, "x")], "expected a list of items"),
        ([BEGUN, frame(framing.ITEMS, 1, [0] * 300)], "outside of their stream's window"),
        ([BEGUN, frame(framing.ITEMS, 7, [0])], "never opened"),
        ([BEGUN, frame(framing.TOKENS, 0, [])], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, [1])], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, {"1": 2})], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, [1, -1])], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, [1, 2**32])], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, [1, None])], "expected tokens of streams"),
        ([BEGUN, frame(framing.TOKENS, 0, [0, 5])], "never opened"),
        ([BEGUN, frame(framing.TOKENS, 0, [7, 5])], "never opened"),
        ([frame(framing.TOKENS, 0, [1, 5])], "outside of their stream's window"),
        ([BEGUN, frame(framing.TOKENS, 0, [1, 5])], "for a caller that reads other items"),
        ([BEGUN, frame(framing.ERROR, 1, 5)], "holds no PenstockError"),
        ([BEGUN, frame(framing.CALL, 1, CALL_HEAD)], "kind 4 is not expected"),
        ([frame(framing.ERROR, 0, {"error_type": "Unknown", "message": "going away"})], "going away"),
    ],
)
async def test_a_fault_of_a_worker_is_a_disconnect_with_its_cause(sent: list[bytes], text: str) -> None:
    with pytest.raises(Disconnected, match=text):
        await read_from(sent)


async def test_a_worker_that_sends_more_bytes_than_the_window_has_is_disconnected() -> None:
    """Within the items of the window, and in frames that are not too long."""
    small = evolve(OPTIONS, window_bytes=1000, message_limit_bytes=1000)
    many = [frame(framing.ITEMS, 1, ["a" * 30_000])] * 3
    assert await read_from([BEGUN, *many[:2], frame(framing.END, 1)], small) == ["a" * 30_000] * 2
    with pytest.raises(Disconnected, match="outside of their stream's window"):
        await read_from([BEGUN, *many], small)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([BEGUN, frame(framing.ITEMS, 1, [1])], None),
        ([BEGUN, frame(framing.ITEMS, 1, b"\x92\x01")], "cannot be read"),
        ([BEGUN, frame(framing.ITEMS, 1, b"\x91\x01\x01")], "cannot be read"),
        ([frame(framing.END, 1)], "without an answer"),
    ],
)
async def test_a_missing_end_and_items_that_cannot_be_read_are_errors(sent: list[bytes], text: str | None) -> None:
    """The link ends in order, but the stream has not."""
    with pytest.raises(PenstockError, match=text or "was lost"):
        await read_from(sent)


async def test_late_frames_of_a_closed_stream_are_no_fault() -> None:
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer)
        peer.send(BEGUN, frame(framing.ITEMS, 1, [1]))

    async with pair() as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        async with await engine.generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
        await settled()
        assert peer.kinds()[-1] == framing.CLOSE
        peer.send(*(frame(kind, 1, [1]) for kind in (framing.ITEMS, framing.END, framing.ERROR)))
        peer.send(frame(framing.TOKENS, 0, [1, 7, 1, 8]))
        await settled()
        assert not peer.has_ended


async def test_a_worker_that_never_answers_the_first_frame_is_given_up() -> None:
    async with pair() as world, raw_worker(world, RawPeer) as engine:
        start = anyio.current_time()
        with pytest.raises(CannotConnect, match="no valid first frames"):
            await engine.generate(Context(None))
        assert anyio.current_time() - start == pytest.approx(OPTIONS.connect_timeout_s)


async def test_a_caller_that_reads_no_refusals_is_disconnected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_UNREAD_PARTS", 500)
    async with pair(evolve(OPTIONS, calls_max=1)) as world:
        await world.serve(ScriptedEngine([Stall()]))
        peer = await raw_caller(world)
        world.network.links[1].is_frozen = True  # the worker's end: what it sends does not arrive
        head = to_msgpack(CALL_HEAD)
        for first in range(1, 2000, 100):
            peer.send(*(frame(framing.CALL, stream, head) for stream in range(first, first + 100)))
            await settled()
        assert "more calls than it reads answers" in caplog.text
        assert world.worker.open_calls == 0
        world.network.cut()


async def test_a_flood_of_callers_without_a_reader_keeps_little(open_streams: OpenStreams) -> None:
    """A caller that opens streams and never gives credit: as much as the windows it has stated, and no more."""
    local = ScriptedEngine(["a" * 900] * 1000)
    async with pair(evolve(OPTIONS, calls_max=20)) as world:
        await world.serve(local)
        peer = await raw_caller(world, window_items=10, window_bytes=5000)
        for stream in range(1, 100):
            peer.send(frame(framing.CALL, stream, CALL_HEAD))
        await settled()
        assert local.started == 20
        assert local.delivered <= 20 * 6
        assert peer.kinds().count(framing.ERROR) == 79
        assert peer.link is not None
        peer.link.abort()
        await settled()
        assert local.open == 0
