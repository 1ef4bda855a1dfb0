"""A stream of the request plane that is fed: each token goes one way, in order, and all but lone ones to the reader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import anyio
import pytest

from pipeline import Annotated, Context, Disconnected, Gate, ResponseStream
from pipeline.network.tcp import TcpOptions
from pipeline.network.tcp.caller import CallerConnection
from pipeline.protocols import FinishReason, LLMEngineOutput
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait
from tests.pipeline.network.worlds import WHERE, Noted, eventually, two_runtimes

GAP = Wait(0.25)
KIND = Annotated[LLMEngineOutput]


def token(token_id: int, **fields: Any) -> Annotated[LLMEngineOutput]:
    return Annotated(LLMEngineOutput([token_id], **fields))


def apart(*steps: object) -> list[object]:
    """Return the steps with time between them, and before the end: what comes with the end is read."""
    return [*(each for step in steps for each in (GAP, step)), GAP]


class Reader:
    """Reads a stream of tokens that is fed to it, and notes each token with the way it came."""

    def __init__(self, stream: ResponseStream[Annotated[LLMEngineOutput]]) -> None:
        self.stream, self.gate = stream, Gate()
        self.seen: list[str] = []
        self.fails: Exception | None = None

    def take(self, token_id: int, index: int | None) -> bool:
        if self.fails is not None:
            raise self.fails
        if token_id >= 900:
            return False
        self.seen.append(f"fed {token_id}" if index is None else f"fed {token_id} of {index}")
        return True

    def note(self, item: Annotated[LLMEngineOutput]) -> None:
        self.seen.append(f"read {item.event or (item.data and item.data.token_ids)}")

    async def read(self) -> list[str]:
        async for item in self.stream:
            self.note(item)
        return self.seen


@asynccontextmanager
async def reading(*script: object, context: Context[Any] | None = None, **options: Any) -> AsyncIterator[Reader]:
    """Give a reader that is fed with what the script sends over the request plane."""
    async with two_runtimes("tcp", options=TcpOptions(**options)) as (worker, caller):
        served = await worker.serve(WHERE, ScriptedEngine(script), instance_id=1)
        workers = caller.workers(WHERE, KIND)
        await workers.wait_for_instances()
        async with await workers.engine(1).generate(Context(None) if context is None else context) as stream:
            reader = Reader(stream)
            assert stream.feed(reader.take, reader.gate)
            yield reader
        await eventually(lambda: served.running == 0)


async def test_lone_tokens_are_fed_and_everything_else_is_read_in_order(open_streams: OpenStreams) -> None:
    event: Annotated[Any] = Annotated(event="note", comment=["x"])
    script = apart(
        token(1), token(2, index=3), event, Annotated(LLMEngineOutput([4, 5])), token(6, log_probs=[-1.0]), token(7),
        Annotated(None), token(8, finish_reason=FinishReason.STOP),
    )  # fmt: skip
    async with reading(*script) as reader:
        assert await reader.read() == [
            "fed 1", "fed 2 of 3", "read note", "read [4, 5]", "read [6]", "fed 7", "read None", "read [8]",
        ]  # fmt: skip


async def test_tokens_that_come_together_are_read(open_streams: OpenStreams) -> None:
    async with reading(GAP, token(1), GAP, token(2), token(3), GAP, token(4), GAP) as reader:
        assert await reader.read() == ["fed 1", "read [2, 3]", "fed 4"]


async def test_lists_that_come_in_one_read_are_read_together(
    monkeypatch: pytest.MonkeyPatch, open_streams: OpenStreams
) -> None:
    handled, began_s = CallerConnection._handled, -inf

    def later(connection: CallerConnection) -> None:
        """As if the read ended with what comes after a second."""
        if anyio.current_time() - began_s > 0.9:
            handled(connection)

    monkeypatch.setattr(CallerConnection, "_handled", later)
    async with reading(*apart(token(1), token(2), token(3), token(4), token(5))) as reader:
        began_s = anyio.current_time()
        assert await reader.read() == ["read [1, 2, 3, 4]", "fed 5"]


async def test_what_is_refused_is_read_once(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1), token(900), token(2))) as reader:
        assert await reader.read() == ["fed 1", "read [900]", "fed 2"]


async def test_nothing_is_fed_while_the_gate_is_shut(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1), token(2), token(3), token(4))) as reader:
        reader.gate.is_open = False
        async for item in reader.stream:
            reader.note(item)
            reader.gate.is_open = len(reader.seen) >= 2
        assert reader.seen == ["read [1]", "read [2]", "fed 3", "fed 4"]


async def test_nothing_is_fed_while_no_reader_waits(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1), token(2), token(3))) as reader:
        await anyio.sleep(0.6)
        assert reader.seen == []
        assert await reader.read() == ["read [1, 2]", "fed 3"]


async def test_fed_tokens_are_given_back_to_the_worker_as_credit(open_streams: OpenStreams) -> None:
    count = 40
    async with reading(*apart(*(token(each) for each in range(count))), window_items=4) as reader:
        assert await reader.read() == [f"fed {each}" for each in range(count)]


async def test_an_error_behind_fed_tokens_is_raised_and_watched(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1), Fail(Disconnected("broke")))) as reader:
        ended: list[str] = []
        watched = reader.stream.watched(Noted(ended))
        assert watched is reader.stream
        with pytest.raises(Disconnected, match="broke"):
            await reader.read()
        assert (reader.seen, ended) == (["fed 1"], ["failed: broke", "released"])


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_and_a_kill_end_a_fed_stream(how: str, open_streams: OpenStreams) -> None:
    context = Context(None)
    async with (
        reading(*apart(token(1), token(2)), Stall(), context=context) as reader,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(reader.read)
        await anyio.sleep(0.6)
        getattr(context, how)()
    assert reader.seen == ["fed 1", "fed 2"]


async def test_a_token_that_kills_its_request_is_the_last(open_streams: OpenStreams) -> None:
    context = Context(None)
    async with reading(*apart(token(1), token(2), token(3)), context=context) as reader:
        take = reader.take

        def killing(token_id: int, index: int | None) -> bool:
            if token_id == 2:
                context.kill()
            return take(token_id, index)

        assert reader.stream.feed(killing, reader.gate)
        assert await reader.read() == ["fed 1", "fed 2"]


async def test_what_the_taking_raises_ends_that_stream_alone(open_streams: OpenStreams) -> None:
    async with two_runtimes("tcp") as (worker, caller):
        await worker.serve(WHERE, ScriptedEngine(apart(token(1), token(2), token(3))), instance_id=1)
        workers = caller.workers(WHERE, KIND)
        await workers.wait_for_instances()
        readers = [Reader(await workers.engine(1).generate(Context(None))) for _ in range(2)]
        readers[0].fails = KeyError("a bug")
        for reader in readers:
            assert reader.stream.feed(reader.take, reader.gate)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(readers[1].read)
            with pytest.raises(KeyError, match="a bug"):
                await readers[0].read()
        assert [reader.seen for reader in readers] == [[], ["fed 1", "fed 2", "fed 3"]]


async def test_a_reader_whose_wait_was_cancelled_is_not_fed(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1), token(2), token(3))) as reader:
        with anyio.move_on_after(0.4):
            await reader.read()
        await anyio.sleep(1.0)
        assert reader.seen == ["fed 1"]


@pytest.mark.parametrize("kind", [Annotated[int], Any])
async def test_items_that_are_no_tokens_are_read(kind: Any, open_streams: OpenStreams) -> None:
    async with two_runtimes("tcp") as (worker, caller):
        await worker.serve(WHERE, ScriptedEngine(apart(Annotated(1))), instance_id=1)
        workers = caller.workers(WHERE, kind)
        await workers.wait_for_instances()
        async with await workers.engine(1).generate(Context(None)) as stream:
            assert not stream.feed(lambda *_: True, Gate())
            assert len(await stream.collect()) == 1


async def test_a_stage_without_a_relay_and_a_stream_of_this_process_are_not_fed(open_streams: OpenStreams) -> None:
    async with reading(*apart(token(1))) as reader:
        mapped = reader.stream.map(lambda item: item)
        assert not mapped.feed(reader.take, reader.gate)
        await mapped.aclose()
    local = ResponseStream.of([token(1)], Context(None))
    assert not local.feed(lambda *_: True, Gate())
    assert await local.collect() == [token(1)]
