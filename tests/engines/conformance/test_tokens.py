"""Engines that yield wrong tokens, count them wrong or change the request: each fails its own check of the kit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from random import Random
from typing import Any

import pytest
from attrs import evolve

from engines import ConformanceFailure, GenerateContext, run_conformance
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest
from tests.engines.conformance.worlds import (
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Toy,
    expect_its_failures,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


class Dice(Toy):
    """Yields different tokens each time."""

    def __init__(self) -> None:
        self.dice = Random(7)

    def token(self, prompt: list[int], place: int) -> int:
        return self.dice.randrange(50_000)


class WithoutUsage(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield evolve(chunk, completion_usage=None)


class YieldsManyTokens(Toy):
    own_end = 100


class MergesChunksLater(Toy):
    """Yields two tokens in a chunk from its tenth request on, as a server does that has become busy."""

    requests = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.requests += 1
        held: dict[int | None, LLMEngineOutput] = {}
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                first = held.pop(chunk.index, None)
                if first is not None:
                    chunk = evolve(chunk, token_ids=[*first.token_ids, *chunk.token_ids])
                elif self.requests >= 10 and chunk.finish_reason is None:
                    held[chunk.index] = chunk
                    continue
                yield chunk


RIGHT = [Toy, Dice, WithoutUsage, YieldsManyTokens, MergesChunksLater]


@pytest.mark.parametrize("factory", RIGHT)
async def test_a_right_engine_passes(factory: Any) -> None:
    await run_conformance(factory)


# -- tokens after a stop


class Repeats(Toy):
    """Repeats its last token when it is stopped, with a usage that counts it."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        last: list[int] = []
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason == FinishReason.CANCELLED and last:
                    async for again in self.repeated(request, chunk, last):
                        yield again
                    return
                last = chunk.token_ids or last
                yield chunk

    async def repeated(self, request: Any, chunk: Any, last: list[int]) -> Chunks:
        generated = chunk.completion_usage.completion_tokens
        yield evolve(chunk, token_ids=last, completion_usage=self.usage(request, generated + 1))


breaks("TokenRepeatedAfterStop")(Repeats)


@breaks("TokenRepeatedAfterStop")
class RepeatsWithoutUsage(Repeats):
    async def repeated(self, request: Any, chunk: Any, last: list[int]) -> Chunks:
        yield evolve(chunk, token_ids=last, completion_usage=None)


@breaks("TokenRepeatedAfterStop")
class RepeatsBeforeItEnds(Repeats):
    async def repeated(self, request: Any, chunk: Any, last: list[int]) -> Chunks:
        yield LLMEngineOutput(last)
        yield evolve(chunk, completion_usage=None)


@breaks("TokenRepeatedAfterStop")
class RepeatsWhatItDiced(RepeatsWithoutUsage, Dice):
    """Its output is not known in advance, but never has the same token twice in a row."""


# -- tokens of other requests


class Hands(Toy):
    """Gives the next request a token of this one if `is_cut` is true of it."""

    left: tuple[int, ...] = ()

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        mine, self.left, reason = list(self.left), (), None
        try:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    reason = chunk.finish_reason
                    yield evolve(chunk, token_ids=mine + chunk.token_ids) if chunk.token_ids else chunk
                    mine = mine if not chunk.token_ids else []
        finally:
            if self.is_cut(reason):
                self.left = (4711,)

    def is_cut(self, reason: FinishReason | None) -> bool:
        raise NotImplementedError


@breaks("TokensLeftOver")
class HandsOnAfterAStop(Hands):
    def is_cut(self, reason: FinishReason | None) -> bool:
        return reason == FinishReason.CANCELLED


@breaks("TokensLeftOver")
class HandsOnAfterAClose(Hands):
    def is_cut(self, reason: FinishReason | None) -> bool:
        return reason is None


@breaks("TokensLeftOver")
class HandsOnAfterALimit(Hands):
    def is_cut(self, reason: FinishReason | None) -> bool:
        return reason == FinishReason.LENGTH


@breaks("TokensLeftOver")
class HandsOnAfterAKill(Hands):
    is_killed = False

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                self.is_killed = context.is_killed

    def is_cut(self, reason: FinishReason | None) -> bool:
        cut, self.is_killed = self.is_killed, False
        return cut


