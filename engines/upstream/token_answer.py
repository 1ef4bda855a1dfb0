"""TokenAnswer: makes chunks of the bytes of a streamed answer with token ids, of one or several choices.

    bytes ──► events ──► chunks of tokens, then one terminal chunk for each choice

The last terminal chunk waits for the counts of tokens behind it. `[DONE]` ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown, EngineShutdown, InvalidMessage
from pipeline.protocols import FinishReason, LLMEngineOutput, PromptTokensDetails

from .streamed_answer import StreamedAnswer, checked_ids, join

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}

ReadChoice = Callable[[Mapping[str, Any], list[int]], LLMEngineOutput]
"""Returns the chunk of a choice with more than its tokens: log probabilities, a text."""


class TokenAnswer(StreamedAnswer):
    """The answer to one request, while its bytes arrive. The chunks that came together are joined, see `join`.

    `choices` and `prompt_tokens` are those of the request. `read_choice` reads a choice's log probabilities and other
    parts. Every method raises as those of StreamedAnswer; InvalidMessage also for tokens lost or repeated by the
    server's own count; EngineShutdown if the server gave the answer up. An answer all of whose choices have ended is
    complete, also without `[DONE]`.
    """

    def __init__(self, choices: int, prompt_tokens: int, read_choice: ReadChoice) -> None:
        super().__init__(prompt_tokens)
        self._choices, self._read_choice = choices, read_choice
        self._open = set(range(choices))
        self._last: LLMEngineOutput | None = None

    def _finish(self, outputs: list[LLMEngineOutput], kind: type[PenstockError]) -> None:
        if self._open or self._last is None:
            super()._finish(outputs, kind)
        else:
            self.is_done = True
            join(outputs, self._last.with_usage(self.usage))

    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        chunk = self._object(data)
        try:
            for choice in chunk["choices"]:
                output = self._chunk(choice)
                if output.token_ids or output.text:
                    join(outputs, output)
                if (reason := choice.get("finish_reason")) is not None:
                    self._close(output, reason, choice.get("stop_reason"), outputs)
            if (usage := chunk.get("usage")) is not None:
                self._count(usage, is_last=not self._open)
        except (InvalidArgument, KeyError, AttributeError, TypeError, ValueError) as error:
            raise self._invalid(data, error) from error

    def _chunk(self, choice: Mapping[str, Any]) -> LLMEngineOutput:
        """Return the chunk of one choice, without its finish reason."""
        index = choice.get("index") or 0
        if index not in self._open:
            raise InvalidMessage(f"a chunk of choice {index}, which has ended or was not requested")
        ids = checked_ids(choice.get("token_ids") or [])
        self.tokens += len(ids)
        output = LLMEngineOutput(ids) if choice.get("logprobs") is None else self._read_choice(choice, ids)
        if self._choices > 1:
            output.index = index
        return output

    def _close(self, output: LLMEngineOutput, reason: Any, stop_reason: Any, outputs: list[LLMEngineOutput]) -> None:
        """End one choice: its terminal chunk is appended, or kept if it is the last one."""
        last = LLMEngineOutput([], index=output.index, finish_reason=self._reason(reason))
        if type(stop_reason) in (int, str):
            last.stop_reason = stop_reason
        self._open.discard(output.index or 0)
        if self._open:
            join(outputs, last)
        else:
            self._last = last

    def _reason(self, reason: Any) -> FinishReason:
        if (known := _REASONS.get(reason)) is not None:
            return known
        if reason == "abort":
            raise EngineShutdown(f"the server gave the answer up after {self.tokens} tokens")
        if reason == "error":
            raise BackendUnknown(f"the server failed after {self.tokens} tokens")
        return FinishReason.STOP

    def _count(self, usage: Mapping[str, Any], *, is_last: bool) -> None:
        """Take the cached tokens of a usage, and check the count of the last one."""
        details = usage.get("prompt_tokens_details") or {}
        if (cached := details.get("cached_tokens")) is not None:
            self._details = PromptTokensDetails(cached_tokens=int(cached))
        if is_last and (counted := usage.get("completion_tokens")) != self.tokens:
            raise InvalidMessage(f"the server counted {counted} tokens and sent {self.tokens}")
