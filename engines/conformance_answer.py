"""Answers of an engine under check: asked for, read chunk by chunk against L1 and L4, and always closed.

They are read as the adapter reads them, raced against a kill unless the engine hears it by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from inspect import isawaitable
from typing import Any, TypeVar

from anyio import move_on_after
from anyio.lowlevel import checkpoint
from attrs import evolve, frozen

from pipeline import Context, ContractViolation, until_killed
from pipeline.codec import from_msgpack, to_msgpack
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest

from .chunk_rules import ChunkRules
from .conformance_failure import ConformanceFailure, failed, miscounted, overdue
from .generate_context import GenerateContext
from .llm import Chunks, EngineConfig, LLMEngine

T = TypeVar("T")

LONG_MAX_TOKENS = 10_000
"""Of a request that is disturbed: more than an engine can answer before, where its context has room."""
MOST_CHUNKS = 100_000
"""A stream with more chunks is taken for one without end: where it never waits, no clock would tell."""


def long_max_tokens(config: EngineConfig, request: PreprocessedRequest) -> int:
    """The limit of a request that is disturbed."""
    if config.context_length is None:
        return LONG_MAX_TOKENS
    return max(1, min(LONG_MAX_TOKENS, config.context_length - len(request.token_ids)))


def mock_context(id: str | None = None) -> GenerateContext:
    """A context as an engine is given it, of a request that nobody has stopped."""
    return GenerateContext(Context(None, id=id))


async def bounded(name: str, what: str, act: Callable[[], Awaitable[T]], within_s: float, *, shield: bool = False) -> T:
    """What the call gives. Raises the failure of that name if it raises or takes longer."""
    with move_on_after(within_s, shield=shield):
        try:
            return await act()
        except ConformanceFailure:
            raise
        except Exception as error:
            raise failed(name, f"{what} raised {error!r}", cause=error) from error
    raise overdue(name, what, within_s)


@frozen
class Trial:
    """A started engine and how it is asked.

    `within_s` bounds each step that is not disturbed, `deadline_s` what follows a stop or a close, and `at_once_s` what
    follows a kill that the engine promises to hear.
    """

    engine: LLMEngine
    request: PreprocessedRequest
    long_max_tokens: int
    deadline_s: float
    within_s: float
    at_once_s: float

    @asynccontextmanager
    async def answer(self, *, long: bool = False) -> AsyncIterator[tuple[Answer, GenerateContext]]:
        """A fresh answer and its context, closed behind the block; a failure in the block goes before one of closing.

        Raises GenerateFailed and CloseFailed.
        """
        request, context = deepcopy(self.request), mock_context()
        if long:
            request.stop_conditions = evolve(request.stop_conditions, max_tokens=self.long_max_tokens)

        async def ask() -> Chunks:
            made = self.engine.generate(request, context)
            return await made if isawaitable(made) else made

        chunks = await bounded("GenerateFailed", "generate", ask, self.within_s)
        if not hasattr(chunks, "__anext__"):
            raise failed("GenerateFailed", f"it gave {type(chunks).__name__}")
        read = chunks if self.engine.hears_kill else until_killed(chunks, context.inner)
        try:
            yield Answer(read, request.sampling_options.n or 1), context
        except BaseException:
            with suppress(ConformanceFailure):
                await self._close(read, chunks)
            raise
        await self._close(read, chunks)

    async def _close(self, *both: Any) -> None:
        """Closes what is read, and the engine's own stream, which the race leaves alone where it has not begun."""
        for chunks in both:
            if (aclose := getattr(chunks, "aclose", None)) is not None:
                await bounded("CloseFailed", "closing", aclose, self.deadline_s, shield=True)


class Answer:
    """The chunks of one answer, as they are read."""

    def __init__(self, chunks: Chunks, choices: int) -> None:
        self.choices = choices
        self._chunks = chunks
        self._rules = ChunkRules(choices)
        self._tokens = 0
        self.is_complete = False
        self.last: LLMEngineOutput | None = None

    async def begin(self, within_s: float) -> bool:
        """Reads the first chunk, like `advance`. Raises GenerateFailed if it takes too long."""
        return await bounded("GenerateFailed", "the first chunk", self.advance, within_s)

    async def advance(self) -> bool:
        """Reads one chunk; False at the end. Raises StreamYieldedError, NotAChunk and ChunkAfterTerminal."""
        try:
            chunk: Any = await self._chunks.__anext__()
        except StopAsyncIteration:
            return False
        except Exception as error:
            raise failed("StreamYieldedError", repr(error), cause=error) from error
        self._expect_chunk(chunk)
        if self.is_complete:
            raise failed("ChunkAfterTerminal", f"it is {chunk!r}")
        try:
            self.is_complete = self._rules.admit(chunk)
        except ContractViolation as violation:
            raise failed("ChunkAfterTerminal", str(violation), cause=violation) from violation
        self._tokens += len(chunk.token_ids)
        self.last = chunk
        return True

    def _expect_chunk(self, chunk: Any) -> None:
        if not isinstance(chunk, LLMEngineOutput):
            raise failed("NotAChunk", f"it is {chunk!r}")
        try:
            from_msgpack(to_msgpack(chunk), LLMEngineOutput)
        except Exception as error:
            raise failed("NotAChunk", f"{error} in {chunk!r}", cause=error) from error
        if (chunk.index or 0) >= self.choices and not self.is_complete:
            raise failed("NotAChunk", f"it is of choice {chunk.index}, where there are {self.choices}")

    async def drain(self, name: str, within_s: float) -> int:
        """Reads to the end and says how many chunks that were. Raises the failure of that name if there is no end."""
        chunks = 0
        with move_on_after(within_s):
            while await self.advance():
                chunks += 1
                if chunks > MOST_CHUNKS:
                    raise failed(name, f"there is no end after {MOST_CHUNKS} chunks")
                await checkpoint()
            return chunks
        raise overdue(name, "reading to the end", within_s)

    def expect_some(self) -> LLMEngineOutput:
        """At the end, the last chunk. Raises NoChunksYielded."""
        if self.last is None:
            raise failed("NoChunksYielded")
        return self.last

    def expect_complete(self) -> None:
        """At the end. Raises NoTerminalChunk."""
        if not self.is_complete:
            raise failed("NoTerminalChunk", f"the last one is {self.last!r}")

    def expect_served(self) -> None:
        """At the end of an undisturbed answer. Raises StreamYieldedError if its last chunk says that there is none."""
        reason = None if self.last is None else self.last.finish_reason
        if reason is not None and (reason.is_error or reason == FinishReason.CANCELLED):
            raise failed("StreamYieldedError", f"its finish reason is {reason}")

    def expect_counted(self) -> None:
        """At the end. Raises CompletionTokensMismatch; a usage that is not there counts as right."""
        usage = None if self.last is None else self.last.completion_usage
        if usage is not None and usage.completion_tokens != self._tokens:
            raise miscounted(self._tokens, usage.completion_tokens)
