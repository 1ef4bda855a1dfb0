"""Tokens of the mock engine that wait for their reader are one chunk; the answer is that of tokens that come apart."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from engines.ready_tokens import BUNDLE_MAX_CANDIDATES, BUNDLE_MAX_TOKENS
from pipeline import Annotated, Context
from pipeline.protocols import (
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from tests.engines.answers import shown

from .worlds import Steady, assert_empty

TOKEN_S = 0.02
LATE_S = 0.11
ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_seqs=8, enable_prefix_caching=False)


def request(tokens: int = 40, *, choices: int | None = None, logprobs: int | None = None) -> PreprocessedRequest:
    return PreprocessedRequest(
        list(range(10)),
        stop_conditions=StopConditions(max_tokens=tokens),
        sampling_options=SamplingOptions(n=choices),
        output_options=OutputOptions(logprobs=logprobs),
    )


def chunk_of(item: Annotated[LLMEngineOutput]) -> LLMEngineOutput:
    chunk = item.ok().data
    assert chunk is not None
    return chunk


async def read(payload: PreprocessedRequest, pause_s: float) -> list[LLMEngineOutput]:
    """Return the chunks of an answer for a reader that takes so long for each."""
    engine = MockEngine(ARGS, timing=Steady())
    found: list[LLMEngineOutput] = []
    async with as_engine(engine) as served, await served.generate(Context(payload)) as stream:
        async for item in stream:
            found.append(chunk_of(item))
            await anyio.sleep(pause_s)
    assert_empty(engine)
    return found


@pytest.mark.parametrize("choices", [None, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_a_late_reader_gets_the_same_answer_in_fewer_chunks(choices: int | None, logprobs: int | None) -> None:
    payload = request(choices=choices, logprobs=logprobs)
    apart, together = await read(payload, 0.0), await read(payload, LATE_S)
    assert shown(apart) == shown(together)
    assert len(apart) == 41 * (choices or 1)
    assert len(together) < len(apart) / 2
    for chunks in (apart, together):
        usage = chunks[-1].completion_usage
        assert usage is not None
        assert usage.completion_tokens == 40 * (choices or 1)
        first = chunks[0]
        assert first.completion_usage is not None
        assert first.completion_usage.completion_tokens == len(first.token_ids)


async def test_a_token_for_a_reader_that_waits_comes_alone_and_at_its_time() -> None:
    engine = MockEngine(ARGS, timing=Steady())
    async with as_engine(engine) as served, await served.generate(Context(request())) as stream:
        came_s = [anyio.current_time() async for item in stream if len(chunk_of(item).token_ids) == 1]
    gaps_s = [later - sooner for sooner, later in pairwise(came_s)]
    assert len(came_s) == 40
    assert gaps_s == pytest.approx([TOKEN_S] * 39, abs=0.002)


async def test_a_chunk_is_bounded_in_tokens_and_in_candidates() -> None:
    plain = await read(request(200), 10.0)
    assert max(len(chunk.token_ids) for chunk in plain) == BUNDLE_MAX_TOKENS
    rich = await read(request(200, logprobs=20), 10.0)
    assert max(len(chunk.token_ids) for chunk in rich) == BUNDLE_MAX_CANDIDATES // 21


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_an_ending_finds_no_token_that_came_after_it(verb: str) -> None:
    engine, context = MockEngine(ARGS, timing=Steady()), Context(request())
    async with as_engine(engine) as served, await served.generate(context) as stream:
        first = chunk_of(await anext(stream))
        await anyio.sleep(LATE_S)
        getattr(context, verb)()
        rest = [chunk_of(item) async for item in stream]
    assert len(first.token_ids) == 1
    if verb == "kill":
        assert rest == []
    else:
        counted = 1 + sum(len(chunk.token_ids) for chunk in rest)
        assert rest[-1].finish_reason == FinishReason.CANCELLED
        usage = rest[-1].completion_usage
        assert usage is not None
        assert usage.completion_tokens == counted
    assert_empty(engine)


async def test_an_error_comes_behind_the_tokens_that_wait() -> None:
    class Failing(Steady):
        steps = 0

        def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
            self.steps += 1
            if self.steps == 5:
                raise ValueError("no time")
            return super().decode_ms(batch, active_kv_tokens, total_kv_tokens, mean_context_tokens)

    engine = MockEngine(ARGS, timing=Failing())
    async with as_engine(engine) as served, await served.generate(Context(request())) as stream:
        first = chunk_of(await anext(stream))
        await anyio.sleep(1.0)
        rest = [item async for item in stream]
    assert len(first.token_ids) == 1
    assert [len(item.data.token_ids) for item in rest[:-1] if item.data is not None] == [3]
    assert rest[-1].is_error
