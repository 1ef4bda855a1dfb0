"""EchoEngine: answers with the prompt's own tokens; for tests, examples and measuring the stages around an engine.

Source: dynamo lib/llm/src/engines.rs, the echo engine. Other than there, it follows every limit of the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any, ClassVar

from anyio.lowlevel import checkpoint
from attrs import frozen

from pipeline import Control, InvalidArgument
from pipeline.loop import Timer, clock
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest

from .llm import EngineConfig, GenerateContext, LLMEngine
from .worker import health_payload

_ITEMS_PER_TURN = 64
"""Chunks between two turns for other tasks, without a delay."""


class EchoEngine(LLMEngine):
    """Yields the prompt's tokens, one a chunk, each after `delay_s`.

    It ends with the prompt (finish reason stop) or as soon as there are `max_tokens` (length). It starts over until
    there are `min_tokens`, and with `ignore_eos` until `max_tokens`. The choices of `n` take turns, each chunk with its
    index. The last chunk has the usage. A probe is answered like any request. Raises InvalidArgument for limits that
    contradict each other, and for a prompt given as embeddings.

    After a stop, also during a delay, one chunk with finish reason cancelled follows; after a kill nothing.
    """

    ends_on_kill: ClassVar[bool] = True

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="echo")

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        answer, control = _Answer.to(request), context.control
        prompt, plain_chunks = answer.prompt, answer.plain_chunks
        pauses = _Pauses(control, self.delay_s) if self.delay_s else None
        try:
            for emitted in range(answer.chunks):
                if pauses is not None:
                    if not control.is_stopped:
                        await pauses.next()
                elif emitted % _ITEMS_PER_TURN == _ITEMS_PER_TURN - 1:
                    await checkpoint()
                if control.is_stopped:
                    yield answer.cancelled(emitted)
                    return
                # Nearly every chunk is plain, and made without a call.
                yield (
                    LLMEngineOutput([prompt[emitted % len(prompt)]])
                    if emitted < plain_chunks
                    else answer.output(emitted)
                )
        finally:
            if pauses is not None:
                pauses.forget()

    async def cleanup(self) -> None:
        """There is nothing to release."""

    async def health_check_payload(self) -> Mapping[str, Any]:
        return health_payload()


class _Pauses:
    """Waits before each chunk that a stop ends. `forget` after the last one."""

    __slots__ = ("_delay_s", "_now", "_timer", "forget")

    def __init__(self, control: Control, delay_s: float) -> None:
        self._delay_s = delay_s
        self._now, self._timer = clock(), Timer()
        self.forget = control.on_stop(self._timer.wake)

    def next(self) -> Awaitable[None]:
        """Await the delay, which a stop or kill ends. The caller checks for an earlier one."""
        return self._timer.wait_until(self._now() + self._delay_s)


@frozen
class _Answer:
    """The answer to one request, decided beforehand."""

    prompt: Sequence[int]
    length_tokens: int
    """Of each choice."""
    finish: FinishReason
    choices: int

    @classmethod
    def to(cls, request: PreprocessedRequest) -> _Answer:
        """Return the answer. Raises InvalidArgument for a request that cannot be answered."""
        prompt, stop = request.token_ids, request.stop_conditions
        least, most = stop.min_tokens or 0, stop.max_tokens
        choices = 1 if request.sampling_options.n is None else request.sampling_options.n
        if request.prompt_embeds is not None:
            raise InvalidArgument("prompt_embeds: there are no tokens to echo in embeddings", field="prompt_embeds")
        if choices < 1:
            raise InvalidArgument(f"n must be at least 1, got {choices}", field="n")
        if most is not None and not least <= most:
            raise InvalidArgument(f"max_tokens is {most}, which is below min_tokens, {least}", field="max_tokens")
        length = max(len(prompt), least) if prompt else 0
        if most is not None:
            length = min(length, most) if not (prompt and stop.ignore_eos) else most
        return cls(prompt, length, FinishReason.LENGTH if length == most else FinishReason.STOP, choices)

    @property
    def plain_chunks(self) -> int:
        """Chunks of a single choice that are a token of the prompt and nothing else; 0 with more choices."""
        return self.length_tokens - 1 if self.choices == 1 else 0

    @property
    def chunks(self) -> int:
        """Chunks of all choices; a choice without tokens has one."""
        return max(self.length_tokens, 1) * self.choices

    def output(self, emitted: int) -> LLMEngineOutput:
        """Return the chunk after `emitted` ones; with a single choice it has no index."""
        place = emitted // self.choices
        token_ids = [self.prompt[place % len(self.prompt)]] if self.length_tokens else []
        output = LLMEngineOutput(token_ids, index=self._index(emitted))
        if place >= self.length_tokens - 1:
            output.finish_reason = self.finish
        if emitted == self.chunks - 1:
            output.completion_usage = self._usage(self.length_tokens * self.choices)
        return output

    def cancelled(self, emitted: int) -> LLMEngineOutput:
        """Return the last chunk of an answer cancelled after `emitted` tokens."""
        output = LLMEngineOutput([], index=self._index(emitted), finish_reason=FinishReason.CANCELLED)
        return output.with_usage(self._usage(emitted))

    def _index(self, emitted: int) -> int | None:
        return None if self.choices == 1 else emitted % self.choices

    def _usage(self, completion_tokens: int) -> CompletionUsage:
        return CompletionUsage.of(len(self.prompt), completion_tokens)
