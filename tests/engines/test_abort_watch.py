"""Abort: the table of when an engine is told that a request was given up, and when not."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from threading import Thread
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import DisaggregationMode, EngineConfig, GenerateContext, LLMEngine, as_engine
from engines.adapter import AbortWatch
from engines.llm import FirstToken
from pipeline import Context, Control
from pipeline.protocols import LLMEngineOutput, PrefillResult, PreprocessedRequest

pytestmark = pytest.mark.anyio

Chunk = LLMEngineOutput
DECODE = DisaggregationMode.DECODE


class Told(LLMEngine):
    """Yields its chunks and then waits for a stop; notes which requests it was told to abort."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = chunks
        self.aborted: list[str] = []
        self.contexts: list[GenerateContext] = []

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="told")

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        self.contexts.append(context)
        for chunk in self.chunks:
            yield chunk
        await anyio.sleep_forever()

    async def abort(self, context: GenerateContext) -> None:
        self.aborted.append(context.id)

    async def cleanup(self) -> None:
        """There is nothing to release."""


def request() -> Context[PreprocessedRequest]:
    return Context(PreprocessedRequest([1], prefill_result=PrefillResult({})), id="mine")


async def settle() -> None:
    for _ in range(5):
        await checkpoint()


# -- decided without a loop's help


@pytest.mark.parametrize("verb", ["stop", "kill"])
@pytest.mark.parametrize(
    ("steps", "aborts"),
    [
        (["verb"], 1),
        (["verb", "verb"], 1),
        (["verb", "kill"], 1),
        (["end"], 0),
        (["end", "verb"], 0),
        (["verb", "end"], 1),
    ],
)
def test_all_roles_but_decode_abort_at_once_and_once(verb: str, steps: list[str], aborts: int) -> None:
    assert _told(None, verb, steps) == aborts


@pytest.mark.parametrize("verb", ["stop", "kill"])
@pytest.mark.parametrize(
    ("steps", "aborts"),
    [
        (["verb"], 0),
        (["verb", "token"], 1),
        (["token", "verb"], 1),
        (["verb", "token", "token", "kill"], 1),
        (["verb", "end"], 0),
        (["verb", "end", "token"], 0),
        (["verb", "token", "end"], 1),
        (["token", "end", "verb"], 0),
        (["end"], 0),
    ],
)
def test_decode_aborts_when_its_first_token_is_there(verb: str, steps: list[str], aborts: int) -> None:
    assert _told(FirstToken(), verb, steps) == aborts


def _told(first_token: FirstToken | None, verb: str, steps: list[str]) -> int:
    told: list[int] = []
    control = Control()
    watch = AbortWatch(first_token, lambda: told.append(1))
    watch.begin(control)
    for step in steps:
        if step == "token":
            assert first_token is not None
            first_token.fire()
        elif step == "end":
            watch.end()
        else:
            getattr(control, verb if step == "verb" else step)()
    return len(told)


def test_a_watch_that_never_began_may_end() -> None:
    AbortWatch(None, lambda: pytest.fail("told")).end()


# -- through the adapter


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_stopped_request_is_aborted_while_its_generator_waits(verb: str) -> None:
    engine, asked = Told(Chunk.token(1)), request()
    async with as_engine(engine) as served, await served.generate(asked) as stream:
        await anext(stream)
        getattr(asked, verb)()
        asked.kill()
        await settle()
        assert engine.aborted == ["mine"]
    assert engine.aborted == ["mine"]


async def test_a_request_that_is_read_to_its_end_is_never_aborted() -> None:
    engine, asked = Told(Chunk.stop()), request()
    async with as_engine(engine) as served:
        await (await served.generate(asked)).collect()
        asked.stop()
        await settle()
    assert engine.aborted == []


async def test_a_stream_that_is_just_closed_is_never_aborted() -> None:
    engine, asked = Told(Chunk.token(1)), request()
    async with as_engine(engine) as served:
        async with await served.generate(asked) as stream:
            await anext(stream)
        asked.stop()
        await settle()
    assert engine.aborted == []


