"""What is under way: credit, slow readers, slow networks, long messages, items that are joined."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest
from attrs import evolve

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
    InvalidArgument,
    PenstockError,
    Unknown,
    WorkerOverloaded,
)
from pipeline.errors import CodecError, InvalidMessage, MessageTooLarge
from pipeline.network.tcp import TcpOptions, framing
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait
from pipeline.wire import from_msgpack
from tests.pipeline.network.tcp.worlds import CALL_HEAD, OPTIONS, Pair, frame, pair, raw_caller, settled
from tests.pipeline.network.worlds import eventually

KILO = 1000


async def answer(engine: AsyncEngine[Any, Any], payload: Any = None) -> list[Any]:
    return await (await engine.generate(Context(payload))).collect()


# -- the form of items


@pytest.mark.parametrize("item_type", [Annotated[LLMEngineOutput], Any])
async def test_items_of_tokens_are_short_to_a_caller_that_reads_tokens(item_type: Any) -> None:
    chunks = [LLMEngineOutput([7], index=0), LLMEngineOutput([8], text="a"), LLMEngineOutput([9, 10])]
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([Annotated(chunk) for chunk in chunks]), item_type)
        found = await answer(engine)
    if item_type is Any:
        assert [item["data"]["token_ids"] for item in found] == [[7], [8], [9, 10]]
    else:
        assert [item.data for item in found] == chunks


@pytest.mark.parametrize("has_short_items", [None, False, True])
async def test_a_caller_that_does_not_ask_for_short_items_gets_none(has_short_items: bool | None) -> None:
    head = CALL_HEAD if has_short_items is None else CALL_HEAD | {"has_short_items": has_short_items}
    async with pair() as world:
        await world.serve(ScriptedEngine([Annotated(LLMEngineOutput([7], index=0))]))
        peer = await raw_caller(world)
        peer.send(frame(framing.CALL, 1, head))
        await settled()
        (body,) = [body for kind, _, body in peer.frames() if kind == framing.ITEMS]
        item = from_msgpack(body, list)[0]
        assert (item == [[7], 0]) is (has_short_items is True)
        assert has_short_items or item["data"]["token_ids"] == [7]


# -- slow readers


async def test_a_flood_waits_for_its_reader_and_holds_up_nobody_else(open_streams: OpenStreams) -> None:
    flood = range(20_000)

    def script(payload: Any) -> Any:
        return flood if payload == "flood" else [step for n in range(20) for step in (Wait(0.01), n)]

    local = ScriptedEngine(script)
    async with pair() as world, anyio.create_task_group() as tasks:
        _, engine = await world.serve(local)
        stream = await engine.generate(Context("flood"))
        late_s: list[float] = []

        async def read() -> None:
            async with await engine.generate(Context("others")) as other:
                due_s = anyio.current_time()
                async for _ in other:
                    due_s += 0.01
                    late_s.append(anyio.current_time() - due_s)

        for _ in range(50):
            tasks.start_soon(read)
        await anyio.sleep(1)
        assert len(late_s) == 50 * 20
        assert max(late_s) < 0.01
        assert local.delivered <= OPTIONS.window_items + 50 * 20
        assert max(len(link.handler._out) for link in world.network.links) == 0  # type: ignore[attr-defined]
        assert await stream.collect() == list(flood)


async def test_bytes_under_way_are_bounded_too() -> None:
    local = ScriptedEngine(["a" * 100 * KILO] * 100)
    async with pair() as world:
        _, engine = await world.serve(local)
        async with await engine.generate(Context(None)) as stream:
            await anyio.sleep(1)
            assert local.delivered * 100 * KILO <= OPTIONS.window_bytes + 100 * KILO
            assert len([item async for item in stream]) == 100


async def test_an_item_beyond_the_window_goes_through_alone() -> None:
    items = ["a" * 3_000 * KILO, "b", "c" * 2_000 * KILO]
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine(items))
        assert await answer(engine) == items


async def test_a_network_that_takes_nothing_stops_the_engines() -> None:
    local = ScriptedEngine(["a" * KILO] * 100_000)
    async with pair(evolve(OPTIONS, window_bytes=10**9, window_items=10**6, lost_after_s=1000)) as world:
        _, engine = await world.serve(local)
        async with await engine.generate(Context(None)) as stream:
            await stream.__anext__()
            world.network.freeze()
            await anyio.sleep(10)
            before = local.delivered
            await anyio.sleep(100)
            assert local.delivered == before < 2000
        world.network.cut()


async def test_callers_wait_for_a_network_that_takes_nothing() -> None:
    async with pair(evolve(OPTIONS, lost_after_s=1000)) as world:
        _, engine = await world.serve(ScriptedEngine([1]))
        await answer(engine)
        world.network.freeze()
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(_raises, engine, "a" * 100 * KILO)
            await anyio.sleep(10)
            (near, _) = world.network.links
            assert near.under_way_bytes + near.handler.out_bytes < 1000 * KILO  # type: ignore[attr-defined]
            world.network.cut()


async def test_a_stop_reaches_a_call_that_was_still_waiting_for_the_network() -> None:
    request = Context[Any]("stalls")
    async with pair() as world:
        local = ScriptedEngine(lambda payload: [Stall()] if payload == "stalls" else [len(payload)])
        _, engine = await world.serve(local)
        await answer(engine, "")
        world.network.bytes_per_s = 100 * KILO
        async with anyio.create_task_group() as tasks:
            for _ in range(2):  # one is under way, the other waits behind it
                tasks.start_soon(answer, engine, "a" * 400 * KILO)
                await anyio.sleep(0.1)
            with anyio.fail_after(60):
                tasks.start_soon(_stops_after, request, 0.1)
                with suppress(Cancelled):
                    assert await (await engine.generate(request)).collect() == []
        assert request.is_stopped


async def _stops_after(request: Context[Any], delay_s: float) -> None:
    await anyio.sleep(delay_s)
    request.stop()


async def _raises(engine: AsyncEngine[Any, Any], payload: Any) -> None:
    with pytest.raises(PenstockError):
        await answer(engine, payload)


@pytest.mark.parametrize("how", ["stop", "kill", "close", "cut"])
async def test_a_call_that_waits_for_credit_ends_at_once(how: str, open_streams: OpenStreams) -> None:
    local, request = ScriptedEngine(range(1000)), Context[Any](None)
    async with pair(evolve(OPTIONS, window_items=4)) as world:
        serving, engine = await world.serve(local)
        stream = await engine.generate(request)
        await settled()
        assert local.delivered == 4
        if how == "cut":
            serving.cut()
        elif how == "close":
            await stream.aclose()
        else:
            getattr(request, how)()
        await settled()
        if how == "stop":
            assert len(await stream.collect()) <= 5
            await settled()
        assert (serving.running, local.open) == (0, 0)
        await stream.aclose()


@pytest.mark.parametrize("how", ["end", "error", "close", "kill", "cancel"])
async def test_a_call_that_has_ended_leaves_nothing(how: str, open_streams: OpenStreams) -> None:
    endings: dict[str, list[Any]] = {"end": [], "error": [Fail(LookupError("broken"))]}
    request = Context[Any](None)
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([1, *endings.get(how, [Stall()])]))
        with anyio.move_on_after(10), suppress(Unknown):
            async with await engine.generate(request) as stream:
                assert await stream.__anext__() == 1
                if how == "kill":
                    request.kill()
                if how != "close":
                    assert await stream.collect() == []
        await settled()
        assert (world.caller.open_calls, world.worker.open_calls) == (0, 0)
        assert not request.control._watchers


@pytest.mark.parametrize("kind", [framing.KILL, framing.CLOSE])
async def test_what_waits_for_the_network_is_not_sent_after_a_kill(kind: int, open_streams: OpenStreams) -> None:
    async with pair() as world:
        await world.serve(ScriptedEngine(["a" * 100 * KILO, Wait(0.5), "b", "c", Stall()]))
        peer = await raw_caller(world, window_bytes=10**6, message_limit_bytes=10**6)
        world.network.bytes_per_s = 10 * KILO
        peer.send(frame(framing.CALL, 1, {"instance": "ns/comp/ep/1", "id": "r", "payload": None}))
        await anyio.sleep(1)
        peer.send(frame(kind, 1))
        await anyio.sleep(20)
        assert peer.kinds().count(framing.ITEMS) == 1
        assert peer.link is not None
        peer.link.abort()


@pytest.mark.parametrize("chunk_bytes", [1, 7, None])
async def test_any_pieces_and_delays_of_a_network_bring_the_same_items(chunk_bytes: int | None) -> None:
    async with pair(evolve(OPTIONS, window_items=5)) as world:
        world.network.chunk_bytes, world.network.delay_s = chunk_bytes, 0.01
        _, engine = await world.serve(ScriptedEngine([{"n": n, "text": "ä" * n} for n in range(60)]))
        assert [item["n"] for item in await answer(engine)] == list(range(60))


# -- messages


async def test_a_request_that_is_too_long_is_refused_where_it_is_sent() -> None:
    local = ScriptedEngine(lambda payload: [len(payload)])
    async with pair(evolve(OPTIONS, message_limit_bytes=10 * KILO), OPTIONS) as world:
        _, engine = await world.serve(local)
        with pytest.raises(MessageTooLarge) as caught:
            await answer(engine, "a" * 10 * KILO)
        assert caught.value.limit_bytes == 10 * KILO
        assert await answer(engine, "a" * 9 * KILO) == [9 * KILO]
        assert world.network.dialled == 1
        assert len(local.requests) == 1


async def test_an_item_that_is_too_long_fails_its_stream_and_no_other(open_streams: OpenStreams) -> None:
    local = ScriptedEngine(lambda payload: [1, "a" * payload, 2])
    async with pair(OPTIONS, evolve(OPTIONS, message_limit_bytes=10 * KILO)) as world:
        _, engine = await world.serve(local)
        with pytest.raises(MessageTooLarge) as caught:
            await answer(engine, 10 * KILO)
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (10 * KILO + 3, 10 * KILO)
        assert len(await answer(engine, 9 * KILO)) == 3
        await eventually(lambda: local.open == 0)


async def test_payloads_and_items_of_megabytes_cross() -> None:
    local = ScriptedEngine(lambda payload: [payload])
    async with pair() as world:
        _, engine = await world.serve(local)
        payload = {"token_ids": list(range(200_000)), "blob": bytes(8_000 * KILO)}
        assert await answer(engine, payload) == [payload]


class Declared(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """An engine whose types are known."""

    def __init__(self) -> None:
        self.local = ScriptedEngine(lambda payload: [Annotated(LLMEngineOutput(payload.token_ids))])

    async def generate(self, request: Context[PreprocessedRequest]) -> Any:
        return await self.local.generate(request)


async def test_payloads_and_items_are_read_as_the_types_that_both_sides_declare() -> None:
    engine = Declared()
    async with pair() as world:
        _, typed = await world.serve(engine, Annotated[LLMEngineOutput])
        assert await answer(typed, PreprocessedRequest([1, 2])) == [Annotated(LLMEngineOutput([1, 2]))]
        assert engine.local.requests[0].payload == PreprocessedRequest([1, 2])
        with pytest.raises(InvalidArgument, match="token_ids"):
            await answer(typed, {"token_ids": "x"})


async def test_an_item_of_another_type_is_an_invalid_message_and_closes_the_stream(open_streams: OpenStreams) -> None:
    local = ScriptedEngine(["no number", Stall()])
    async with pair() as world:
        serving, engine = await world.serve(local, int)
        with pytest.raises(InvalidMessage, match="sent an item that cannot be read: expected an integer"):
            await answer(engine)
        await eventually(lambda: serving.running == local.open == 0)


async def test_what_has_no_form_on_the_wire_fails_where_it_is_made() -> None:
    local = ScriptedEngine([object()])
    async with pair() as world:
        _, engine = await world.serve(local)
        with pytest.raises(CodecError, match="no MessagePack form"):
            await answer(engine, object())
        assert local.requests == []
        with pytest.raises(CodecError, match="no MessagePack form"):
            await answer(engine)


async def test_a_type_that_cannot_cross_is_refused_when_it_is_served_or_called() -> None:
    class Foreign:
        pass

    class Takes(AsyncEngine[Foreign, int]):
        async def generate(self, request: Context[Foreign]) -> Any:
            raise AssertionError

    async with pair() as world:
        with pytest.raises(InvalidArgument, match="Foreign has no form"):
            await world.serve(Takes())
        with pytest.raises(InvalidArgument, match="Foreign has no form"):
            await world.serve(ScriptedEngine([]), Foreign)


@pytest.mark.parametrize("text", ["\ud800 half a pair", "long " * 100_000])
async def test_any_error_comes_back(text: str) -> None:
    async with pair() as world:
        _, engine = await world.serve(ScriptedEngine([Fail(LookupError(text))]))
        with pytest.raises(Unknown) as caught:
            await answer(engine)
        assert len(caught.value.message) <= 300


async def test_more_calls_than_a_connection_may_have_are_refused() -> None:
    local = ScriptedEngine([Stall()])
    async with pair(evolve(OPTIONS, calls_max=2)) as world:
        _, engine = await world.serve(local)
        async with await engine.generate(Context(None)), await engine.generate(Context(None)):
            with pytest.raises(WorkerOverloaded):
                await engine.generate(Context(None))
        await settled()
        await (await engine.generate(Context(None))).aclose()


# -- joining


async def test_items_that_are_ready_together_are_one_frame() -> None:
    async with pair() as world:
        await world.serve(ScriptedEngine(range(100)))
        peer = await raw_caller(world, window_items=64, window_bytes=10**6)
        await call(world, peer, 1)
        items = [frame for frame in peer.frames() if frame[0] == framing.ITEMS]
        assert sum(framing.list_length(body) for _, _, body in items) == 64
        assert len(items) == 1


async def test_items_of_a_reader_that_is_late_are_one_frame() -> None:
    """What a network does not take yet comes together."""
    async with pair() as world:
        await world.serve(ScriptedEngine([step for n in range(100) for step in (Wait(0.001), n)]))
        peer = await raw_caller(world, window_items=1000, window_bytes=10**6)
        await call(world, peer, 1)
        await anyio.sleep(1)
        before = len(peer.frames())
        assert before > 90
        world.network.bytes_per_s, world.network.capacity_bytes = 500, 10
        await call(world, peer, 2)
        await anyio.sleep(10)
        assert len(peer.frames()) - before < 40


async def call(world: Pair, peer: Any, stream: int) -> None:
    head = {"instance": "ns/comp/ep/1", "id": "r", "payload": None}
    peer.send(frame(framing.CALL, stream, head))
    await settled()


def test_options_are_checked() -> None:
    wrongs: list[dict[str, Any]] = [
        {"host": "0.0.0.0"},
        {"tls_cert_path": "a"},
        {"tls_ca_path": "a"},
        {"window_items": 0},
        {"heartbeat_s": 0},
        {"heartbeat_s": 5, "lost_after_s": 5},
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidArgument):
            TcpOptions(**wrong)
    assert "secret" not in repr(TcpOptions(token="secret"))
    assert TcpOptions(host="0.0.0.0", announced_host="worker-1").announced_host == "worker-1"
