"""RequestAdapter: chunks become items, errors become error items, and every ending is one of the few allowed."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from copy import copy
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import DisaggregationMode, EngineConfig, GenerateContext, LLMEngine, RequestAdapter
from pipeline import (
    Annotated,
    Cancelled,
    Context,
    ContractViolation,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    PenstockError,
    StreamIncomplete,
)
from pipeline.errors import BackendCancelled, BackendInvalidArgument, BackendUnknown, chain, may_migrate
from pipeline.protocols import (
    FinishReason,
    LLMEngineOutput,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)

pytestmark = pytest.mark.anyio

Chunk = LLMEngineOutput
Saying = Callable[[PreprocessedRequest, GenerateContext], Any]


class Says(LLMEngine):
    """An engine of one function, which counts its open generators."""

    def __init__(self, saying: Saying) -> None:
        self.saying = saying
        self.asked: list[tuple[PreprocessedRequest, GenerateContext]] = []
        self.open = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="says")

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.asked.append((request, context))
        made = self.saying(request, context)
        return made if isinstance(made, Awaitable) else self._counted(made)

    async def _counted(self, made: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        try:
            async with aclosing(made) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.open -= 1

    async def cleanup(self) -> None:
        """There is nothing to release."""


class HearsKill(Says):
    hears_kill = True


def saying(*steps: Any) -> Says:
    """An engine that yields the chunks among the steps, raises the errors, and waits for ever at a None."""

    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Any, None]:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if step is None:
                await anyio.sleep_forever()
            yield step

    return Says(say)


def request(**fields: Any) -> Context[PreprocessedRequest]:
    return Context(PreprocessedRequest([1, 2], **fields))


async def answer(engine: LLMEngine, asked: Context[Any] | None = None, **settings: Any) -> list[Annotated[Chunk]]:
    async with await RequestAdapter(engine, **settings).generate(asked or request()) as stream:
        return [item async for item in stream]


async def failure(engine: LLMEngine, asked: Context[Any] | None = None, **settings: Any) -> PenstockError:
    """The error that ends the stream."""
    error = (await answer(engine, asked, **settings))[-1].extract_error()
    assert error is not None
    return error


# -- undisturbed


async def test_each_chunk_is_a_data_item_and_the_last_has_the_finish_reason() -> None:
    """BE-52."""
    engine = saying(Chunk.token(11), Chunk.token(22), Chunk.length())
    assert await answer(engine) == [Annotated(Chunk.token(11)), Annotated(Chunk.token(22)), Annotated(Chunk.length())]
    assert engine.open == 0


async def test_the_engine_sees_the_request_and_its_life() -> None:
    engine, asked = saying(Chunk.stop()), Context(PreprocessedRequest([1]), metadata={"tenant": "a"})
    await answer(engine, asked)
    ((payload, context),) = engine.asked
    assert payload is asked.payload
    assert (context.id, context.control, context.metadata) == (asked.id, asked.control, {"tenant": "a"})


async def test_after_the_terminal_chunk_the_engine_is_not_read_again() -> None:
    """BE-55."""
    engine = saying(Chunk.token(1), Chunk.stop(), None)
    with anyio.fail_after(1):
        assert len(await answer(engine)) == 2
    assert engine.open == 0


@pytest.mark.parametrize("last", [Chunk.cancelled(), Chunk.error("no memory"), Chunk.stop().with_tokens([3])])
async def test_a_terminal_chunk_is_handed_on_as_it_is(last: Chunk) -> None:
    """BE-56."""
    assert await answer(saying(last)) == [Annotated(last)]


async def test_each_of_several_choices_has_its_terminal_chunk() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=i, finish_reason=finish) for finish in (None, FinishReason.STOP) for i in (0, 1)]
    assert [item.data for item in await answer(saying(*chunks, None), two)] == chunks


async def test_a_coroutine_may_set_the_chunks_up() -> None:
    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await checkpoint()
        return saying(Chunk.stop()).generate(request, context)

    assert await answer(Says(set_up)) == [Annotated(Chunk.stop())]


# -- errors


async def test_what_setting_up_raises_goes_to_the_caller() -> None:
    """BE-53."""

    async def refuse(request: PreprocessedRequest, context: GenerateContext) -> Any:
        raise InvalidArgument("no such adapter", field="lora")

    with pytest.raises(InvalidArgument) as caught:
        await RequestAdapter(Says(refuse)).generate(request())
    assert caught.value.field == "lora"


async def test_a_foreign_error_of_setting_up_is_a_backend_error() -> None:
    def refuse(request: PreprocessedRequest, context: GenerateContext) -> Any:
        raise ValueError("no such adapter")

    with pytest.raises(BackendInvalidArgument, match="no such adapter") as caught:
        await RequestAdapter(Says(refuse)).generate(request())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("before", [[], [Chunk.token(1)], [Chunk.token(1)] * 3])
@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (InvalidArgument("too long"), InvalidArgument),
        (EngineShutdown("gone"), EngineShutdown),
        (TypeError("not a list"), BackendInvalidArgument),
        (RuntimeError("lost the device"), BackendUnknown),
    ],
)
async def test_what_the_engine_raises_ends_the_stream_as_an_error_item(
    before: list[Chunk], raised: Exception, shown: type
) -> None:
    engine = saying(*before, raised)
    items = await answer(engine)
    assert [item.data for item in items[:-1]] == before
    error = items[-1].extract_error()
    assert (type(error), str(error)) == (shown, str(raised))
    assert engine.open == 0


@pytest.mark.parametrize("where", ["set up", "before the first chunk", "mid-stream"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("raised", "shown", "status", "migrates"),
    [
        (InvalidArgument("too long"), InvalidArgument, 400, False),
        (EngineShutdown("gone"), EngineShutdown, 500, True),
        (ValueError("no such tool"), BackendInvalidArgument, 400, False),
    ],
)
async def test_an_error_out_of_a_task_group_keeps_its_class(
    where: str, depth: int, raised: Exception, shown: type[PenstockError], status: int, migrates: bool
) -> None:
    """Issue 12, point 12: it became a BackendUnknown, which is status 500 and moves nowhere."""

    async def fail(depth: int) -> None:
        if not depth:
            raise copy(raised)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, depth - 1)

    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        if where == "mid-stream":
            yield Chunk.token(1)
        await fail(depth)
        yield Chunk.stop()

    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await fail(depth)

    error: PenstockError | None
    if where == "set up":
        with pytest.raises(shown) as caught:
            await answer(Says(set_up))
        error = caught.value
    else:
        error = (await answer(Says(say)))[-1].extract_error()
    assert (type(error), str(error)) == (shown, str(raised))
    assert error is not None
    assert (error.facts.status, may_migrate(error)) == (status, migrates)
    assert any(isinstance(link, ExceptionGroup) for link in chain(error))
    assert "".join(traceback.format_exception(error)).count(str(raised)) < 9


async def test_errors_of_a_task_group_that_differ_are_one_of_no_known_kind() -> None:
    """Each of them may lead to something else, so none of them decides."""
    group = ExceptionGroup("tasks", [InvalidArgument("too long"), ExceptionGroup("inner", [EngineShutdown("gone")])])
    (item,) = await answer(saying(group))
    error = item.extract_error()
    assert type(error) is BackendUnknown
    assert "InvalidArgument: too long" in str(error)
    assert "EngineShutdown: gone" in str(error)


async def test_errors_of_a_task_group_that_are_alike_are_the_first_of_them() -> None:
    group = ExceptionGroup("tasks", [EngineShutdown("first"), ExceptionGroup("inner", [EngineShutdown("second")])])
    (item,) = await answer(saying(group))
    error = item.extract_error()
    assert (type(error), str(error)) == (EngineShutdown, "first")


async def test_a_cancellation_out_of_a_task_group_is_understood_after_a_stop() -> None:
    asked = request()
    asked.stop()
    items = await (await RequestAdapter(saying(ExceptionGroup("tasks", [Cancelled()]))).generate(asked)).collect()
    assert items == [Annotated(Chunk.cancelled())]


async def test_an_engine_that_raises_loses_only_that_request() -> None:
    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        if request.token_ids == [13]:
            raise RuntimeError("unlucky")
        yield Chunk.stop()

    engine = Says(say)
    await failure(engine, Context(PreprocessedRequest([13])))
    assert await answer(engine) == [Annotated(Chunk.stop())]


async def test_a_stream_without_its_terminal_chunk_is_incomplete_and_may_go_on_elsewhere() -> None:
    """BE-95, held here and not only in a test of the engine."""
    for engine in (saying(), saying(Chunk.token(1), Chunk.token(2))):
        error = await failure(engine)
        assert isinstance(error, StreamIncomplete)
        assert may_migrate(error)


async def test_what_is_no_chunk_breaks_the_contract() -> None:
    for before in ([], [Chunk.token(1)], [Chunk.token(1), Chunk.token(2)]):
        error = await failure(saying(*before, {"token_ids": [3]}, Chunk.stop()))
        assert isinstance(error, ContractViolation)
        assert error.rule == "L1"


async def test_a_chunk_of_a_choice_that_has_ended_breaks_the_contract() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=0), Chunk([], index=0, finish_reason=FinishReason.STOP), Chunk([2], index=0)]
    items = await answer(saying(*chunks), two)
    assert [item.data for item in items[:2]] == chunks[:2]
    assert isinstance(items[2].extract_error(), ContractViolation)


@pytest.mark.parametrize("index", [1, -1, 7])
@pytest.mark.parametrize("before", [0, 1, 2, 5])
async def test_a_chunk_of_a_choice_that_was_not_asked_for_breaks_the_contract_wherever_it_comes(
    before: int, index: int
) -> None:
    """Issue 12, point 25: behind the first chunk it passed."""
    items = await answer(saying(*[Chunk.token(1)] * before, Chunk([2], index=index), Chunk.stop()))
    assert [item.data for item in items[:-1]] == [Chunk.token(1)] * before
    error = items[-1].extract_error()
    assert isinstance(error, ContractViolation)
    assert error.rule == "L1"


async def test_an_answer_that_is_given_up_in_its_middle_without_a_stop_breaks_the_contract() -> None:
    """Issue 12, point 25: a client was shown half an answer as a whole one."""
    for before in ([Chunk.token(1)], [Chunk([])], [Chunk.token(1)] * 3):
        engine = saying(*before, Chunk.cancelled(), None)
        items = await answer(engine)
        assert [item.data for item in items[:-1]] == before
        error = items[-1].extract_error()
        assert isinstance(error, ContractViolation)
        assert error.rule == "L1"
        assert engine.open == 0


async def test_a_choice_that_is_given_up_behind_another_without_a_stop_breaks_the_contract() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=i, finish_reason=r) for i, r in enumerate((FinishReason.STOP, FinishReason.CANCELLED))]
    items = await answer(saying(*chunks), two)
    assert [item.data for item in items[:-1]] == chunks[:1]
    assert isinstance(items[-1].extract_error(), ContractViolation)


async def test_an_engine_that_knows_one_choice_only_is_not_asked_for_several_again() -> None:
    """As a stream that broke off it would be, on every worker in turn."""
    error = await failure(saying(Chunk.token(1), Chunk.stop()), request(sampling_options=SamplingOptions(n=2)))
    assert isinstance(error, ContractViolation)
    assert not may_migrate(error)


async def test_what_a_request_held_is_free_before_its_error_is_seen() -> None:
    for step in (RuntimeError("lost the device"), 7):
        engine = saying(Chunk.token(1), step, None)
        async with await RequestAdapter(engine).generate(request()) as stream:
            await anext(stream)
            assert engine.open == 1
            assert (await anext(stream)).is_error
            assert engine.open == 0


# -- stop


async def test_an_engine_that_just_ends_after_a_stop_gets_its_cancelled_chunk() -> None:
    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        while not context.is_stopped:
            yield Chunk.token(1)

    asked = request()
    async with await RequestAdapter(Says(say)).generate(asked) as stream:
        await anext(stream)
        asked.stop()
        assert [item async for item in stream] == [Annotated(Chunk.cancelled())]


@pytest.mark.parametrize("raised", [Cancelled("given up"), BackendCancelled("given up")])
async def test_an_engine_that_says_cancelled_by_raising_is_understood_after_a_stop_only(raised: Exception) -> None:
    asked = request()
    async with await RequestAdapter(saying(Chunk.token(1), raised)).generate(asked) as stream:
        await anext(stream)
        asked.stop()
        assert [item async for item in stream] == [Annotated(Chunk.cancelled())]
    assert isinstance(await failure(saying(Chunk.token(1), raised)), type(raised))


@pytest.mark.parametrize("way", ["stop", "kill", "neither"])
async def test_an_engine_that_waits_for_something_of_its_own_that_is_cancelled_does_not_cancel_its_reader(
    way: str,
) -> None:
    """As the task that does a request's work is, on asyncio, by the engine's own `abort` or `cleanup`."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        pytest.skip("of asyncio")
    work = loop.create_future()

    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        yield Chunk.token(1)
        await work

    engine, asked = Says(say), request()
    async with await RequestAdapter(engine).generate(asked) as stream:
        await anext(stream)
        if way != "neither":
            getattr(asked, way)()
        loop.call_soon(work.cancel)
        rest = [item async for item in stream]
    if way == "stop":
        assert rest == [Annotated(Chunk.cancelled())]
    elif way == "kill":
        assert rest == []
    else:
        assert isinstance(rest[0].extract_error(), BackendCancelled)
    assert engine.open == 0
    await checkpoint()


