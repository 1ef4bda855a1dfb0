"""Engines that offer their tokens: right ones pass, and each mistake in it fails its own check of the kit."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from engines import GenerateContext, run_conformance
from engines.conformance import MEANINGS
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from tests.engines.conformance.worlds import (
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Toy,
    expect_its_failures,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


class Offers(Toy):
    """Has its tokens taken where that is possible, all but the last."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if (request.sampling_options.n or 1) > 1:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        prompt, generated, length = list(request.token_ids), 0, self.length(request.stop_conditions)
        for place in range(length):
            await self.wait(context)
            if context.is_stopped:
                yield self.cancelled(request, generated)
                return
            generated += 1
            for token_id in self.left_of(self.token(prompt, place), context, is_last=place == length - 1):
                yield LLMEngineOutput([token_id])
        last = LLMEngineOutput([], finish_reason=self.finish(request.stop_conditions, length))
        yield last.with_usage(self.usage(request, generated))

    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        """Offer a token, and return what is to be yielded."""
        return [] if not is_last and context.offer_token(token_id) else [token_id]


class OffersNothing(Offers):
    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        return [token_id]


@pytest.mark.parametrize("factory", [Offers, OffersNothing])
async def test_a_right_engine_passes(factory: Any) -> None:
    await run_conformance(factory)


@breaks("OfferedTokensMismatch")
class YieldsWhatWasTaken(Offers):
    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        context.offer_token(token_id)
        return [token_id]


@breaks("OfferedTokensMismatch")
class OffersAnotherToken(Offers):
    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        return [] if context.offer_token(token_id + 1) else [token_id]


@breaks("OfferedTokensMismatch")
class DropsATokenBehindOneThatWasTaken(Offers):
    def __init__(self) -> None:
        self.taken: set[str] = set()

    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        if is_last and context.id in self.taken:
            return []
        if not context.offer_token(token_id):
            return [token_id]
        self.taken.add(context.id)
        return []


@breaks("OfferedTokensMismatch")
class OffersAheadOfWhatItYields(Offers):
    """Keeps a token until the next one was offered."""

    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}

    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        kept = self.kept.pop(context.id, [])
        if not (kept or is_last) and context.is_steady:
            self.kept[context.id] = [token_id]
            return []
        return kept if not is_last and context.offer_token(token_id) else [*kept, token_id]

    def cancelled(self, request: PreprocessedRequest, generated: int) -> LLMEngineOutput:
        return LLMEngineOutput.cancelled()  # what it keeps is in no usage


@breaks("OfferedUsageMismatch")
class CountsWhatItYields(Offers):
    """Forgets in its usage what was taken."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if (usage := chunk.completion_usage) is not None:
                    yielded = usage.completion_tokens - self.taken.pop(context.id, 0)
                    chunk = chunk.with_usage(CompletionUsage.of(len(request.token_ids), yielded))
                yield chunk

    def left_of(self, token_id: int, context: GenerateContext, *, is_last: bool) -> list[int]:
        left = super().left_of(token_id, context, is_last=is_last)
        self.taken[context.id] = self.taken.get(context.id, 0) + (not left)
        return left


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_an_engine_that_breaks_a_rule_fails_that_check_alone(broken: BrokenEngine) -> None:
    await expect_its_failures(broken)


def test_each_failure_of_offers_has_an_engine_that_fails_it() -> None:
    assert BROKEN.names == {name for name in MEANINGS if name.startswith("Offered")}
