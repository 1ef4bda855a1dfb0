"""The events of a streamed completion -> items of an engine, with the number of tokens each brought. Pure.

How many tokens a chunk holds: as many as it has ids for; else as the running total grew; else one where it has text.
What a total has beyond these, as that at the end may, comes where it is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pipeline import InvalidArgument
from pipeline.codec import from_json, from_plain
from pipeline.errors import Disconnected, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, RoutingData, TimingInfo, WorkerIdInfo
from pipeline.sse import SSEDecoder, SSEMessage

from .problems import of_frame

UNKNOWN_TOKEN = 0
"""Stands for each token whose id the server does not say."""

_ERROR_EVENT = "error"
_EXCERPT = 80


class AnswerReader:
    """Reads one answer as its bytes arrive. The finish reason comes with the last item, however early it was said."""

    def __init__(self) -> None:
        self._events = SSEDecoder()
        self._tokens = 0
        self._reason: FinishReason | None = None
        self._usage: CompletionUsage | None = None
        self.is_done = False
        """Whether `[DONE]` was read."""

    def feed(self, data: bytes) -> Iterator[LLMEngineOutput]:
        """The items that are whole now. Raises what an error frame says, InvalidMessage for what is no chunk, and
        StreamIncomplete for an answer that is said to be done without having been finished."""
        yield from self._take(self._events.feed(data))

    def end(self, *, whole: bool) -> Iterator[LLMEngineOutput]:
        """The items of what was begun, for nothing comes any more; raises unless it is done then, and as `feed`.

        `whole` says whether HTTP agrees that this is the end.
        """
        yield from self._take(self._events.finish())
        if self.is_done:
            return
        if whole:
            raise StreamIncomplete(f"the answer ended after {self._tokens} tokens without [DONE]")
        raise Disconnected(f"the connection was closed after {self._tokens} tokens of the answer")

    def _take(self, messages: list[SSEMessage]) -> Iterator[LLMEngineOutput]:
        for message in messages:
            yield from self._read(message)
        if self._events.is_done and not self.is_done:
            self.is_done = True
            yield self._last()

    def _read(self, message: SSEMessage) -> Iterator[LLMEngineOutput]:
        if message.event == _ERROR_EVENT:
            raise of_frame(_plain(message.data, {"message": " ".join(message.comments)}), has_tokens=self._tokens > 0)
        if message.data is None:
            return
        chunk = _object(message.data)
        if chunk.get("error") or chunk.get("object") == "error":
            raise of_frame(chunk.get("error") or chunk, has_tokens=self._tokens > 0)
        try:
            output = self._output(chunk)
        except (InvalidArgument, AttributeError, TypeError, ValueError) as error:
            raise InvalidMessage(f"not a chunk of a completion: {_excerpt(message.data)}", cause=error) from error
        if output is not None:
            yield output

    def _output(self, chunk: dict[str, Any]) -> LLMEngineOutput | None:
        """The item of a chunk; None for one that says nothing."""
        choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
        nvext: dict[str, Any] = chunk.get("nvext") or {}
        text = choice.get("text") or ""
        if (usage := chunk.get("usage")) is not None:
            self._usage = from_plain(usage, CompletionUsage)
        if (reason := choice.get("finish_reason")) is not None:
            self._reason = _reason(reason)
        ids = nvext.get("completion_token_ids") or choice.get("token_ids")
        token_ids = from_plain(ids, list[int]) if ids else self._uncounted(bool(text), usage is not None)
        self._tokens += len(token_ids)
        routing = _routing(nvext)
        if not token_ids and not text and routing is None:
            return None
        return LLMEngineOutput(token_ids, text=text or None, routing_data=routing)

    def _uncounted(self, has_text: bool, has_total: bool) -> list[int]:
        """Tokens that a total has and no item had so far; without a total, or while it stays 0, one for a text."""
        total = self._usage.completion_tokens if has_total and self._usage is not None else 0
        return [UNKNOWN_TOKEN] * (max(0, total - self._tokens) if total else has_text)

    def _last(self) -> LLMEngineOutput:
        if self._reason is None:
            raise StreamIncomplete(f"the answer was done after {self._tokens} tokens without a finish reason")
        return LLMEngineOutput([], finish_reason=self._reason, completion_usage=self._usage)


def _object(data: str) -> dict[str, Any]:
    try:
        plain = from_json(data, cast("type[Any]", Any))
    except InvalidArgument as error:
        raise InvalidMessage(f"not a chunk of a completion: {_excerpt(data)}", cause=error) from error
    if not isinstance(plain, dict):
        raise InvalidMessage(f"not a chunk of a completion: {_excerpt(data)}")
    return plain


def _plain(data: str | None, otherwise: Any) -> Any:
    """What an error event says, wherever it says it."""
    if data is None:
        return otherwise
    try:
        plain = from_json(data, dict[str, Any])
    except InvalidArgument:
        return {"message": data}
    return plain.get("error") or plain


def _reason(text: str) -> FinishReason:
    """What engines say beyond the words we know, such as `tool_calls`, ends an answer like any stop."""
    if text == "error":
        return FinishReason.error("the server finished the answer with an error")
    try:
        return FinishReason.parse(text)
    except ValueError:
        return FinishReason.STOP


def _routing(nvext: dict[str, Any]) -> RoutingData | None:
    worker, timing = nvext.get("worker_id"), nvext.get("timing")
    if worker is None and timing is None:
        return None
    return RoutingData(
        timing=None if timing is None else from_plain(timing, TimingInfo),
        worker_id=None if worker is None else from_plain(worker, WorkerIdInfo),
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")