async def test_an_error_after_a_stop_is_still_an_error() -> None:
    asked = request()
    asked.stop()
    assert isinstance(await failure(saying(Disconnected("lost")), asked), Disconnected)


async def test_a_stop_beforehand_is_the_engines_to_see() -> None:
    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        yield Chunk.cancelled() if context.is_stopped else Chunk.stop()

    asked = request()
    asked.stop()
    assert await answer(Says(say), asked) == [Annotated(Chunk.cancelled())]


async def test_a_stop_after_the_end_changes_nothing() -> None:
    asked = request()
    async with await RequestAdapter(saying(Chunk.stop(), None)).generate(asked) as stream:
        await anext(stream)
        asked.stop()
        assert [item async for item in stream] == []


# -- kill, close, drop


async def test_a_kill_ends_a_stream_whose_engine_waits() -> None:
    engine, asked = saying(Chunk.token(1), None), request()
    items: list[Any] = []

    async def read() -> None:
        items.extend(await (await RequestAdapter(engine).generate(asked)).collect())

    with anyio.fail_after(1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            asked.kill()
    assert items == [Annotated(Chunk.token(1))]
    assert engine.open == 0


async def test_after_a_kill_nothing_comes_not_even_an_error() -> None:
    for rest in ([Chunk.token(2), Chunk.stop()], [RuntimeError("killed")], []):
        for made in (saying(Chunk.token(1), *rest), HearsKill(saying(Chunk.token(1), *rest).saying)):
            asked = request()
            async with await RequestAdapter(made).generate(asked) as stream:
                await anext(stream)
                asked.kill()
                assert [item async for item in stream] == []
            assert made.open == 0


async def test_a_kill_while_the_engine_sets_up_is_cancelled() -> None:
    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await anyio.sleep_forever()

    asked = request()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_kill_later, asked)
        with anyio.fail_after(5), pytest.raises(Cancelled):
            await RequestAdapter(Says(set_up)).generate(asked)
    with pytest.raises(Cancelled):
        await RequestAdapter(Says(set_up)).generate(asked)


