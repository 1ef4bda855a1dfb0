"""Requests and items of megabytes: other streams' frames go between their parts, and every ending leaves nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import AsyncEngine, CannotConnect, Context, Disconnected, PenstockError, ResponseStream
from pipeline.loop import Wakeup
from pipeline.network.tcp import framing, parts
from pipeline.network.tcp.connection import Connection
from pipeline.network.tcp.parts import PART_BYTES, part_frame
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait
from pipeline.wire import to_msgpack
from tests.pipeline.network.tcp.worlds import (
    CALL_HEAD,
    OPTIONS,
    Pair,
    RawPeer,
    frame,
    pair,
    proves_itself,
    raw_caller,
    raw_worker,
    settled,
)
from tests.pipeline.network.worlds import eventually

LONG = 2_000_000
PATIENT = evolve(OPTIONS, lost_after_s=1000)
ROOMY: dict[str, Any] = {"message_limit_bytes": 10**8, "window_bytes": 10**8}


def script(payload: Any) -> list[Any]:
    """Answer a number with so many bytes, a "paced" with items each 10 ms, other text with its length."""
    if isinstance(payload, int):
        return [bytes(payload)]
    return [step for n in range(20) for step in (Wait(0.01), n)] if payload == "paced" else [len(payload)]


async def answer(engine: AsyncEngine[Any, Any], payload: Any = None) -> list[Any]:
    return await (await engine.generate(Context(payload))).collect()


def connections(world: Pair) -> list[Connection]:
    """Return both ends of the connection."""
    return [*world.caller._outgoing.connections(), *world.worker._incoming]


def assert_nothing_is_under_way(world: Pair) -> None:
    for connection in connections(world):
        assert not connection._parts_out
        assert (connection._parts_out._bytes, connection._parts_in._stated_bytes) == (0, 0)
        assert (connection._parts_in._bodies, connection.calls) == ({}, 0)


# -- between the parts


@pytest.mark.parametrize("long", ["a" * LONG, LONG], ids=["request", "item"])
async def test_a_long_body_holds_up_no_other_stream(long: Any) -> None:
    async with pair(PATIENT) as world:
        _, engine = await world.serve(ScriptedEngine(script))
        await answer(engine, "")
        world.network.bytes_per_s = 5_000_000  # 0.4 s for the body, 0.05 s for a part of it
        late_s: list[float] = []

        async def read() -> None:
            async with await engine.generate(Context("paced")) as other:
                due_s = anyio.current_time()
                async for _ in other:
                    due_s += 0.01
                    late_s.append(anyio.current_time() - due_s)

        async def call() -> None:
            for _ in range(10):
                begin_s = anyio.current_time()
                assert await answer(engine, "short") == [5]
                late_s.append(anyio.current_time() - begin_s)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(read)
                tasks.start_soon(call)
            await anyio.sleep(0.05)
            assert len(await answer(engine, long)) == 1
        assert len(late_s) == 5 * (20 + 10)
        assert 0.03 < max(late_s) < 0.15
        assert_nothing_is_under_way(world)


async def test_long_bodies_come_whole_and_in_turn_with_those_of_other_streams() -> None:
    async with pair(PATIENT) as world:
        _, engine = await world.serve(ScriptedEngine(lambda payload: [1, payload, 2, payload[::-1], 3]))
        world.network.bytes_per_s = 10_000_000
        ended: list[int] = []

        async def call(size: int) -> None:
            payload = bytes([size % 256]) * size + b"end"
            assert await answer(engine, payload) == [1, payload, 2, payload[::-1], 3]
            ended.append(size)

        sizes = [PART_BYTES * 12, PART_BYTES * 6 + 1, PART_BYTES * 2 - 1, PART_BYTES, 100]
        async with anyio.create_task_group() as tasks:
            for size in sizes:
                tasks.start_soon(call, size)
        assert ended == sizes[::-1]
        assert_nothing_is_under_way(world)


async def test_more_long_bodies_than_may_be_under_way_wait_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BODIES_MAX", 3)
    async with pair(PATIENT) as world:
        _, engine = await world.serve(ScriptedEngine(lambda payload: [payload]))
        async with anyio.create_task_group() as tasks:
            for n in range(10):
                tasks.start_soon(_comes_back, engine, bytes([n]) * 600_000)
        assert world.network.dialled == 1
        assert_nothing_is_under_way(world)


async def test_bodies_under_way_together_are_within_two_of_the_longest() -> None:
    async with pair(evolve(PATIENT, message_limit_bytes=1_000_000)) as world:
        _, engine = await world.serve(ScriptedEngine(lambda payload: [payload]))
        world.network.bytes_per_s = 20_000_000
        most = 0
        async with anyio.create_task_group() as tasks:
            for n in range(10):
                tasks.start_soon(_comes_back, engine, bytes([n]) * 900_000)
            for _ in range(100):
                await anyio.sleep(0.01)
                most = max(most, *(one._parts_in._stated_bytes for one in connections(world)))
        assert 1_800_000 < most <= 2_000_000
        assert world.network.dialled == 1
        assert_nothing_is_under_way(world)


async def _comes_back(engine: AsyncEngine[Any, Any], payload: bytes) -> None:
    assert await answer(engine, payload) == [payload]


async def test_a_body_is_not_kept_once_it_is_sent() -> None:
    out = parts.OutgoingParts()
    out.limit_bytes = 10**6
    body = parts.SentBody(bytes(PART_BYTES + 1), lambda: 1, Wakeup())
    out.add(body)
    out.next_part()
    assert not body.is_sent
    out.next_part()
    assert (body.is_sent, body.body, bool(out), out._bytes) == (True, b"", False, 0)


# -- endings in the middle


@pytest.mark.parametrize("how", ["stop", "kill", "cancel", "cut", "loss"])
@pytest.mark.parametrize("long", ["a" * LONG, LONG], ids=["request", "item"])
@pytest.mark.parametrize("others", [0, 3])
async def test_any_ending_within_a_body_leaves_nothing(
    how: str, long: Any, others: int, monkeypatch: pytest.MonkeyPatch, open_streams: OpenStreams
) -> None:
    """With others, some of the bodies wait for their turn when it happens."""
    monkeypatch.setattr(parts, "BODIES_MAX", 2)
    local = ScriptedEngine(script)
    async with pair(PATIENT) as world:
        serving, engine = await world.serve(local)
        await answer(engine, "")
        world.network.bytes_per_s = 2_000_000
        requests, errors, answers = [Context[Any](long) for _ in range(1 + others)], list[Exception](), list[Any]()

        async def call(request: Context[Any], scope: anyio.CancelScope) -> None:
            with scope:
                try:
                    answers.extend(await (await engine.generate(request)).collect())
                except PenstockError as error:
                    errors.append(error)

        scopes = [anyio.CancelScope() for _ in requests]
        async with anyio.create_task_group() as tasks:
            for request, scope in zip(requests, scopes, strict=True):
                tasks.start_soon(call, request, scope)
            await anyio.sleep(0.3)
            ends: dict[str, list[Callable[[], object]]] = {
                "stop": [request.stop for request in requests],
                "kill": [request.kill for request in requests],
                "cancel": [scope.cancel for scope in scopes],
                "cut": [serving.cut],
                "loss": [world.network.cut],
            }
            for end in ends[how]:
                end()
        assert all(item in (LONG, bytes(LONG)) for item in answers)
        assert not answers or how == "stop"
        assert how in ("kill", "cancel") or len(answers) + len(errors) == len(requests)
        assert all(isinstance(error, (CannotConnect, Disconnected)) for error in errors) or how in ("stop", "kill")
        await eventually(lambda: (local.open, serving.running, world.worker.open_calls) == (0, 0, 0))
        if how not in ("cut", "loss"):
            assert world.network.dialled == 1
            assert await answer(engine, "good") == [4]
        assert_nothing_is_under_way(world)


async def test_a_stopped_call_that_is_cut_within_an_item_ends_and_no_other_does(open_streams: OpenStreams) -> None:
    async with pair(PATIENT) as world:
        serving, engine = await world.serve(ScriptedEngine(script))
        await answer(engine, "")
        world.network.bytes_per_s = 2_000_000
        request = Context[Any](LONG)

        async def cuts() -> None:
            await anyio.sleep(0.3)
            request.stop()
            await anyio.sleep(0.3)
            serving.cut()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cuts)
            assert await (await engine.generate(request)).collect() == []
        await settled()
        assert [connection.reason for connection in connections(world)] == [None, None]
        assert_nothing_is_under_way(world)


async def test_a_stop_within_a_request_reaches_its_engine(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    request = Context[Any]("a" * LONG)
    async with pair(PATIENT) as world:
        _, engine = await world.serve(local)
        await (await engine.generate(Context(None))).aclose()
        world.network.bytes_per_s = 2_000_000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stops_after, request, 0.3)
            with anyio.fail_after(5), suppress(PenstockError):
                assert len(await (await engine.generate(request)).collect()) <= 1
        assert local.requests[1].is_stopped


async def _stops_after(request: Context[Any], delay_s: float) -> None:
    await anyio.sleep(delay_s)
    request.stop()


async def test_a_stop_within_a_request_is_sent_once_and_behind_it() -> None:
    peer, request = RawPeer(), Context[Any](bytes(LONG))

    async def answers() -> None:
        await proves_itself(peer, has_parts=True, message_limit_bytes=10**8)
        await anyio.sleep(0.3)
        request.stop()
        await anyio.sleep(5)
        *body, last = (kind for kind in peer.kinds()[2:] if kind != framing.BEAT)
        assert (set(body), last) == ({framing.PART}, framing.STOP)
        peer.send(frame(framing.BEGUN, 1), frame(framing.END, 1))

    async with pair(PATIENT) as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        world.network.bytes_per_s = 2_000_000
        assert await (await engine.generate(request)).collect() == []
        assert peer.link is not None
        peer.link.abort()
        await settled()


class Stuck(AsyncEngine[Any, Any]):
    """Answers with a long item, and does not see for a minute that its request was killed."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        return ResponseStream(self._items(request), request)

    async def _items(self, request: Context[Any]) -> AsyncGenerator[bytes, None]:
        try:
            yield bytes(request.payload)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(60)


