"""The conformance kit: good engines pass, and how the kit calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from engines import (
    EchoEngine,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    MetricsBindings,
    MetricsContext,
    PushSource,
    run_conformance,
)
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Disconnected, InvalidArgument
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, SamplingOptions
from tests.engines.conformance.worlds import RECORDED, TOKEN_S, Chunks, Sevens, Unhurried, names_of, refuse_more

# -- good engines


class Minimal(LLMEngine):
    """Has only the required methods, no usage, and a coroutine that returns its generator."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="minimal")

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        await checkpoint()
        refuse_more(request, 0)
        return self._chunks(context)

    async def _chunks(self, context: GenerateContext) -> Chunks:
        yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()

    async def cleanup(self) -> None:
        """Release nothing."""


class Ranked(Sevens):
    """Has sources and metrics of three ranks."""

    async def kv_event_sources(self) -> Sequence[PushSource]:
        return [PushSource(print, rank) for rank in (2, 0, 1)]

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        assert (context.model, context.component, context.model_load_time_s) == ("test-model", "test", 0.0)
        context.metrics.seed([2, 0, 1])
        return MetricsBindings([2, 0, 1])


class OptsOut(Sevens):
    async def kv_event_sources(self) -> Sequence[PushSource]:
        return []

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        return MetricsBindings([])


class DoneWhenStopped(Sevens):
    """Was done when the stop came after its first chunk."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 1)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled()
        else:
            yield LLMEngineOutput.token(1)
            yield LLMEngineOutput.stop()


class DoneBeforeStopped(Sevens):
    """Ends with its first chunk."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 0)
        yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()


class NoticesKill(Sevens):
    """Waits long before its tokens, and not at all after a stop or kill."""

    ends_on_kill = True
    token_s = 8.0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 3)
        for sent in range(3):
            if sent == request.stop_conditions.max_tokens:
                yield LLMEngineOutput.length()
                return
            with anyio.move_on_after(self.token_s):
                await context.stopped()
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            yield LLMEngineOutput.token(7)
        yield LLMEngineOutput.stop()


class RaisesWhenKilled(NoticesKill):
    """Ends by raising an error."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if context.is_killed:
                    raise Disconnected("killed")
                yield chunk


class PlainIterator(Sevens):
    """Its stream is not a generator and cannot be closed."""

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        refuse_more(request, 0)
        return _Once(context)


class _Once:
    def __init__(self, context: GenerateContext) -> None:
        self.context, self.left = context, 1

    async def __anext__(self) -> LLMEngineOutput:
        await checkpoint()
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        return LLMEngineOutput.cancelled() if self.context.is_stopped else LLMEngineOutput.stop()


class Choices(Sevens):
    """Yields two choices in turn, whatever the request contains."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        count = request.stop_conditions.max_tokens or 4
        for step in range(count):
            for index in range(2):
                await anyio.sleep(TOKEN_S)
                if context.is_stopped:
                    yield LLMEngineOutput([], index=index, finish_reason=FinishReason.CANCELLED)
                    return
                yield LLMEngineOutput(
                    [1], index=index, finish_reason=FinishReason.LENGTH if step == count - 1 else None
                )


class WokenByAbort(Sevens):
    """Checks for a stop between its chunks, which are far apart; `abort` wakes it in time."""

    def __init__(self) -> None:
        super().__init__()
        self.woken: dict[str, anyio.Event] = {}

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.woken[context.id] = woken = anyio.Event()
        refuse_more(request, 3)
        for sent in range(3):
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            if sent == request.stop_conditions.max_tokens:
                yield LLMEngineOutput.length()
                return
            yield LLMEngineOutput.token(1)
            with anyio.move_on_after(8):
                await woken.wait()
        yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()

    async def abort(self, context: GenerateContext) -> None:
        self.woken[context.id].set()