async def test_a_set_up_that_waits_for_something_that_is_cancelled_does_not_cancel_its_caller() -> None:
    try:
        work = asyncio.get_running_loop().create_future()
    except RuntimeError:
        pytest.skip("of asyncio")
    work.cancel()

    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await work

    with pytest.raises(BackendCancelled):
        await RequestAdapter(Says(set_up)).generate(request())
    await checkpoint()


async def _kill_later(asked: Context[Any]) -> None:
    await anyio.sleep(1)
    asked.kill()


async def test_closing_ends_the_engines_generator() -> None:
    for items in (0, 1, 2):
        engine = saying(*[Chunk.token(1)] * 5)
        async with await RequestAdapter(engine).generate(request()) as stream:
            for _ in range(items):
                await anext(stream)
            assert engine.open == (items > 0)
        assert engine.open == 0


@pytest.mark.parametrize("made", [Says, HearsKill])
async def test_what_closing_the_engines_generator_raises_is_logged(
    made: type[Says], caplog: pytest.LogCaptureFixture
) -> None:
    async def say(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        try:
            yield Chunk.token(1)
            yield Chunk.stop()
            await anyio.sleep_forever()
        finally:
            raise RuntimeError("was not done")

    caplog.set_level(logging.ERROR)
    assert [item.data for item in await answer(made(say))] == [Chunk.token(1), Chunk.stop()]
    async with await RequestAdapter(made(say)).generate(request()) as stream:
        await anext(stream)
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["was not done"] * 2


# -- roles


async def test_a_prefill_engine_is_asked_for_one_token() -> None:
    """BE-118."""
    engine = saying(Chunk.stop().with_tokens([5]))
    asked = request(stop_conditions=StopConditions(max_tokens=100))
    await answer(engine, asked, mode=DisaggregationMode.PREFILL)
    assert engine.asked[0][0].stop_conditions.max_tokens == 1
    assert asked.payload.stop_conditions.max_tokens == 100


async def test_a_decode_engine_is_not_asked_without_a_prefill() -> None:
    """BE-119: a probe is."""
    engine, decode = saying(Chunk.stop()), DisaggregationMode.DECODE
    with pytest.raises(InvalidArgument):
        await answer(engine, mode=decode)
    assert engine.asked == []
    await answer(engine, request(is_probe=True), mode=decode)
    await answer(engine, request(prefill_result=PrefillResult({})), mode=decode)


async def test_a_decode_engine_that_may_prefill_is_given_the_request_as_it_is() -> None:
    engine, asked = saying(Chunk.stop()), request()
    await answer(engine, asked, mode=DisaggregationMode.DECODE, may_prefill=True)
    assert [payload for payload, _ in engine.asked] == [asked.payload]


async def test_an_encode_engine_that_ends_without_its_result_breaks_the_contract() -> None:
    encode = DisaggregationMode.ENCODE
    assert isinstance(await failure(saying(Chunk.stop()), mode=encode), ContractViolation)
    for last in (Chunk.encode_terminal({}), Chunk.cancelled(), Chunk.error("no image")):
        assert await answer(saying(last), mode=encode) == [Annotated(last)]
