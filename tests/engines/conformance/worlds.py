"""Engines that the kit is tried on: two right ones, which broken ones change in one place, and what the kit finds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from attrs import frozen

from engines import ConformanceFailure, EngineConfig, GenerateContext, LLMEngine, run_conformance
from engines.conformance import MEANINGS
from pipeline import InvalidArgument
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions

Chunks = AsyncGenerator[LLMEngineOutput, None]
Generate = Callable[[PreprocessedRequest, GenerateContext], Any]
"""A function in the place of `generate`."""

TOKEN_S = 0.01
"""The time before each token."""


# -- the right engines


def refuse_more(request: PreprocessedRequest, tokens: int) -> None:
    """Raise InvalidArgument for a request that demands more than that many tokens, or several choices."""
    stop = request.stop_conditions
    least = stop.max_tokens if stop.ignore_eos else stop.min_tokens
    if (least or 0) > tokens or (request.sampling_options.n or 1) > 1:
        raise InvalidArgument("there is nothing more to generate")


async def sevens(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """Yield 7 until there are `max_tokens`, four without; refuse several choices."""
    refuse_more(request, 10_000)
    count = request.stop_conditions.max_tokens or 4
    for generated in range(count):
        await anyio.sleep(TOKEN_S)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(len(request.token_ids), generated))
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length().with_usage(CompletionUsage.of(len(request.token_ids), count))


class Sevens(LLMEngine):
    """Answers with `sevens`, and records its requests and the calls of its life."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[PreprocessedRequest] = []
        RECORDED.append(self)

    @property
    def is_started(self) -> bool:
        return "start" in self.calls

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        return EngineConfig(model="sevens")

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.requests.append(request)
        return sevens(request, context)

    async def cleanup(self) -> None:
        self.calls.append("cleanup")


RECORDED: list[Sevens] = []
"""The engines made in this test, in order."""


class Unhurried(Sevens):
    """Ends 1.9 s after a stop: within the usual deadline, though not at once."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                if context.is_stopped:
                    await anyio.sleep(1.9)
                yield chunk


class Toy(LLMEngine):
    """Answers with six tokens that follow from the prompt, in the choices and within the limits of the request."""

    own_end = 6
    """Tokens after which an answer ends by itself."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="toy", context_length=4096)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        prompt, choices = list(request.token_ids), request.sampling_options.n or 1
        length, generated = self.length(request.stop_conditions), 0
        for place in range(length):
            for choice in range(choices):
                if not context.is_stopped:
                    await self.wait(context)
                if context.is_stopped:
                    yield self.cancelled(request, generated)
                    return
                generated += 1
                yield LLMEngineOutput([self.token(prompt, place) + choice], index=choice or None)
        for choice in range(choices):
            finish = self.finish(request.stop_conditions, length)
            last = LLMEngineOutput([], index=choice or None, finish_reason=finish)
            yield last.with_usage(self.usage(request, generated)) if choice == choices - 1 else last

    def length(self, stop: StopConditions) -> int:
        """Return the tokens of each choice."""
        length = max(self.own_end, stop.min_tokens or 0)
        if stop.max_tokens is None:
            return length
        return stop.max_tokens if stop.ignore_eos else min(length, stop.max_tokens)

    def finish(self, stop: StopConditions, length: int) -> FinishReason:
        """Return the finish reason of a choice of that length."""
        return FinishReason.LENGTH if length == stop.max_tokens else FinishReason.STOP

    async def wait(self, context: GenerateContext) -> None:
        """Wait before a token, until a stop at most."""
        with anyio.move_on_after(TOKEN_S):
            await context.stopped()

    def token(self, prompt: list[int], place: int) -> int:
        """Return the token at that place of the answer."""
        return (sum(prompt) * 7 + prompt[-1] * 13 + place * place * 3 + place) % 50_000

    def usage(self, request: PreprocessedRequest, generated: int) -> CompletionUsage:
        """Return the usage after that many tokens of all choices."""
        return CompletionUsage.of(len(request.token_ids), generated)

    def cancelled(self, request: PreprocessedRequest, generated: int) -> LLMEngineOutput:
        """Return the last chunk of an answer stopped after that many tokens."""
        return LLMEngineOutput.cancelled().with_usage(self.usage(request, generated))

    async def cleanup(self) -> None:
        """Release nothing."""


# -- broken engines, and what the kit finds in them


@frozen
class BrokenEngine:
    """An engine, and the names of the failures that the kit must find in it: these and no other."""

    names: frozenset[str]
    factory: Callable[[], LLMEngine]

    def __str__(self) -> str:
        return "-".join([*sorted(self.names), getattr(self.factory, "__name__", "engine")])


class BrokenEngines(list[BrokenEngine]):
    """The broken engines of one test file."""

    @property
    def names(self) -> set[str]:
        """The failures that some engine here must fail with."""
        return {name for broken in self for name in broken.names}

    def breaks(self, *names: str, ends_on_kill: bool = False) -> Callable[[Any], Any]:
        """Return a decorator that adds a class, or a function in the place of `generate`, with these failures."""

        def add(broken: Any) -> Any:
            factory = broken
            if not isinstance(broken, type):
                members = {"generate": staticmethod(broken), "ends_on_kill": ends_on_kill}
                factory = type(broken.__name__, (Sevens,), members)
            self.append(BrokenEngine(frozenset(names), factory))
            return broken

        return add


async def failures_of(factory: Any, **settings: Any) -> list[ConformanceFailure]:
    """Run the kit with these settings on an engine that must fail it; return the failures."""
    with pytest.raises(ExceptionGroup) as caught:
        await run_conformance(factory, **settings)
    failures = [failure for failure in caught.value.exceptions if isinstance(failure, ConformanceFailure)]
    assert len(failures) == len(caught.value.exceptions)
    return failures


async def names_of(factory: Any, **settings: Any) -> list[str]:
    """Return the names of the failures, see `failures_of`."""
    return [failure.name for failure in await failures_of(factory, **settings)]


async def expect_its_failures(broken: BrokenEngine) -> None:
    """Assert that the kit finds the failures of a broken engine and no other, each with its rule and its name."""
    failures = await failures_of(broken.factory)
    assert sorted(failure.name for failure in failures) == sorted(broken.names)
    for failure in failures:
        assert failure.rule == MEANINGS[failure.name][0]
        assert str(failure).startswith(f"{failure.name}: ")