async def test_a_kill_within_an_item_ends_its_parts() -> None:
    async with pair(PATIENT) as world:
        await world.serve(Stuck())
        peer = await raw_caller(world, has_parts=True, message_limit_bytes=10**8)
        world.network.bytes_per_s = 1_000_000
        peer.send(frame(framing.CALL, 1, CALL_HEAD | {"payload": 20 * LONG}))
        await anyio.sleep(0.5)
        peer.send(frame(framing.KILL, 1))
        await anyio.sleep(2)
        so_far = len(peer.received_bytes)
        assert so_far > PART_BYTES
        await anyio.sleep(20)
        assert len(peer.received_bytes) <= so_far + 50  # heartbeats
        assert peer.link is not None
        peer.link.abort()
        await anyio.sleep(60)


async def test_a_served_call_has_not_ended_before_its_last_item_is_sent() -> None:
    """So that a worker that is drained has sent all that its callers wait for."""
    async with pair(PATIENT) as world:
        serving, engine = await world.serve(ScriptedEngine(script))
        await answer(engine, "")
        world.network.bytes_per_s = 2_000_000
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_has_length, engine, LONG)
            await anyio.sleep(0.3)
            assert serving.running == 1
            await serving.drained()
            await world.worker.close()


async def _has_length(engine: AsyncEngine[Any, Any], size: int) -> None:
    (item,) = await answer(engine, size)
    assert len(item) == size