class HasSlots(Sevens):
    """Serves eight requests at a time; each frees its slot slowly, shielded, however it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = anyio.Semaphore(8)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        await self.slots.acquire()
        try:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1.5)
                self.slots.release()


class HasATaskForEach(Sevens):
    """Its background makes the chunks and hands them over; a cleanup ends it in order."""

    send: Any = None

    async def start(self, worker_id: int) -> EngineConfig:
        self.send, self.receive = anyio.create_memory_object_stream[Any](100)
        return await super().start(worker_id)

    async def background(self) -> None:
        async with self.receive, anyio.create_task_group() as tasks:
            async for request, context, chunks in self.receive:
                tasks.start_soon(self.work, request, context, chunks)

    async def work(self, request: PreprocessedRequest, context: GenerateContext, to: Any) -> None:
        async with to:
            with suppress(anyio.BrokenResourceError):
                async with aclosing(super().generate(request, context)) as chunks:
                    async for chunk in chunks:
                        await to.send(chunk)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 10_000)
        to, chunks = anyio.create_memory_object_stream[LLMEngineOutput](0)
        self.send.send_nowait((request, context, to))
        with chunks:
            async for chunk in chunks:
                yield chunk

    async def cleanup(self) -> None:
        await super().cleanup()
        if self.send is not None:
            self.send.close()


class YieldsEmptyChunks(Sevens):
    """Yields chunks without tokens between the others, as signs of life."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield LLMEngineOutput([])
                yield chunk


class HasLittleRoom(Sevens):
    """Refuses a request that its context cannot hold."""

    async def start(self, worker_id: int) -> EngineConfig:
        return evolve(await super().start(worker_id), context_length=50)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if len(request.token_ids) + (request.stop_conditions.max_tokens or 0) > 50:
            raise InvalidArgument("too long", field="max_tokens")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


GOOD = [
    EchoEngine,
    lambda: EchoEngine(0.5),
    Sevens,
    Minimal,
    Ranked,
    OptsOut,
    Unhurried,
    DoneWhenStopped,
    DoneBeforeStopped,
    NoticesKill,
    RaisesWhenKilled,
    PlainIterator,
    WokenByAbort,
    HasSlots,
    HasATaskForEach,
    YieldsEmptyChunks,
    HasLittleRoom,
    MockEngine,
    lambda: MockEngine(MockEngineArgs(engine_type="sglang", dp_size=2)),
    lambda: MockEngine(MockEngineArgs(worker_type="prefill")),
    lambda: MockEngine(MockEngineArgs(max_num_seqs=1)),
]


@pytest.mark.parametrize("factory", GOOD)
async def test_a_good_engine_passes(factory: Any) -> None:
    await run_conformance(factory)


async def test_each_choice_may_end_by_itself() -> None:
    request = PreprocessedRequest([1], sampling_options=SamplingOptions(n=2))
    await run_conformance(Choices, request=request)
    await run_conformance(EchoEngine, request=request)
    assert "NotAChunk" in await names_of(Choices), "with one choice there is no second"


async def test_choices_all_done_when_the_stop_came_may_end_one_by_one() -> None:
    class AllAtOnce(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            refuse_more(evolve(request, sampling_options=SamplingOptions()), 1)
            finish = FinishReason.CANCELLED if context.is_stopped else FinishReason.STOP
            for index in range(request.sampling_options.n or 1):
                yield LLMEngineOutput([1], index=index, finish_reason=finish)

    await run_conformance(AllAtOnce, request=PreprocessedRequest([1], sampling_options=SamplingOptions(n=4)))


async def test_a_request_that_cannot_be_served_is_refused_before_its_first_chunk() -> None:
    """This is rule L5 of the engine contract."""
    bad = PreprocessedRequest([1] * 51)
    await run_conformance(HasLittleRoom, bad_request=bad)
    await run_conformance(EchoEngine, bad_request=PreprocessedRequest([], prompt_embeds="AAAA"))
    assert await names_of(Sevens, bad_request=bad) == ["BadRequestServed"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_kit_works_in_real_time(backend: str) -> None:
    class Quick(NoticesKill):
        token_s = 0.001

    anyio.run(run_conformance, Quick, backend=backend)


async def test_the_fixture_is_the_kit(run_conformance: Any) -> None:
    await run_conformance(EchoEngine)
    with pytest.raises(ExceptionGroup):
        await run_conformance(Choices)


async def test_the_long_request_is_no_longer_than_the_context() -> None:
    await run_conformance(HasLittleRoom, request=PreprocessedRequest([4, 5]))
    assert max(request.stop_conditions.max_tokens or 0 for request in RECORDED[0].requests) == 48
