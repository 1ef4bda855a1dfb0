"""Tokens that wait for a slow reader are one item: the contract and the answers are those of tokens that come apart."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import evolve, frozen

from engines import EngineConfig, GenerateContext, LLMEngine, as_engine
from operators import Detokenize, Migration, Model, PushRouter
from pipeline import Annotated, AsyncEngine, Context, EngineShutdown, InvalidArgument
from pipeline.network import static_workers
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from pipeline.testing import check_engine
from tests.pipeline.network.tcp.worlds import OPTIONS, Pair, pair
from tests.pipeline.network.worlds import eventually

KIND: Any = Annotated[LLMEngineOutput]
JOINED = [1, 7, OPTIONS.window_items]
"""None are joined; few; all that may wait."""
TEXT = b"A word, a stop and the rest of it, which is long enough for many items. " * 3


class Letters(LLMEngine):
    """Answers each choice with the letters of a text, all at once but for a wait now and then.

    With `breaks_after` its streams break behind so many letters.
    """

    def __init__(self, breaks_after: int | None = None) -> None:
        self._breaks_after = breaks_after
        self.calls = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="letters")

    async def cleanup(self) -> None:
        pass

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.prompt_embeds is not None:
            raise InvalidArgument("no embeddings")
        self.calls += 1
        choices, known = request.sampling_options.n or 1, len(request.token_ids) - 1
        letters = TEXT[known:]
        for number, letter in enumerate(letters):
            if number % 50 == 49:
                await anyio.sleep(0.01)
            if number == self._breaks_after:
                raise EngineShutdown("the engine broke")
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            for index in range(choices):
                chunk = LLMEngineOutput([letter], index=index if choices > 1 else None)
                if request.output_options.logprobs is not None:
                    chunk.log_probs = [-float(number)]
                yield chunk
        usage = CompletionUsage.of(len(request.token_ids), len(letters))
        for index in range(choices):
            yield LLMEngineOutput(
                [],
                finish_reason=FinishReason.STOP,
                index=index if choices > 1 else None,
                completion_usage=usage if index == choices - 1 else None,
            )


@asynccontextmanager
async def remote(world: Pair, engine: LLMEngine, instance_id: int = 1) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """The engine, as a caller in another process has it."""
    async with as_engine(engine) as local:
        serving, found = await world.serve(local, KIND, instance_id)
        yield found
        await eventually(lambda: serving.running == 0)


def request(**fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest([1], **fields)


def tokens(items: list[Any]) -> list[Any]:
    return [(item.data.index, token_id) for item in items for token_id in item.data.token_ids]


@pytest.mark.parametrize("join_max", JOINED)
async def test_the_contract_holds_however_many_are_joined(join_max: int) -> None:
    @asynccontextmanager
    async def made() -> AsyncIterator[AsyncEngine[Any, Any]]:
        narrow = evolve(OPTIONS, window_items=8, join_max_tokens=join_max)
        async with pair(OPTIONS, narrow) as world, remote(world, Letters()) as engine:
            yield engine

    bad = PreprocessedRequest([], prompt_embeds="AAAA")
    await check_engine(made, request=request(), bad_request=bad, compared=tokens, settle_s=1.0)


@frozen
class Shown:
    """What a client has of an answer: by choice, and the usage."""

    text: dict[int, str]
    token_ids: dict[int, list[int]]
    log_probs: dict[int, list[float]]
    ends: dict[int, tuple[FinishReason | None, Any]]
    usage: CompletionUsage | None


def shown(items: list[Any]) -> Shown:
    found = Shown({}, {}, {}, {}, None)
    for item in items:
        output, index = item.data, item.data.index or 0
        found.text[index] = found.text.get(index, "") + (output.text or "")
        found.token_ids.setdefault(index, []).extend(output.token_ids)
        found.log_probs.setdefault(index, []).extend(output.log_probs or ())
        if output.finish_reason is not None:
            found.ends[index] = output.finish_reason, output.stop_reason
        found = evolve(found, usage=output.completion_usage or found.usage)
    return found


@asynccontextmanager
async def graph(join_max: int, breaks_after: int | None) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """Two workers of other processes below the stages that read their tokens."""
    model = Model.byte_level("letters")
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(pair(OPTIONS, evolve(OPTIONS, join_max_tokens=join_max)))
        first, second = Letters(breaks_after), Letters()
        engines = {
            1: await stack.enter_async_context(remote(world, first, 1)),
            2: await stack.enter_async_context(remote(world, second, 2)),
        }
        yield Migration(3) >> Detokenize(model) >> PushRouter(static_workers(engines))
        assert (first.calls, second.calls) == (1, 0 if breaks_after is None else 1)


async def answer(join_max: int, payload: PreprocessedRequest, breaks_after: int | None, pause_s: float) -> list[Any]:
    """Return the items of an answer to a reader that takes so long for each of its first ten items."""
    async with graph(join_max, breaks_after) as engine:
        found: list[Any] = []
        async with await engine.generate(Context(payload)) as stream:
            async for item in stream:
                found.append(item)
                if len(found) < 10:
                    await anyio.sleep(pause_s)
        return found


REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a stop string": {"stop_conditions": StopConditions(stop=["stop and"])},
    "a shown stop string": {
        "stop_conditions": StopConditions(stop=["long enough"]),
        "sampling_options": SamplingOptions(include_stop_str_in_output=True),
    },
    "a stop id": {"stop_conditions": StopConditions(stop_token_ids=[ord("h")])},
    "no stop before the minimum": {"stop_conditions": StopConditions(stop_token_ids=[ord("h")], min_tokens=200)},
    "several choices": {"sampling_options": SamplingOptions(n=3), "stop_conditions": StopConditions(stop=["rest"])},
    "log probabilities": {"output_options": OutputOptions(logprobs=0)},
}


@pytest.mark.parametrize("breaks_after", [None, 12])
@pytest.mark.parametrize("pause_s", [0.0, 0.004])
@pytest.mark.parametrize("name", REQUESTS)
async def test_the_answer_is_the_same_however_many_are_joined(
    name: str, pause_s: float, breaks_after: int | None
) -> None:
    payload = request(**REQUESTS[name])
    if name == "several choices":
        breaks_after = None  # such a request does not migrate
    apart, few, all_of_them = [await answer(most, payload, breaks_after, pause_s) for most in JOINED]
    assert shown(few) == shown(all_of_them) == shown(apart)
    if name == "plain":
        assert shown(apart).text[0] == TEXT.decode()
        if pause_s:
            assert len(all_of_them) < len(few) < len(apart)
            assert max(len(item.data.token_ids) for item in few) == 7


async def test_a_lone_token_leaves_at_once() -> None:
    async with pair() as world, remote(world, Slow()) as engine, await engine.generate(Context(request())) as stream:
        begun_s = anyio.current_time()
        came_s = [anyio.current_time() - begun_s async for item in stream if item.data.token_ids]
    assert came_s == pytest.approx([0.1, 0.2, 0.3], abs=0.01)


class Slow(Letters):
    """Takes a tenth of a second for each of three tokens."""

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        for number in range(3):
            await anyio.sleep(0.1)
            yield LLMEngineOutput([number])
        yield LLMEngineOutput.stop()