async def test_a_worker_that_answers_before_it_has_the_request_gets_no_more_of_it() -> None:
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer, has_parts=True, message_limit_bytes=10**8)
        await anyio.sleep(1)
        peer.send(frame(framing.ERROR, 1, {"error_type": "WorkerOverloaded", "message": "no room"}))
        await anyio.sleep(10)
        assert [kind for kind in peer.kinds() if kind not in (framing.BEAT, framing.PART)][2:] == [framing.CLOSE]
        assert sum(kind == framing.PART for kind in peer.kinds()) < 40
        assert peer.link is not None
        peer.link.abort()

    async with pair(PATIENT) as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        world.network.bytes_per_s = 2_000_000
        with pytest.raises(PenstockError, match="no room"):
            await engine.generate(Context(bytes(20 * LONG)))


# -- on the wire


async def test_parts_are_messagepack_and_begin_with_the_list_of_the_item() -> None:
    async with pair() as world:
        await world.serve(ScriptedEngine(script))
        peer = await raw_caller(world, has_parts=True, **ROOMY)
        peer.send(frame(framing.CALL, 1, CALL_HEAD | {"payload": LONG}))
        await anyio.sleep(1)
        bodies = [msgspec.msgpack.decode(body) for kind, _, body in peer.frames() if kind == framing.PART]
        assert {size for size, _ in bodies} == {LONG + 6}
        assert max(len(part) for _, part in bodies) == PART_BYTES
        assert msgspec.msgpack.decode(b"".join(part for _, part in bodies)) == [bytes(LONG)]
        assert peer.kinds()[-1] == framing.END
        assert peer.link is not None
        peer.link.abort()


