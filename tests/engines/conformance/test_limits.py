"""Engines that ignore limits and choices: each fails its own check of the kit."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
from attrs import evolve

from engines import GenerateContext, run_conformance
from pipeline import InvalidArgument
from pipeline.protocols import (
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from tests.engines.conformance.worlds import (
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Toy,
    expect_its_failures,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


class HasALimitOfItsOwn(Toy):
    """Never ends by itself, and yields four tokens if the request has no limit."""

    def length(self, stop: StopConditions) -> int:
        return 4 if stop.max_tokens is None else stop.max_tokens

    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        return FinishReason.LENGTH


class YieldsThreeAtOnce(Toy):
    """Decodes speculatively, and cuts the surplus."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        kept: list[int] = []
        if (request.sampling_options.n or 1) > 1:
            raise ValueError("one choice")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                kept += chunk.token_ids
                if chunk.finish_reason is not None:
                    yield evolve(chunk, token_ids=kept)
                elif len(kept) == 3:
                    yield LLMEngineOutput(kept)
                    kept = []


class RefusesMore(Toy):
    """Refuses a request that wants more than 20 tokens whatever comes, well below what its context has room for."""

    most = 20

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        stop = request.stop_conditions
        if (stop.ignore_eos and (stop.max_tokens or 0) > self.most) or (stop.min_tokens or 0) > self.most:
            raise InvalidArgument(f"at most {self.most} tokens")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


class RefusesAnyLimitBeyond(RefusesMore):
    """Refuses each limit above the tokens that it answers with by itself."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if (request.stop_conditions.max_tokens or 0) > self.own_end:
            raise InvalidArgument(f"at most {self.own_end} tokens")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


RIGHT = [Toy, HasALimitOfItsOwn, YieldsThreeAtOnce, RefusesMore, RefusesAnyLimitBeyond]


@pytest.mark.parametrize("factory", RIGHT)
async def test_a_right_engine_passes(factory: Any) -> None:
    await run_conformance(factory)


# -- limits and choices


@breaks("MaxTokensIgnored")
class RefusesSmallLimits(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if (request.stop_conditions.max_tokens or 5) < 5:
            raise InvalidArgument("at least 5 tokens")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


@breaks("MaxTokensIgnored")
class KnowsNoLimit(Toy):
    def length(self, stop: StopConditions) -> int:
        length = super().length(evolve(stop, max_tokens=None))
        return stop.max_tokens or length if stop.ignore_eos else max(length, stop.min_tokens or 0)


@breaks("MaxTokensIgnored")
class YieldsOneTooMany(Toy):
    def length(self, stop: StopConditions) -> int:
        length = super().length(stop)
        return length + 1 if length == stop.max_tokens else length

    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        return super().finish(stop, length - 1)


@breaks("MaxTokensIgnored")
class CountsChunksOfThree(YieldsThreeAtOnce):
    """Checks the limit between chunks only."""

    def length(self, stop: StopConditions) -> int:
        return -(-super().length(stop) // 3) * 3

    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        return FinishReason.LENGTH if stop.max_tokens is not None and length >= stop.max_tokens else FinishReason.STOP


@breaks("LimitNotNamed")
class CallsALimitAStop(Toy):
    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        return FinishReason.STOP


@breaks("MinTokensIgnored")
class KnowsNoMinimum(Toy):
    def length(self, stop: StopConditions) -> int:
        return super().length(evolve(stop, min_tokens=None))


@breaks("MinTokensIgnored")
class KnowsNoMinimumWithoutALimit(Toy):
    def length(self, stop: StopConditions) -> int:
        return super().length(evolve(stop, min_tokens=None) if stop.max_tokens is None else stop)


@breaks("MinTokensIgnored")
class KnowsNoMinimumBehindALongAnswer(KnowsNoMinimumWithoutALimit):
    own_end = 40


@breaks("MinTokensIgnored")
class EndsBehindItsOwnLimit(KnowsNoMinimum):
    """Yields four tokens without a limit, so that its end shows only for a higher limit."""

    def length(self, stop: StopConditions) -> int:
        return super().length(evolve(stop, max_tokens=4) if stop.max_tokens is None else stop)

    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        return super().finish(evolve(stop, max_tokens=4) if stop.max_tokens is None else stop, length)


@breaks("IgnoreEosIgnored")
class AlwaysEndsAtItsEnd(Toy):
    def length(self, stop: StopConditions) -> int:
        return super().length(evolve(stop, ignore_eos=None))


@breaks("ChoicesIgnored")
class KnowsOneChoice(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(self.with_one_choice(request), context)) as chunks:
            async for chunk in chunks:
                yield chunk

    def with_one_choice(self, request: Any) -> Any:
        return evolve(request, sampling_options=SamplingOptions())


@breaks("ChoicesIgnored")
class CallsEveryChoiceTheFirst(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield evolve(chunk, index=None)


@breaks("ChoicesIgnored")
class EndsTheSecondAtOnce(KnowsOneChoice):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if (request.sampling_options.n or 1) == 2:
            yield LLMEngineOutput([], index=1, finish_reason=FinishReason.STOP)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield evolve(chunk, completion_usage=None)


@breaks("MaxTokensIgnored")
class DividesItsLimitAmongItsChoices(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        stop, choices = request.stop_conditions, request.sampling_options.n or 1
        if stop.max_tokens is not None and choices > 1:
            request = evolve(request, stop_conditions=evolve(stop, max_tokens=stop.max_tokens // choices))
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


@breaks("StreamsShareState")
class SharesItsLimit(Toy):
    most: int | None = None

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        self.most, sent = request.stop_conditions.max_tokens, 0
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                sent += len(chunk.token_ids)
                if self.most is not None and sent > self.most * (request.sampling_options.n or 1):
                    yield LLMEngineOutput.length()
                    return
                yield chunk


@breaks("NotAChunk")
class CountsItsChoicesFromOne(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                is_one = (request.sampling_options.n or 1) == 1
                yield chunk if is_one else evolve(chunk, index=(chunk.index or 0) + 1)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(broken: BrokenEngine) -> None:
    await expect_its_failures(broken)
