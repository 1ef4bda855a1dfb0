"""TextAnswer: makes chunks of an answer in text, with the ids of its tokens where the server sends them.

A chunk holds as many tokens as it has ids; without ids as many as the running total grew; without a total one if it has
text. Tokens that only the total at the end has come with that total.
"""

from __future__ import annotations

from typing import Any

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, RoutingData
from pipeline.wire import SSEMessage, from_json, from_plain

from .errors import of_frame
from .streamed_answer import StreamedAnswer

UNKNOWN_TOKEN = 0
"""Stands for each token whose id the server does not send."""

_ERROR_EVENT = "error"
_DONE = "[DONE]"


class TextAnswer(StreamedAnswer):
    """Makes the chunks of one answer of one choice while its bytes arrive. The last chunk has the finish reason."""

    end_mark = _DONE

    def __init__(self) -> None:
        super().__init__(0)
        self.has_ids = True
        """Whether the server sent the id of every token so far."""
        self._reason: FinishReason | None = None
        self._usage: CompletionUsage | None = None

    def cancelled(self) -> LLMEngineOutput:
        """Return the chunk that ends an answer which was stopped here."""
        return LLMEngineOutput.cancelled()

    def _finish(self, outputs: list[LLMEngineOutput], kind: type[PenstockError]) -> None:
        if not self._saw_done:
            super()._finish(outputs, kind)
        if self._reason is None:
            raise StreamIncomplete(f"the answer was done after {self.tokens} tokens without a finish reason")
        self.is_done = True
        outputs.append(LLMEngineOutput([], finish_reason=self._reason, completion_usage=self._usage))

    def _read_message(self, message: SSEMessage, outputs: list[LLMEngineOutput]) -> None:
        if message.event == _ERROR_EVENT:
            raise of_frame(_plain(message.data, {"message": " ".join(message.comments)}), has_tokens=self.tokens > 0)
        super()._read_message(message, outputs)

    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        chunk = self._object(data)
        try:
            output = self._output(chunk)
        except (InvalidArgument, AttributeError, TypeError, ValueError) as error:
            raise self._invalid(data, error) from error
        if output is not None:
            outputs.append(output)

    def _output(self, chunk: dict[str, Any]) -> LLMEngineOutput | None:
        """Return the item of a chunk, None for an empty one."""
        choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
        nvext: dict[str, Any] = chunk.get("nvext") or {}
        text = choice.get("text") or ""
        if (usage := chunk.get("usage")) is not None:
            self._usage = from_plain(usage, CompletionUsage)
        if (reason := choice.get("finish_reason")) is not None:
            self._reason = _reason(reason)
        ids = nvext.get("completion_token_ids") or choice.get("token_ids")
        token_ids = from_plain(ids, list[int]) if ids else self._uncounted(bool(text), usage is not None)
        self.has_ids = self.has_ids and (bool(ids) or not token_ids)
        self.tokens += len(token_ids)
        routing = _routing(nvext)
        if not token_ids and not text and routing is None:
            return None
        return LLMEngineOutput(token_ids, text=text or None, routing_data=routing)

    def _uncounted(self, has_text: bool, has_total: bool) -> list[int]:
        """Return tokens that a total has and no item had so far; without a total, or while it is 0, one for a text."""
        total = self._usage.completion_tokens if has_total and self._usage is not None else 0
        return [UNKNOWN_TOKEN] * (max(0, total - self.tokens) if total else has_text)


def _plain(data: str | None, otherwise: Any) -> Any:
    """Return the error in an event, which servers put into different places."""
    if data is None:
        return otherwise
    try:
        plain = from_json(data, dict[str, Any])
    except InvalidArgument:
        return {"message": data}
    return plain.get("error") or plain


def _reason(text: str) -> FinishReason:
    """Return the finish reason; an unknown word, such as `tool_calls`, counts as a stop."""
    if text == "error":
        return FinishReason.error("the server finished the answer with an error")
    try:
        return FinishReason.parse(text)
    except ValueError:
        return FinishReason.STOP


def _routing(nvext: dict[str, Any]) -> RoutingData | None:
    known = {name: value for name in ("timing", "worker_id") if (value := nvext.get(name)) is not None}
    return from_plain(known, RoutingData) if known else None