async def test_a_caller_that_takes_no_parts_gets_whole_items() -> None:
    """One of before there were parts."""
    async with pair() as world:
        await world.serve(ScriptedEngine(script))
        peer = await raw_caller(world, **ROOMY)
        peer.send(frame(framing.CALL, 1, CALL_HEAD | {"payload": LONG}))
        await anyio.sleep(1)
        assert peer.kinds()[2:] == [framing.BEGUN, framing.ITEMS, framing.END]
        assert peer.link is not None
        peer.link.abort()


async def test_a_worker_that_takes_no_parts_gets_whole_requests() -> None:
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer, message_limit_bytes=10**8)
        await settled()
        assert peer.kinds()[2:] == [framing.CALL]
        peer.send(frame(framing.BEGUN, 1), frame(framing.END, 1))

    async with pair() as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        assert await answer(engine, bytes(LONG)) == []
        assert peer.link is not None
        peer.link.abort()
        await settled()


cuts = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def in_parts(stream: int, body: bytes, sizes: list[int]) -> list[bytes]:
    """Return the frames of a body in parts of these sizes, again and again."""
    frames, at = list[bytes](), 0
    while at < len(body):
        size = sizes[len(frames) % len(sizes)]
        frames.append(b"".join(part_frame(stream, len(body), body[at : at + size])))
        at += size
    return frames


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(st.text(max_size=90), cuts), min_size=1, max_size=5), st.randoms(use_true_random=False))
async def test_parts_of_any_size_in_any_order_of_streams_are_the_calls(
    calls: list[tuple[str, list[int]]], random: Any
) -> None:
    heads = [to_msgpack(CALL_HEAD | {"payload": text}) for text, _ in calls]
    left = [in_parts(n, head, calls[n - 1][1]) for n, head in enumerate(heads, start=1)]
    local = ScriptedEngine(lambda payload: [payload])
    async with pair() as world:
        await world.serve(local)
        peer = await raw_caller(world)
        for frames in left:  # streams are opened upwards
            peer.send(frames.pop(0))
        while left := [frames for frames in left if frames]:
            peer.send(random.choice(left).pop(0))
        await settled()
        answers = {stream: msgspec.msgpack.decode(body) for kind, stream, body in peer.frames() if kind == 6}
        assert answers == {n: [text] for n, (text, _) in enumerate(calls, start=1)}
        assert peer.link is not None
        peer.link.abort()


sizes = st.sampled_from([10, PART_BYTES - 20, PART_BYTES + 1, 3 * PART_BYTES])
endings = st.sampled_from(["", "", "stop", "kill", "cancel"])


@settings(max_examples=settings().max_examples // 4)
@given(st.lists(st.tuples(sizes, sizes, endings, st.floats(0, 1)), min_size=1, max_size=8))
async def test_any_mix_of_calls_and_endings_brings_what_is_due_and_leaves_nothing(
    calls: list[tuple[int, int, str, float]],
) -> None:
    async with pair(PATIENT) as world:
        _, engine = await world.serve(ScriptedEngine(lambda payload: [1, bytes(payload["wants"]), 2]))
        world.network.bytes_per_s = 3_000_000

        async def call(size: int, wants: int, ending: str, after_s: float) -> None:
            request = Context[Any]({"blob": bytes(size), "wants": wants})
            with anyio.move_on_after(after_s if ending == "cancel" else 1000), suppress(PenstockError):
                if ending in ("stop", "kill"):
                    tasks.start_soon(_ends_after, request, ending, after_s)
                items = await (await engine.generate(request)).collect()
                assert items == [1, bytes(wants), 2][: len(items)]
                assert ending or len(items) == 3

        async with anyio.create_task_group() as tasks:
            for one in calls:
                tasks.start_soon(call, *one)
        world.network.bytes_per_s = None
        assert await answer(engine, {"wants": 0}) == [1, b"", 2]
        await settled()
        assert world.network.dialled == 1
        assert_nothing_is_under_way(world)


async def _ends_after(request: Context[Any], how: str, delay_s: float) -> None:
    await anyio.sleep(delay_s)
    getattr(request, how)()


async def test_a_body_that_comes_slowly_is_none(open_streams: OpenStreams) -> None:
    """Each part takes longer than a heartbeat, which waits behind it."""
    async with pair(PATIENT) as world:
        _, engine = await world.serve(ScriptedEngine(script))
        await answer(engine, "")
        world.network.bytes_per_s = PART_BYTES / 8
        assert await answer(engine, "a" * LONG) == [LONG]
        assert [len(item) for item in await answer(engine, LONG)] == [LONG]
        assert world.network.dialled == 1