async def test_decode_waits_for_a_chunk_with_a_token() -> None:
    """An empty chunk is no token."""
    engine, asked = Told(Chunk([]), Chunk.token(1)), request()
    async with as_engine(engine, mode=DECODE) as served, await served.generate(asked) as stream:
        await anext(stream)
        asked.stop()
        await settle()
        assert engine.aborted == []
        await anext(stream)
        await settle()
        assert engine.aborted == ["mine"]


async def test_decode_that_computes_the_prompt_itself_is_aborted_at_once() -> None:
    """No blocks are on their way that could be overwritten."""
    engine, asked = Told(Chunk([])), Context(PreprocessedRequest([1]), id="mine")
    async with (
        as_engine(engine, mode=DECODE, may_prefill=True) as served,
        await served.generate(asked) as stream,
    ):
        await anext(stream)
        asked.stop()
        await settle()
        assert engine.aborted == ["mine"]


async def test_decode_is_aborted_once_the_engine_says_that_the_transfer_is_over() -> None:
    engine, asked = Told(Chunk([])), request()
    async with as_engine(engine, mode=DECODE) as served, await served.generate(asked) as stream:
        await anext(stream)
        asked.stop()
        for _ in range(2):
            engine.contexts[0].notify_first_token()
            await settle()
        assert engine.aborted == ["mine"]


async def test_decode_that_is_dropped_before_its_first_token_is_not_aborted() -> None:
    engine, asked = Told(Chunk([])), request()
    async with as_engine(engine, mode=DECODE) as served:
        async with await served.generate(asked) as stream:
            await anext(stream)
            asked.stop()
        engine.contexts[0].notify_first_token()
        await settle()
    assert engine.aborted == []


async def test_a_terminal_chunk_without_tokens_is_no_first_token_of_decode() -> None:
    engine, asked = Told(Chunk.cancelled()), request()
    async with as_engine(engine, mode=DECODE) as served:
        asked.stop()
        await (await served.generate(asked)).collect()
        await settle()
    assert engine.aborted == []


async def test_an_engine_is_not_told_of_a_request_it_refused() -> None:
    class Refuses(Told):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:  # type: ignore[override]
            context.stop()
            raise ValueError

    engine = Refuses()
    async with as_engine(engine) as served:
        with pytest.raises(Exception, match="ValueError"):
            await served.generate(request())
        await settle()
    assert engine.aborted == []


async def test_a_stop_while_the_engine_sets_up_aborts_once_it_has() -> None:
    class SetsUp(Told):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:  # type: ignore[override]
            context.stop()
            await settle()
            assert self.aborted == []
            return super().generate(request, context)

    engine = SetsUp(Chunk.token(1))
    async with as_engine(engine) as served, await served.generate(request()) as stream:
        await settle()
        assert engine.aborted == ["mine"]
        await anext(stream)


async def test_a_stop_from_another_thread_aborts_too() -> None:
    engine, asked = Told(Chunk.token(1)), request()
    async with as_engine(engine) as served, await served.generate(asked) as stream:
        await anext(stream)
        thread = Thread(target=asked.stop)
        thread.start()
        thread.join()
        await anyio.sleep(0.01)
        assert engine.aborted == ["mine"]


async def test_an_abort_that_raises_is_logged_and_the_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Told):
        async def abort(self, context: GenerateContext) -> None:
            raise RuntimeError("no scheduler")

    caplog.set_level(logging.ERROR)
    asked = request()
    async with as_engine(Raises(Chunk.token(1), Chunk.stop())) as served, await served.generate(asked) as stream:
        await anext(stream)
        asked.stop()
        await settle()
        assert [item.data async for item in stream] == [Chunk.stop()]
    assert [record.getMessage() for record in caplog.records] == ["abort of request 'mine' failed"]


async def test_an_abort_that_hangs_holds_nobody_up() -> None:
    class Hangs(Told):
        async def abort(self, context: GenerateContext) -> None:
            await anyio.sleep_forever()

    asked, began = request(), anyio.current_time()
    async with as_engine(Hangs(Chunk.token(1), Chunk.stop())) as served, await served.generate(asked) as stream:
        await anext(stream)
        asked.stop()
        await settle()
        assert [item.data async for item in stream] == [Chunk.stop()]
    assert anyio.current_time() == began
