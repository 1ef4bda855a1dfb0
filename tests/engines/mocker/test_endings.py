"""Requests of a mock engine that are ended at any point, and a loop that ends under them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import DisaggregationMode, GenerateContext, as_engine
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange
from pipeline import Context, EngineShutdown
from pipeline.protocols import (
    BootstrapInfo,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)

from .worlds import Steady, assert_empty

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=64)
SLOW = evolve(ARGS, worker_type="prefill", kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=0.01)
"""A prefill worker that sends its last chunk a second after the one before it, for a prompt of ten tokens."""


def request(prompt: int = 10, max_tokens: int = 5, choices: int = 1, **fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(
        list(range(prompt)),
        stop_conditions=StopConditions(max_tokens=max_tokens),
        sampling_options=SamplingOptions(n=choices),
        **fields,
    )


def assert_each_choice_ends_at_most_once(chunks: list[LLMEngineOutput], choices: int) -> None:
    ended: set[int] = set()
    for chunk in chunks:
        index = chunk.index or 0
        assert index < choices
        assert index not in ended, "nothing follows the terminal chunk of a choice"
        if chunk.finish_reason is not None:
            ended.add(index)


async def read_until(stream: Any, count: int) -> list[LLMEngineOutput]:
    return [(await anext(stream)).ok().data for _ in range(count)]


async def read_all(stream: Any) -> list[LLMEngineOutput]:
    return [item.ok().data for item in await stream.collect()]


@pytest.mark.parametrize("ending", ["stop", "kill", "close"])
@pytest.mark.parametrize("choices", [1, 3])
async def test_an_answer_may_be_ended_after_each_of_its_chunks(ending: str, choices: int) -> None:
    engine = MockEngine(ARGS)
    async with as_engine(engine) as served:
        for read in range(choices * 6):
            context = Context(request(choices=choices))
            stream = await served.generate(context)
            chunks = await read_until(stream, read)
            if ending == "close":
                await stream.aclose()
            else:
                getattr(context.control, ending)()
                rest = await read_all(stream)
                assert [chunk.finish_reason for chunk in rest] == [FinishReason.CANCELLED] * (ending == "stop")
                chunks += rest
            assert_each_choice_ends_at_most_once(chunks, choices)
            assert_empty(engine)


async def test_a_stop_after_the_last_choice_has_ended_cancels_another_one() -> None:
    """With fifo the first choice is preempted, so the second one ends before it."""
    engine = MockEngine(evolve(ARGS, num_gpu_blocks=9, preemption_mode="fifo", enable_prefix_caching=False))
    async with as_engine(engine) as served:
        context = Context(request(10, 14, choices=2))
        chunks: list[LLMEngineOutput] = []
        stream: Any = await served.generate(context)
        async with stream:
            async for item in stream:
                chunks.append(item.ok().data)
                if chunks[-1].finish_reason is FinishReason.LENGTH:
                    context.control.stop()
        assert engine.ranks[0].scheduler.preemptions
    assert [(chunk.index, chunk.finish_reason) for chunk in chunks if chunk.finish_reason is not None] == [
        (1, FinishReason.LENGTH),
        (0, FinishReason.CANCELLED),
    ]
    assert_empty(engine)


async def test_no_tokens_of_several_choices_are_a_last_chunk_for_each() -> None:
    async with as_engine(MockEngine(ARGS)) as served:
        chunks = await read_all(await served.generate(Context(request(max_tokens=0, choices=3))))
    assert [(chunk.index, chunk.finish_reason) for chunk in chunks] == [
        (index, FinishReason.LENGTH) for index in range(3)
    ]


# -- while the last chunk waits for its transfer


@pytest.mark.parametrize("choices", [1, 2])
async def test_only_the_very_last_chunk_waits_for_the_transfer(choices: int) -> None:
    async with as_engine(MockEngine(SLOW, timing=Steady())) as served:
        times: list[float] = []
        async with await served.generate(Context(request(choices=choices))) as stream:
            begun_s = anyio.current_time()
            async for _ in stream:
                times.append(anyio.current_time() - begun_s)
    assert times[:-1] == [pytest.approx(0.01, abs=0.001)] * (2 * choices - 1)
    assert times[-1] == pytest.approx(1.01, abs=0.001)


@pytest.mark.parametrize("ending", ["stop", "kill", "close", "cleanup"])
@pytest.mark.parametrize("choices", [1, 2])
async def test_an_answer_that_waits_for_its_transfer_is_ended_at_once(ending: str, choices: int) -> None:
    engine = MockEngine(SLOW, timing=Steady())
    context = Context(request(choices=choices))
    ended: list[float] = []
    rest: list[LLMEngineOutput] = []

    async def read(stream: Any, scope: anyio.CancelScope) -> None:
        with scope:
            async with stream:
                async for item in stream:
                    rest.append(item.ok().data)
        ended.append(anyio.current_time())

    async with as_engine(engine) as served, anyio.create_task_group() as tasks:
        stream, scope = await served.generate(context), anyio.CancelScope()
        tasks.start_soon(read, stream, scope)
        await anyio.sleep(0.5)
        if ending == "close":
            scope.cancel()
        elif ending == "cleanup":
            await engine.cleanup()
        else:
            getattr(context.control, ending)()
        now_s = anyio.current_time()
        await anyio.sleep(0.01)
        assert ended == [now_s]
        assert_empty(engine)
    is_notified = ending in ("stop", "cleanup")
    assert [chunk.finish_reason for chunk in rest if chunk.finish_reason is not None] == (
        [FinishReason.LENGTH] * (choices - 1) + [FinishReason.CANCELLED] * is_notified
    )
    assert_each_choice_ends_at_most_once(rest, choices)


# -- hand-overs


@pytest.mark.parametrize("worker_type", ["prefill", "decode"])
async def test_a_hand_over_is_ended_by_the_end_of_its_engine(worker_type: Any) -> None:
    """The half waits for its other side, which may take half a minute to come."""
    engine = MockEngine(evolve(ARGS, worker_type=worker_type), exchange=TransferExchange(), timing=Steady())
    received: list[FinishReason | None] = []
    async with anyio.create_task_group() as tasks:
        async with as_engine(engine, mode=DisaggregationMode(worker_type)) as served:

            async def read() -> None:
                payload = request(bootstrap_info=BootstrapInfo("host", 1, 7))
                received.extend(
                    chunk.finish_reason for chunk in await read_all(await served.generate(Context(payload)))
                )

            tasks.start_soon(read)
            await anyio.sleep(0.5)
            begun_s = anyio.current_time()
            await engine.cleanup()
        await anyio.sleep(0.001)
        assert anyio.current_time() - begun_s < 0.01
        assert received[-1:] == [FinishReason.CANCELLED]
        assert_empty(engine)
        assert engine.exchange is not None
        assert engine.exchange.waiting == engine.exchange.sessions == 0


async def test_a_reservation_gets_the_blocks_of_a_finished_request_that_is_not_read() -> None:
    """Its blocks are free after its last pass, not when its reader has reached the end."""
    exchange = TransferExchange()
    args = evolve(ARGS, num_gpu_blocks=4, kv_transfer_bandwidth=None)
    decode = MockEngine(evolve(args, worker_type="decode"), exchange=exchange, timing=Steady())
    prefill = MockEngine(evolve(args, worker_type="prefill"), exchange=exchange, timing=Steady())
    async with (
        as_engine(decode) as receiver,
        as_engine(prefill) as sender,
        await receiver.generate(
            Context(PreprocessedRequest([99] * 8, stop_conditions=StopConditions(max_tokens=5)))
        ) as unread,
        anyio.create_task_group() as tasks,
    ):
        await anext(unread)

        async def read(served: Any) -> None:
            payload = request(10, 2, bootstrap_info=BootstrapInfo("host", 1, 7))
            await (await served.generate(Context(payload, id="x"))).collect()
            finished.append(served)

        finished: list[Any] = []
        for served in (receiver, sender):
            tasks.start_soon(read, served)
        await anyio.sleep(5)
        assert len(finished) == 2
    assert_empty(decode)
    assert_empty(prefill)


async def test_a_reservation_that_waits_for_room_fails_when_the_loop_ends() -> None:
    exchange = TransferExchange("destination_first")
    engine = MockEngine(evolve(ARGS, num_gpu_blocks=4, worker_type="decode"), exchange=exchange, timing=Steady())
    await engine.start(0)
    failed: list[Exception] = []

    async def read(payload: PreprocessedRequest) -> None:
        try:
            async for _ in engine.generate(payload, GenerateContext(Context(None))):
                pass
        except EngineShutdown as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await engine.background()

        tasks.start_soon(run)
        tasks.start_soon(read, request(12, 5))
        await anyio.sleep(0.03)
        tasks.start_soon(read, PreprocessedRequest([99] * 16, bootstrap_info=BootstrapInfo("host", 1, 7)))
        await anyio.sleep(0.03)
        assert failed == []
        scope.cancel()
        await anyio.sleep(0.001)
        assert len(failed) == 2
    assert_empty(engine)
    await engine.cleanup()


# -- the loop


async def test_requests_that_come_before_the_loop_runs_are_served_by_it() -> None:
    engine = MockEngine(ARGS)
    await engine.start(0)
    received: list[LLMEngineOutput] = []

    async def read() -> None:
        async for chunk in engine.generate(request(), GenerateContext(Context(None))):
            received.append(chunk)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.sleep(1)
        assert received == []
        tasks.start_soon(engine.background)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    assert [chunk.finish_reason for chunk in received] == [None] * 5 + [FinishReason.LENGTH]
    assert_empty(engine)
    await engine.cleanup()


async def test_a_loop_that_ends_fails_waiting_and_later_requests() -> None:
    engine = MockEngine(evolve(ARGS, num_gpu_blocks=8))
    await engine.start(0)
    failed: list[str] = []

    async def read(name: str, prompt: int) -> None:
        try:
            async for _ in engine.generate(request(prompt, 8), GenerateContext(Context(None))):
                pass
        except EngineShutdown:
            failed.append(name)

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await engine.background()

        tasks.start_soon(run)
        tasks.start_soon(read, "running", 20)
        await anyio.sleep(0.001)
        tasks.start_soon(read, "waiting", 20)
        await anyio.sleep(0.04)
        assert failed == []
        scope.cancel()
        await anyio.sleep(0.001)
        assert sorted(failed) == ["running", "waiting"]
        with anyio.fail_after(1):
            await read("late", 3)
        assert failed[-1] == "late"
    assert_empty(engine)
    await engine.cleanup()
