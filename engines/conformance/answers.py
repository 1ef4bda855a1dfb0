"""Answers of an engine under check: read chunk by chunk against L1, L4, L10 and L12, always closed, and compared.

They are read as the adapter reads them, cancelled by a kill unless the engine ends by itself. Every step may be in
another task than the one before.

A Trial holds an engine's undisturbed answers, to compare others with. From the tokens of an engine that answers
differently each time nothing follows; of such an engine only counts are checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from inspect import isawaitable
from math import inf
from threading import Thread
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field, frozen

from pipeline import ContractViolation, InvalidArgument, until_killed
from pipeline.errors import BackendInvalidArgument
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.wire import from_msgpack, to_msgpack

from ..chunks import ChunkContract
from ..llm import Chunks, EngineConfig, GenerateContext, LLMEngine
from .bounded_calls import bounded
from .contexts import mock_context
from .failures import ConformanceFailure, FailureLog, failed, not_served
from .inspection import Rest, Turns, failure_in, held_by

LONG_MAX_TOKENS = 10_000
"""Of a request that is disturbed: more than an engine can answer before, where its context has room."""
MOST_CHUNKS = 100_000
"""A stream with more chunks counts as endless: if it never waits, no clock can bound it."""
_CODED = 100
"""How many chunks of an answer are all encoded as if they were sent."""
_LOOKS = 4
"""After each of that many chunks the kit checks what the engine holds."""


def limited(request: PreprocessedRequest, **limits: Any) -> PreprocessedRequest:
    """Return a copy of the request with other stop conditions."""
    return evolve(deepcopy(request), stop_conditions=evolve(request.stop_conditions, **limits))


@frozen
class Outcome:
    """An answer: the tokens of each choice and why it ended; the number of the chunks does not matter."""

    tokens: tuple[tuple[int, ...], ...]
    reasons: tuple[FinishReason | None, ...]

    @classmethod
    def of(cls, answer: Answer) -> Outcome:
        return cls(tuple(map(tuple, answer.generated)), tuple(answer.reasons))

    @property
    def length(self) -> int:
        """Tokens of the longest choice."""
        return max(map(len, self.tokens), default=0)

    @property
    def is_limited(self) -> bool:
        """Whether a limit ended it, and not the engine by itself."""
        return FinishReason.LENGTH in self.reasons

    def continues(self, generated: Sequence[Sequence[int]]) -> bool:
        """Whether each choice begins as this one goes, as far as this one goes."""
        pairs = zip(self.tokens, generated, strict=False)
        return all(tuple(new[: len(known)]) == known[: len(new)] for known, new in pairs)

    def __str__(self) -> str:
        return " and ".join(
            f"{list(tokens)} ({reason})" for tokens, reason in zip(self.tokens, self.reasons, strict=True)
        )


@define
class Trial:
    """A started engine, the settings of its check, and what is known so far of its undisturbed answers.

    `within_s` bounds each step that is not disturbed, `deadline_s` what follows a stop or a close, and `at_once_s` what
    follows a kill where the engine promises to end by itself. The answers are empty where the first one failed.
    """

    engine: LLMEngine
    request: PreprocessedRequest
    config: EngineConfig
    found: FailureLog
    deadline_s: float
    within_s: float
    at_once_s: float
    turns: Turns
    other_threads: frozenset[Thread]
    """Those that were there before the engine."""
    rest: Rest = field(init=False)
    """What goes on without a request; looked at before the first one."""
    alone: ConformanceFailure | None = None
    """What the first request failed with."""
    natural: Outcome = Outcome((), ())
    """The first answer: to the request as it is."""
    plain: Outcome = Outcome((), ())
    """To the request that is repeated: the same one, or limited to fewer tokens."""
    is_steady: bool = False
    """Whether the same request always got the same answer."""
    offers: bool = False
    """Whether the engine has offered tokens."""
    begins: Outcome | None = None
    """How the answer to the long request begins, if that is always the same."""
    long_tokens: int = LONG_MAX_TOKENS
    """The limit of the long request: fewer where the engine refuses so many."""
    goes_on: bool = False
    """Whether the engine goes on to the limit of a request that wants its end ignored."""
    gap_s: float = 0.0
    """The longest time that a chunk of the first answer took."""
    alone_s: float = 0.0
    """How long the first answer took."""
    repeated: list[tuple[PreprocessedRequest, Outcome | None]] = field(factory=list)
    """Requests with other prompts, too, and what each got alone, if that is always the same."""

    async def passes(self, *checks: Check, but: ConformanceFailure | None = None, is_behind: bool = False) -> bool:
        """Return whether all checks passed. Ends early when time ran out: later checks would take as long again.

        A failure that breaks the same rule as `but` is not recorded. With `is_behind` the checks are after others: a
        request without an answer in time had one when it was alone.
        """
        went_well = True
        for check in checks:
            if self.found.is_out_of_time:
                return False
            try:
                await check(self)
            except ConformanceFailure as failure:
                went_well = False
                if is_behind and failure.name == "GenerateFailed" and failure.after_s is not None:
                    failure = not_served("behind others", failure)
                if but is None or failure.rule != but.rule:
                    self.found.add(failure)
        return went_well

    def failed_alone(self, failure: ConformanceFailure) -> bool:
        """Whether the first request failed in the same way."""
        return self.alone is not None and failure.name == self.alone.name

    @property
    def long_request(self) -> PreprocessedRequest:
        """The request, with a limit that its answer does not reach before it is disturbed."""
        room = max(1, self.room(self.long_tokens, self.request))
        ignore_eos = True if self.goes_on else self.request.stop_conditions.ignore_eos
        return limited(self.request, max_tokens=room, ignore_eos=ignore_eos)

    def room(self, tokens: int, request: PreprocessedRequest) -> int:
        """Return that many tokens, or as many as the context has room for behind the prompt."""
        length = self.config.context_length
        return tokens if length is None else min(tokens, length - len(request.token_ids))

    def tokens_in(self, seconds: float) -> float:
        """How many tokens of an answer come in that time, at the pace of the first one."""
        return self.natural.length * seconds / self.alone_s if self.alone_s and self.natural.length else inf

    def contradicts(self, request: PreprocessedRequest, answer: Answer) -> bool:
        """Whether the answer, which came to its end, has other tokens than the request got alone."""
        wanted = (request.token_ids, request.stop_conditions)
        same = (outcome for other, outcome in self.repeated if (other.token_ids, other.stop_conditions) == wanted)
        known = next(same, None)
        if known is None or not answer.is_complete or any(map(is_given_up, answer.reasons)):
            return False
        return Outcome.of(answer).tokens != known.tokens

    @asynccontextmanager
    async def answer(
        self,
        request: PreprocessedRequest | None = None,
        *,
        long: bool = False,
        is_begun: bool = False,
        raced: bool = True,
    ) -> AsyncIterator[tuple[Answer, GenerateContext]]:
        """A fresh answer and its context, closed behind the block; a failure in the block goes before one of closing.

        With `is_begun` its first chunk has been read. Without `raced` a kill ends it only if the engine does. Raises
        GenerateFailed and CloseFailed.
        """
        sent = deepcopy(request or (self.long_request if long else self.request))
        before, context = deepcopy(sent), mock_context()

        async def call() -> Chunks:
            made = self.engine.generate(sent, context)
            return await made if isawaitable(made) else made

        chunks = await _unless_refused(bounded("GenerateFailed", "generate", call, self.within_s))
        if not hasattr(chunks, "__anext__"):
            raise failed("GenerateFailed", f"it gave {type(chunks).__name__}")
        read = until_killed(chunks, context.inner) if raced and not self.engine.ends_on_kill else chunks
        try:
            answer = Answer(read, chunks, before, sent)
            if is_begun:
                await answer.begin(self.within_s)
            yield answer, context
            self.offers |= context.was_offered
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


Check = Callable[[Trial], Awaitable[object]]
"""Raises the ConformanceFailure it finds."""


async def _unless_refused(step: Any) -> Any:
    try:
        return await step
    except ConformanceFailure as failure:
        failure.is_refusal = is_refusal(failure.__cause__)
        raise


def is_refusal(error: BaseException | None) -> bool:
    """Return whether the error of an engine is the refusal of a request that cannot be served."""
    return isinstance(error, InvalidArgument | BackendInvalidArgument | ValueError | TypeError)


def is_given_up(reason: FinishReason | None) -> bool:
    """Return whether a choice with that finish reason was not answered."""
    return reason is not None and (reason.is_error or reason == FinishReason.CANCELLED)


def _is_plain(chunk: LLMEngineOutput) -> bool:
    """Whether the chunk has tokens and an index, and nothing else."""
    tokens = chunk.token_ids
    is_list = type(tokens) is list and all(type(token) is int for token in tokens)
    return is_list and chunk == LLMEngineOutput(tokens, index=chunk.index)


class Answer:
    """The chunks of one answer, as they are read.

    `generated` are the tokens of each choice so far, `reasons` their finish reasons.
    """

    def __init__(self, read: Chunks, source: Chunks, before: PreprocessedRequest, sent: PreprocessedRequest) -> None:
        self.request = before
        self.choices = before.sampling_options.n or 1
        self.generated: list[list[int]] = [[] for _ in range(self.choices)]
        self.reasons: list[FinishReason | None] = [None] * self.choices
        self.chunks: list[LLMEngineOutput] = []
        self.times_s: list[float] = []
        """When the request was made, and when each chunk came, by the loop's clock."""
        self.is_complete = False
        self._read, self._source, self._given = read, source, sent
        self._rules = ChunkContract(self.choices)
        self.times_s.append(anyio.current_time())

    @property
    def last(self) -> LLMEngineOutput | None:
        return self.chunks[-1] if self.chunks else None

    @property
    def tokens(self) -> int:
        """How many came, of all choices."""
        return sum(len(tokens) for tokens in self.generated)

    async def begin(self, within_s: float) -> bool:
        """Read the next chunk in a task of its own, like `advance`. Raises GenerateFailed if it takes too long."""
        what = "the next chunk" if self.chunks else "the first chunk"
        return await bounded("GenerateFailed", what, self.advance, within_s)

    async def advance(self) -> bool:
        """Read one chunk; False at the end.

        Raises StreamYieldedError, NotAChunk, ChunkAfterTerminal, and the failures of things held over a `yield`.
        """
        try:
            chunk: Any = await self._read.__anext__()
        except StopAsyncIteration:
            return False
        except Exception as error:
            failure = failed(failure_in(error) or "StreamYieldedError", repr(error), cause=error)
            failure.is_refusal = not self.chunks and is_refusal(error)
            raise failure from error
        self._expect_chunk(chunk)
        if self.is_complete:
            raise failed("ChunkAfterTerminal", f"it is {chunk!r}")
        try:
            self.is_complete = self._rules.admit(chunk)
        except ContractViolation as violation:
            raise failed("ChunkAfterTerminal", str(violation), cause=violation) from violation
        index = chunk.index or 0
        self.generated[index] += chunk.token_ids
        self.reasons[index] = chunk.finish_reason
        self.chunks.append(chunk)
        self.times_s.append(anyio.current_time())
        if len(self.chunks) <= _LOOKS:
            await self._expect_nothing_held()
        return True

    async def _expect_nothing_held(self) -> None:
        for name, what in held_by(self._source):
            # Here, in the task that has just read, what is held can still be left in order.
            for chunks in (self._read, self._source):
                with suppress(Exception, BaseExceptionGroup):
                    await chunks.aclose()  # type: ignore[attr-defined]
            raise failed(name, f"{what}, behind chunk {len(self.chunks)}")

    def _expect_chunk(self, chunk: Any) -> None:
        if not isinstance(chunk, LLMEngineOutput):
            raise failed("NotAChunk", f"it is {chunk!r}")
        if len(self.chunks) > _CODED and _is_plain(chunk):
            return  # like many before it
        if isinstance(usage := chunk.completion_usage, CompletionUsage) and usage.prompt_tokens < 0:
            raise failed("PromptTokensMismatch", f"{usage.prompt_tokens} are reported")
        try:
            from_msgpack(to_msgpack(chunk), LLMEngineOutput)
        except Exception as error:
            raise failed("NotAChunk", f"{error} in {chunk!r}", cause=error) from error
        if not 0 <= (chunk.index or 0) < self.choices and not self.is_complete:
            raise failed("NotAChunk", f"it is of choice {chunk.index}, where there are {self.choices}")

    async def drain(self, name: str, within_s: float) -> int:
        """Read to the end and return how many chunks that were. Raises the failure of that name if there is no end."""
        so_far = len(self.chunks)

        async def read_on() -> None:
            while await self.advance():
                if len(self.chunks) - so_far > MOST_CHUNKS:
                    raise failed(name, f"there is no end after {MOST_CHUNKS} chunks")
                await checkpoint()

        await bounded(name, "reading to the end", read_on, within_s)
        return len(self.chunks) - so_far

    def expect_some(self) -> LLMEngineOutput:
        """At the end, the last chunk. Raises NoChunksYielded."""
        if self.last is None:
            raise failed("NoChunksYielded")
        return self.last

    def expect_whole(self, miscount: str = "CompletionTokensMismatch") -> None:
        """At the end of an undisturbed answer. Raises the failure of whatever is wrong with it."""
        last = self.expect_some()
        if not self.is_complete:
            raise failed("NoTerminalChunk", f"the last one is {last!r}")
        for reason in self.reasons:
            if is_given_up(reason):
                raise failed("StreamYieldedError", f"its finish reason is {reason}")
        self.expect_counted(miscount)

    def expect_counted(self, name: str) -> None:
        """At the end. Raises the failure of that name, PromptTokensMismatch or RequestChanged.

        A usage that is not there counts as right.
        """
        if self._given != self.request:
            raise failed("RequestChanged", f"from {self.request!r} to {self._given!r}")
        if (now := self._tokens_by_choice()) != self.generated:
            raise failed("ChunkChanged", f"{self.generated} came, and are {now} now")
        usage = None if self.last is None else self.last.completion_usage
        if usage is not None and usage.completion_tokens != self.tokens:
            miscounted = failed(name, f"{self.tokens} came, {usage.completion_tokens} are reported")
            miscounted.counted_tokens, miscounted.reported_tokens = self.tokens, usage.completion_tokens
            raise miscounted
        for chunk in self.chunks:
            if chunk.completion_usage is not None:
                self._expect_prompt_counted(chunk.completion_usage)

    def _tokens_by_choice(self) -> list[list[int]]:
        """What the chunks have by now."""
        generated: list[list[int]] = [[] for _ in range(self.choices)]
        for chunk in self.chunks:
            generated[chunk.index or 0] += chunk.token_ids
        return generated

    def _expect_prompt_counted(self, usage: CompletionUsage) -> None:
        request, prompt = self.request, usage.prompt_tokens
        is_plain = request.prompt_embeds is None and not request.multi_modal_data
        cached = None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        if is_plain and prompt != len(request.token_ids):
            raise failed("PromptTokensMismatch", f"the prompt has {len(request.token_ids)}, {prompt} are reported")
        if not 0 <= (cached or 0) <= prompt:
            raise failed("PromptTokensMismatch", f"{prompt} tokens are reported, {cached} of them cached")
        if usage.total_tokens != prompt + usage.completion_tokens:
            total = f"{prompt} and {usage.completion_tokens} are reported as {usage.total_tokens}"
            raise failed("PromptTokensMismatch", total)
