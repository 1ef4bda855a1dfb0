"""TextAnswer: makes chunks of an answer in text, with the ids of its tokens where the server sends them.

A chunk holds as many tokens as it has ids; without ids as many as the running total grew; without a total one if it has
text. Tokens that only the total at the end has come with that total.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import InvalidArgument
from pipeline.errors import Disconnected, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, RoutingData
from pipeline.wire import SSEDecoder, SSEMessage, from_json, from_plain

from .errors import excerpt, of_frame

UNKNOWN_TOKEN = 0
"""Stands for each token whose id the server does not send."""

_ERROR_EVENT = "error"


class TextAnswer:
    """Makes the chunks of one answer of one choice while its bytes arrive. The last chunk has the finish reason."""

    def __init__(self) -> None:
        self._events = SSEDecoder()
        self.tokens = 0
        """Tokens so far."""
        self.has_ids = True
        """Whether the server sent the id of every token so far."""
        self._reason: FinishReason | None = None
        self._usage: CompletionUsage | None = None
        self.is_done = False
        """Whether `[DONE]` was read."""

    def feed(self, data: bytes) -> Iterator[LLMEngineOutput]:
        """Yield the chunks that these bytes complete.

        Raise the error of an error event, InvalidMessage for an invalid chunk, and StreamIncomplete for `[DONE]`
        without a finish reason.
        """
        yield from self._take(self._events.feed(data))

    def end(self, *, whole: bool) -> Iterator[LLMEngineOutput]:
        """Yield the chunks that the end of the body completes. Raise as `feed`, and unless the answer is done.

        `whole`: whether the body ended as HTTP announced.
        """
        yield from self._take(self._events.finish())
        if self.is_done:
            return
        if whole:
            raise StreamIncomplete(f"the answer ended after {self.tokens} tokens without [DONE]")
        raise Disconnected(f"the connection was closed after {self.tokens} tokens of the answer")

    def cancelled(self) -> LLMEngineOutput:
        """Return the chunk that ends an answer which was stopped here."""
        return LLMEngineOutput.cancelled()

    def _take(self, messages: list[SSEMessage]) -> Iterator[LLMEngineOutput]:
        for message in messages:
            yield from self._read(message)
        if self._events.is_done and not self.is_done:
            self.is_done = True
            yield self._last()

    def _read(self, message: SSEMessage) -> Iterator[LLMEngineOutput]:
        if message.event == _ERROR_EVENT:
            raise of_frame(_plain(message.data, {"message": " ".join(message.comments)}), has_tokens=self.tokens > 0)
        if message.data is None:
            return
        chunk = _object(message.data)
        if chunk.get("error") or chunk.get("object") == "error":
            raise of_frame(chunk.get("error") or chunk, has_tokens=self.tokens > 0)
        try:
            output = self._output(chunk)
        except (InvalidArgument, AttributeError, TypeError, ValueError) as error:
            raise InvalidMessage(f"not a chunk of a completion: {excerpt(message.data)}", cause=error) from error
        if output is not None:
            yield output

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

    def _last(self) -> LLMEngineOutput:
        if self._reason is None:
            raise StreamIncomplete(f"the answer was done after {self.tokens} tokens without a finish reason")
        return LLMEngineOutput([], finish_reason=self._reason, completion_usage=self._usage)


def _object(data: str) -> dict[str, Any]:
    try:
        return from_json(data, dict[str, Any])
    except InvalidArgument as error:
        raise InvalidMessage(f"not a chunk of a completion: {excerpt(data)}", cause=error) from error


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
