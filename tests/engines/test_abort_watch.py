"""Abort: the table of when the adapter calls `abort` for a cancelled request, and when not."""

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

Chunk = LLMEngineOutput
DECODE = DisaggregationMode.DECODE


class AbortRecorder(LLMEngine):
    """Yields its chunks and then waits for a stop; records the aborted requests."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = chunks
        self.aborted: list[str] = []
        self.contexts: list[GenerateContext] = []

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="recorder")

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        self.contexts.append(context)
        for chunk in self.chunks:
            yield chunk
        await anyio.sleep_forever()

    async def abort(self, context: GenerateContext) -> None:
        self.aborted.append(context.id)

    async def cleanup(self) -> None:
        """Release nothing."""


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
    assert _abort_count(None, verb, steps) == aborts


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
    assert _abort_count(FirstToken(), verb, steps) == aborts


def _abort_count(first_token: FirstToken | None, verb: str, steps: list[str]) -> int:
    aborted: list[int] = []
    control = Control()
    watch = AbortWatch(first_token, lambda: aborted.append(1))
    watch.begin(control)
    for step in steps:
        if step == "token":
            assert first_token is not None
            first_token.fire()
        elif step == "end":
            watch.end()
        else:
            getattr(control, verb if step == "verb" else step)()
    return len(aborted)


def test_a_watch_that_never_began_may_end() -> None:
    AbortWatch(None, lambda: pytest.fail("aborted")).end()


# -- through the adapter


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_stopped_request_is_aborted_while_its_generator_waits(verb: str) -> None:
    engine, caller = AbortRecorder(Chunk.token(1)), request()
    async with as_engine(engine) as served, await served.generate(caller) as stream:
        await anext(stream)
        getattr(caller, verb)()
        caller.kill()
        await settle()
        assert engine.aborted == ["mine"]
    assert engine.aborted == ["mine"]


async def test_a_request_that_is_read_to_its_end_is_never_aborted() -> None:
    engine, caller = AbortRecorder(Chunk.stop()), request()
    async with as_engine(engine) as served:
        await (await served.generate(caller)).collect()
        caller.stop()
        await settle()
    assert engine.aborted == []


async def test_a_stream_that_is_just_closed_is_never_aborted() -> None:
    engine, caller = AbortRecorder(Chunk.token(1)), request()
    async with as_engine(engine) as served:
        async with await served.generate(caller) as stream:
            await anext(stream)
        caller.stop()
        await settle()
    assert engine.aborted == []


async def test_decode_waits_for_a_chunk_with_a_token() -> None:
    """An empty chunk does not count as a token."""
    engine, caller = AbortRecorder(Chunk([]), Chunk.token(1)), request()
    async with as_engine(engine, mode=DECODE) as served, await served.generate(caller) as stream:
        await anext(stream)
        caller.stop()
        await settle()
        assert engine.aborted == []
        await anext(stream)
        await settle()
        assert engine.aborted == ["mine"]


async def test_decode_that_computes_the_prompt_itself_is_aborted_at_once() -> None:
    """No transfer is under way whose blocks could be overwritten."""
    engine, caller = AbortRecorder(Chunk([])), Context(PreprocessedRequest([1]), id="mine")
    async with (
        as_engine(engine, mode=DECODE, may_prefill=True) as served,
        await served.generate(caller) as stream,
    ):
        await anext(stream)
        caller.stop()
        await settle()
        assert engine.aborted == ["mine"]


async def test_decode_is_aborted_once_the_engine_reports_the_end_of_the_transfer() -> None:
    engine, caller = AbortRecorder(Chunk([])), request()
    async with as_engine(engine, mode=DECODE) as served, await served.generate(caller) as stream:
        await anext(stream)
        caller.stop()
        for _ in range(2):
            engine.contexts[0].notify_first_token()
            await settle()
        assert engine.aborted == ["mine"]


async def test_decode_that_is_dropped_before_its_first_token_is_not_aborted() -> None:
    engine, caller = AbortRecorder(Chunk([])), request()
    async with as_engine(engine, mode=DECODE) as served:
        async with await served.generate(caller) as stream:
            await anext(stream)
            caller.stop()
        engine.contexts[0].notify_first_token()
        await settle()
    assert engine.aborted == []


async def test_a_terminal_chunk_without_tokens_is_no_first_token_of_decode() -> None:
    engine, caller = AbortRecorder(Chunk.cancelled()), request()
    async with as_engine(engine, mode=DECODE) as served:
        caller.stop()
        await (await served.generate(caller)).collect()
        await settle()
    assert engine.aborted == []


async def test_a_refused_request_is_not_aborted() -> None:
    class Refuses(AbortRecorder):
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
    class SetsUp(AbortRecorder):
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
    engine, caller = AbortRecorder(Chunk.token(1)), request()
    async with as_engine(engine) as served, await served.generate(caller) as stream:
        await anext(stream)
        thread = Thread(target=caller.stop)
        thread.start()
        thread.join()
        await anyio.sleep(0.01)
        assert engine.aborted == ["mine"]


async def test_an_abort_that_raises_is_logged_and_the_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(AbortRecorder):
        async def abort(self, context: GenerateContext) -> None:
            raise RuntimeError("no scheduler")

    caplog.set_level(logging.ERROR)
    caller = request()
    async with as_engine(Raises(Chunk.token(1), Chunk.stop())) as served, await served.generate(caller) as stream:
        await anext(stream)
        caller.stop()
        await settle()
        assert [item.data async for item in stream] == [Chunk.stop()]
    assert [record.getMessage() for record in caplog.records] == ["abort of request 'mine' failed"]


async def test_an_abort_that_hangs_delays_no_request() -> None:
    class Hangs(AbortRecorder):
        async def abort(self, context: GenerateContext) -> None:
            await anyio.sleep_forever()

    caller, began = request(), anyio.current_time()
    async with as_engine(Hangs(Chunk.token(1), Chunk.stop())) as served, await served.generate(caller) as stream:
        await anext(stream)
        caller.stop()
        await settle()
        assert [item.data async for item in stream] == [Chunk.stop()]
    assert anyio.current_time() == began
