"""RequestAdapter: chunks become items, and errors become error items."""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator
from copy import copy
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import DisaggregationMode, GenerateContext
from engines.adapter import RequestAdapter
from pipeline import (
    Annotated,
    Cancelled,
    Context,
    ContractViolation,
    EngineShutdown,
    InvalidArgument,
    PenstockError,
    StreamIncomplete,
)
from pipeline.errors import BackendInvalidArgument, BackendUnknown, chain, may_migrate
from pipeline.protocols import (
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from tests.engines.worlds import Chunk, FunctionEngine, answer, failure, request, scripted

# -- undisturbed


async def test_each_chunk_is_a_data_item_and_the_last_has_the_finish_reason() -> None:
    engine = scripted(Chunk.token(11), Chunk.token(22), Chunk.length())
    assert await answer(engine) == [Annotated(Chunk.token(11)), Annotated(Chunk.token(22)), Annotated(Chunk.length())]
    assert engine.open == 0


async def test_the_engine_sees_the_request_and_its_life() -> None:
    engine, caller = scripted(Chunk.stop()), Context(PreprocessedRequest([1]), metadata={"tenant": "a"})
    await answer(engine, caller)
    ((payload, context),) = engine.calls
    assert payload is caller.payload
    assert (context.id, context.control, context.metadata) == (caller.id, caller.control, {"tenant": "a"})


async def test_after_the_terminal_chunk_the_engine_is_not_read_again() -> None:
    engine = scripted(Chunk.token(1), Chunk.stop(), None)
    with anyio.fail_after(1):
        assert len(await answer(engine)) == 2
    assert engine.open == 0


@pytest.mark.parametrize("last", [Chunk.cancelled(), Chunk.error("no memory"), Chunk.stop().with_tokens([3])])
async def test_a_terminal_chunk_is_handed_on_as_it_is(last: Chunk) -> None:
    assert await answer(scripted(last)) == [Annotated(last)]


async def test_each_of_several_choices_has_its_terminal_chunk() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=i, finish_reason=finish) for finish in (None, FinishReason.STOP) for i in (0, 1)]
    assert [item.data for item in await answer(scripted(*chunks, None), two)] == chunks


async def test_a_coroutine_may_set_the_chunks_up() -> None:
    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await checkpoint()
        return scripted(Chunk.stop()).generate(request, context)

    assert await answer(FunctionEngine(set_up)) == [Annotated(Chunk.stop())]


# -- errors


async def test_what_setting_up_raises_goes_to_the_caller() -> None:

    async def refuse(request: PreprocessedRequest, context: GenerateContext) -> Any:
        raise InvalidArgument("no such adapter", field="lora")

    with pytest.raises(InvalidArgument) as caught:
        await RequestAdapter(FunctionEngine(refuse)).generate(request())
    assert caught.value.field == "lora"


async def test_a_foreign_error_of_setting_up_is_a_backend_error() -> None:
    def refuse(request: PreprocessedRequest, context: GenerateContext) -> Any:
        raise ValueError("no such adapter")

    with pytest.raises(BackendInvalidArgument, match="no such adapter") as caught:
        await RequestAdapter(FunctionEngine(refuse)).generate(request())
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
    engine = scripted(*before, raised)
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
    """The error keeps its class; as BackendUnknown it would be status 500 and would not migrate."""

    async def fail(depth: int) -> None:
        if not depth:
            raise copy(raised)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail, depth - 1)

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        if where == "mid-stream":
            yield Chunk.token(1)
        await fail(depth)
        yield Chunk.stop()

    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await fail(depth)

    error: PenstockError | None
    if where == "set up":
        with pytest.raises(shown) as caught:
            await answer(FunctionEngine(set_up))
        error = caught.value
    else:
        error = (await answer(FunctionEngine(generate)))[-1].extract_error()
    assert (type(error), str(error)) == (shown, str(raised))
    assert error is not None
    assert (error.facts.status, may_migrate(error)) == (status, migrates)
    assert any(isinstance(link, ExceptionGroup) for link in chain(error))
    assert "".join(traceback.format_exception(error)).count(str(raised)) < 9


async def test_errors_of_a_task_group_that_differ_are_one_of_no_known_kind() -> None:
    """Each class may be handled differently, so none of them decides."""
    group = ExceptionGroup("tasks", [InvalidArgument("too long"), ExceptionGroup("inner", [EngineShutdown("gone")])])
    (item,) = await answer(scripted(group))
    error = item.extract_error()
    assert type(error) is BackendUnknown
    assert "InvalidArgument: too long" in str(error)
    assert "EngineShutdown: gone" in str(error)


async def test_errors_of_a_task_group_that_are_alike_are_the_first_of_them() -> None:
    group = ExceptionGroup("tasks", [EngineShutdown("first"), ExceptionGroup("inner", [EngineShutdown("second")])])
    (item,) = await answer(scripted(group))
    error = item.extract_error()
    assert (type(error), str(error)) == (EngineShutdown, "first")


async def test_a_cancellation_out_of_a_task_group_is_understood_after_a_stop() -> None:
    caller = request()
    caller.stop()
    items = await (await RequestAdapter(scripted(ExceptionGroup("tasks", [Cancelled()]))).generate(caller)).collect()
    assert items == [Annotated(Chunk.cancelled())]


