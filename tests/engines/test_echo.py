"""EchoEngine: echoes the prompt within the limits of the request."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from engines import EchoEngine, as_engine, run_conformance
from pipeline import Annotated, Context, InvalidArgument
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from pipeline.testing import check_engine, run_in_virtual_time

STOP, LENGTH, CANCELLED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED


def counting_request(prompt: int, n: int | None = None, **conditions: Any) -> PreprocessedRequest:
    """Return a request whose prompt is 0, 1, 2, ... of that length."""
    sampling = SamplingOptions(n=n)
    return PreprocessedRequest(
        list(range(prompt)), stop_conditions=StopConditions(**conditions), sampling_options=sampling
    )


async def echo(request: PreprocessedRequest, delay_s: float = 0.0) -> list[LLMEngineOutput]:
    async with as_engine(EchoEngine(delay_s)) as engine:
        items = await (await engine.generate(Context(request))).collect()
    outputs = [item.data for item in items]
    assert None not in outputs
    return [output for output in outputs if output is not None]


def tokens(outputs: list[LLMEngineOutput], index: int | None = None) -> list[int]:
    return [token_id for output in outputs if output.index == index for token_id in output.token_ids]


@pytest.mark.parametrize(
    ("request_", "expected", "finish"),
    [
        (counting_request(3), [0, 1, 2], STOP),
        (counting_request(3, max_tokens=9), [0, 1, 2], STOP),
        (counting_request(3, max_tokens=3), [0, 1, 2], LENGTH),
        (counting_request(3, max_tokens=2), [0, 1], LENGTH),
        (counting_request(3, max_tokens=0), [], LENGTH),
        (counting_request(3, max_tokens=7, ignore_eos=True), [0, 1, 2, 0, 1, 2, 0], LENGTH),
        (counting_request(3, ignore_eos=True), [0, 1, 2], STOP),
        (counting_request(3, min_tokens=5), [0, 1, 2, 0, 1], STOP),
        (counting_request(3, min_tokens=5, max_tokens=8), [0, 1, 2, 0, 1], STOP),
        (counting_request(0), [], STOP),
        (counting_request(0, max_tokens=5, ignore_eos=True), [], STOP),
        (counting_request(0, min_tokens=5), [], STOP),
        (PreprocessedRequest([1], is_probe=True), [1], STOP),
    ],
)
async def test_it_ends_with_the_prompt_or_at_its_limit(
    request_: PreprocessedRequest, expected: list[int], finish: FinishReason
) -> None:
    """The last prompt is that of a health probe."""
    outputs = await echo(request_)
    assert tokens(outputs) == expected
    assert all(len(output.token_ids) == 1 for output in outputs[:-1]), "one token an item"
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [finish]
    assert outputs[-1].completion_usage == CompletionUsage.of(len(request_.token_ids), len(expected))


@given(prompt=st.integers(0, 5), n=st.integers(1, 4), limits=st.tuples(st.none() | st.integers(0, 9), st.booleans()))
def test_every_choice_echoes_the_same_and_ends_once(prompt: int, n: int, limits: tuple[int | None, bool]) -> None:
    max_tokens, ignore_eos = limits
    conditions = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
    outputs = run_in_virtual_time(echo, counting_request(prompt, n, **conditions), backend="asyncio")
    alone = tokens(run_in_virtual_time(echo, counting_request(prompt, **conditions), backend="asyncio"))
    indexes: list[int | None] = [None] if n == 1 else list(range(n))
    for index in indexes:
        assert tokens(outputs, index) == alone
        finishes = [output.finish_reason for output in outputs if output.index == index]
        assert finishes.count(None) == len(finishes) - 1
        assert finishes[-1] is not None
    assert [output.completion_usage is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
    assert outputs[-1].completion_usage == CompletionUsage.of(prompt, len(alone) * n)


async def test_choices_take_turns() -> None:
    assert [(output.token_ids, output.index) for output in await echo(counting_request(2, 2))] == [
        ([0], 0),
        ([0], 1),
        ([1], 0),
        ([1], 1),
    ]


async def test_each_token_takes_its_delay() -> None:
    began = anyio.current_time()
    assert len(await echo(counting_request(4), delay_s=2.5)) == 4
    assert anyio.current_time() - began == pytest.approx(10.0)


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
async def test_a_stop_gives_one_cancelled_item_with_the_emitted_count(delay_s: float) -> None:
    context = Context(counting_request(100))
    async with as_engine(EchoEngine(delay_s)) as engine, await engine.generate(context) as stream:
        await stream.__anext__()
        context.stop()
        rest = [item async for item in stream]
    assert rest == [
        Annotated(LLMEngineOutput([], finish_reason=CANCELLED, completion_usage=CompletionUsage.of(100, 1)))
    ]


async def test_a_stop_gives_one_cancelled_item_for_all_choices() -> None:
    context = Context(counting_request(100, 3))
    async with as_engine(EchoEngine()) as engine, await engine.generate(context) as stream:
        await stream.__anext__()
        context.stop()
        assert [item.data and item.data.finish_reason for item in await stream.collect()] == [CANCELLED]


async def test_a_stop_between_the_ends_of_two_choices_cancels_the_one_that_goes_on() -> None:
    context = Context(counting_request(1, 2))
    async with as_engine(EchoEngine()) as engine, await engine.generate(context) as stream:
        assert (await stream.__anext__()).data == LLMEngineOutput([0], index=0, finish_reason=STOP)
        context.stop()
        (last,) = [item.data async for item in stream]
    assert last is not None
    assert (last.index, last.finish_reason) == (1, CANCELLED)


async def test_nothing_follows_the_last_item_even_after_a_stop() -> None:
    context = Context(counting_request(1))
    async with as_engine(EchoEngine()) as engine, await engine.generate(context) as stream:
        await stream.__anext__()
        context.stop()
        assert [item async for item in stream] == []


@pytest.mark.parametrize(("verb", "items"), [("stop", 1), ("kill", 0)])
async def test_a_delay_is_cut_short(verb: str, items: int) -> None:
    context = Context(counting_request(100))
    began = anyio.current_time()
    async with as_engine(EchoEngine(delay_s=3600)) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_later, verb, context)
        assert len(await (await engine.generate(context)).collect()) == items
    assert anyio.current_time() - began < 2


async def _later(verb: str, context: Context[Any]) -> None:
    await anyio.sleep(1)
    getattr(context, verb)()


async def test_a_long_answer_without_a_delay_lets_others_run() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await echo(counting_request(10_000))
        tasks.cancel_scope.cancel()
    assert turns > 100


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (counting_request(3, n=0), "n"),
        (counting_request(3, max_tokens=2, min_tokens=3), "max_tokens"),
        (counting_request(3, max_tokens=-1), "max_tokens"),
        (PreprocessedRequest([], prompt_embeds="AAAA"), "prompt_embeds"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_before_its_first_item(
    request_: PreprocessedRequest, field: str
) -> None:
    async with as_engine(EchoEngine()) as engine, await engine.generate(Context(request_)) as stream:
        (item,) = [item async for item in stream]
    error = item.extract_error()
    assert isinstance(error, InvalidArgument)
    assert error.field == field


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
async def test_both_engine_contracts_hold(delay_s: float) -> None:
    await check_engine(
        lambda: as_engine(EchoEngine(delay_s)), request=counting_request(60, 2), bad_request=counting_request(1, n=0)
    )
    await run_conformance(lambda: EchoEngine(delay_s))