@breaks("StreamsShareState")
class SharesItsPrompt(Toy):
    prompt: Any = ()

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.prompt = list(request.token_ids)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    def token(self, prompt: list[int], place: int) -> int:
        return super().token(self.prompt, place)


@breaks("StreamsShareState")
class SharesItsPlace(Toy):
    place = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.place = 0
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    def token(self, prompt: list[int], place: int) -> int:
        self.place += 1
        return super().token(prompt, self.place)


@breaks("StreamsShareState")
class SharesThePromptItCounts(Dice):
    """Its output is not known in advance, but the prompts have different lengths."""

    prompt_tokens = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.prompt_tokens = len(request.token_ids)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk

    def usage(self, request: Any, generated: int) -> CompletionUsage:
        return CompletionUsage.of(self.prompt_tokens, generated)


# -- usage


@breaks("StopUsageMismatch")
class CountsOneMoreWhenStopped(Toy):
    def cancelled(self, request: Any, generated: int) -> LLMEngineOutput:
        return super().cancelled(request, generated + 1)


@breaks("StopUsageMismatch")
class CountsOneLessWhenStopped(Toy):
    def cancelled(self, request: Any, generated: int) -> LLMEngineOutput:
        return super().cancelled(request, max(0, generated - 1))


class MiscountsAtALimit(Toy):
    by = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                usage = chunk.completion_usage
                if chunk.finish_reason == FinishReason.LENGTH and usage is not None:
                    yield chunk.with_usage(self.usage(request, usage.completion_tokens + self.by))
                else:
                    yield chunk


@breaks("LimitUsageMismatch")
class CountsOneMoreAtALimit(MiscountsAtALimit):
    by = 1


@breaks("LimitUsageMismatch")
class CountsOneLessAtALimit(MiscountsAtALimit):
    by = -1


def counting(prompt: Callable[[int, int], int], total: Callable[[int, int], int]) -> Any:
    """Register an engine whose usage has other figures, computed from the lengths of prompt and output."""

    class Counts(Toy):
        def usage(self, request: Any, generated: int) -> CompletionUsage:
            length = len(request.token_ids)
            return CompletionUsage(prompt(length, generated), generated, total(length, generated))

    return breaks("PromptTokensMismatch")(Counts)


counting(lambda length, generated: 0, lambda length, generated: generated)
counting(lambda length, generated: length + 1, lambda length, generated: length + generated + 1)
counting(lambda length, generated: -1, lambda length, generated: generated - 1)
counting(lambda length, generated: length, lambda length, generated: generated)
counting(lambda length, generated: length + generated, lambda length, generated: length + generated + generated)


@breaks("PromptTokensMismatch")
class ForgetsThePromptWhenStopped(Toy):
    def cancelled(self, request: Any, generated: int) -> LLMEngineOutput:
        return LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(0, generated))


# -- the request itself, and the chunks


def changing(change: Callable[[Any, Any], object]) -> Any:
    """Register an engine that changes its request with every chunk."""

    class Changes(Toy):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    change(request, chunk)
                    yield chunk

    return breaks("RequestChanged")(Changes)


changing(lambda request, chunk: request.token_ids.extend(chunk.token_ids))
changing(lambda request, chunk: setattr(request.stop_conditions, "max_tokens", request.stop_conditions.max_tokens or 9))
changing(lambda request, chunk: chunk.finish_reason and request.annotations.append("done"))
changing(lambda request, chunk: chunk.finish_reason == FinishReason.CANCELLED and request.token_ids.clear())


@breaks("ChunkChanged")
class ReusesOneChunk(Toy):
    """Fills and yields the same chunk object for each token."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if (request.sampling_options.n or 1) > 1:
            raise ValueError("one choice")
        only = LLMEngineOutput.token(0)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is None:
                    only.token_ids[:] = chunk.token_ids
                yield only if chunk.finish_reason is None else chunk


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(broken: BrokenEngine) -> None:
    await expect_its_failures(broken)


async def test_a_wrong_count_at_a_limit_has_both_figures() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run_conformance(CountsOneMoreAtALimit)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, ConformanceFailure)
    assert (failure.counted_tokens, failure.reported_tokens) == (1, 2)