async def test_an_engine_that_raises_loses_only_that_request() -> None:
    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        if request.token_ids == [13]:
            raise RuntimeError("unlucky")
        yield Chunk.stop()

    engine = FunctionEngine(generate)
    await failure(engine, Context(PreprocessedRequest([13])))
    assert await answer(engine) == [Annotated(Chunk.stop())]


async def test_a_stream_without_its_terminal_chunk_is_incomplete_and_may_go_on_elsewhere() -> None:
    """The adapter keeps this rule, whatever the engine does."""
    for engine in (scripted(), scripted(Chunk.token(1), Chunk.token(2))):
        error = await failure(engine)
        assert isinstance(error, StreamIncomplete)
        assert may_migrate(error)


async def test_a_value_that_is_not_a_chunk_breaks_the_contract() -> None:
    for before in ([], [Chunk.token(1)], [Chunk.token(1), Chunk.token(2)]):
        error = await failure(scripted(*before, {"token_ids": [3]}, Chunk.stop()))
        assert isinstance(error, ContractViolation)
        assert error.rule == "L1"


async def test_a_chunk_of_a_choice_that_has_ended_breaks_the_contract() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=0), Chunk([], index=0, finish_reason=FinishReason.STOP), Chunk([2], index=0)]
    items = await answer(scripted(*chunks), two)
    assert [item.data for item in items[:2]] == chunks[:2]
    assert isinstance(items[2].extract_error(), ContractViolation)


@pytest.mark.parametrize("index", [1, -1, 7])
@pytest.mark.parametrize("before", [0, 1, 2, 5])
async def test_a_chunk_of_an_unrequested_choice_breaks_the_contract_wherever_it_comes(before: int, index: int) -> None:
    """The check covers every chunk, not only the first."""
    items = await answer(scripted(*[Chunk.token(1)] * before, Chunk([2], index=index), Chunk.stop()))
    assert [item.data for item in items[:-1]] == [Chunk.token(1)] * before
    error = items[-1].extract_error()
    assert isinstance(error, ContractViolation)
    assert error.rule == "L1"


async def test_an_answer_that_is_given_up_in_its_middle_without_a_stop_breaks_the_contract() -> None:
    """Otherwise a client would take half an answer for a whole one."""
    for before in ([Chunk.token(1)], [Chunk([])], [Chunk.token(1)] * 3):
        engine = scripted(*before, Chunk.cancelled(), None)
        items = await answer(engine)
        assert [item.data for item in items[:-1]] == before
        error = items[-1].extract_error()
        assert isinstance(error, ContractViolation)
        assert error.rule == "L1"
        assert engine.open == 0


async def test_a_choice_that_is_given_up_behind_another_without_a_stop_breaks_the_contract() -> None:
    two = request(sampling_options=SamplingOptions(n=2))
    chunks = [Chunk([1], index=i, finish_reason=r) for i, r in enumerate((FinishReason.STOP, FinishReason.CANCELLED))]
    items = await answer(scripted(*chunks), two)
    assert [item.data for item in items[:-1]] == chunks[:1]
    assert isinstance(items[-1].extract_error(), ContractViolation)


async def test_an_engine_of_one_choice_gets_no_retry_for_several() -> None:
    """An incomplete stream would be retried on every worker in turn."""
    error = await failure(scripted(Chunk.token(1), Chunk.stop()), request(sampling_options=SamplingOptions(n=2)))
    assert isinstance(error, ContractViolation)
    assert not may_migrate(error)


async def test_what_a_request_held_is_free_before_its_error_is_seen() -> None:
    for step in (RuntimeError("lost the device"), 7):
        engine = scripted(Chunk.token(1), step, None)
        async with await RequestAdapter(engine).generate(request()) as stream:
            await anext(stream)
            assert engine.open == 1
            assert (await anext(stream)).is_error
            assert engine.open == 0


# -- roles


async def test_a_prefill_engine_gets_a_limit_of_one_token() -> None:
    engine = scripted(Chunk.stop().with_tokens([5]))
    caller = request(stop_conditions=StopConditions(max_tokens=100))
    await answer(engine, caller, mode=DisaggregationMode.PREFILL)
    assert engine.calls[0][0].stop_conditions.max_tokens == 1
    assert caller.payload.stop_conditions.max_tokens == 100


async def test_a_decode_engine_gets_no_request_without_a_prefill() -> None:
    """The only request without a prefill that reaches it is a health probe."""
    engine, decode = scripted(Chunk.stop()), DisaggregationMode.DECODE
    with pytest.raises(InvalidArgument):
        await answer(engine, mode=decode)
    assert engine.calls == []
    await answer(engine, request(is_probe=True), mode=decode)
    await answer(engine, request(prefill_result=PrefillResult({})), mode=decode)


async def test_a_decode_engine_that_may_prefill_is_given_the_request_as_it_is() -> None:
    engine, caller = scripted(Chunk.stop()), request()
    await answer(engine, caller, mode=DisaggregationMode.DECODE, may_prefill=True)
    assert [payload for payload, _ in engine.calls] == [caller.payload]


async def test_an_encode_engine_that_ends_without_its_result_breaks_the_contract() -> None:
    encode = DisaggregationMode.ENCODE
    assert isinstance(await failure(scripted(Chunk.stop()), mode=encode), ContractViolation)
    for last in (Chunk.encode_terminal({}), Chunk.cancelled(), Chunk.error("no image")):
        assert await answer(scripted(last), mode=encode) == [Annotated(last)]
