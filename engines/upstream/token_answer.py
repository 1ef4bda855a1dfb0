"""TokenAnswer: makes chunks of the bytes of a streamed answer with token ids, of one or several choices.

    bytes ──► events ──► chunks of tokens, then one terminal chunk for each choice

The last terminal chunk waits for the counts of tokens behind it. `[DONE]` ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown, Disconnected, EngineShutdown, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PromptTokensDetails
from pipeline.wire import SSEDecoder, SSEMessage, plain_from_json

from .errors import excerpt, of_frame

U32_MAX = 2**32 - 1
MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Most bytes without the end of an event."""

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}

ReadChoice = Callable[[Mapping[str, Any], list[int]], LLMEngineOutput]
"""Returns the chunk of a choice with more than its tokens: log probabilities, a text."""


class TokenAnswer:
    """The answer to one request, while its bytes arrive.

    `choices` and `prompt_tokens` are those of the request. `read_choice` reads a choice's log probabilities and other
    parts. Every method raises the errors of the answer: those of an error event, see `of_frame`; InvalidMessage for
    bytes of another form, and for tokens lost or repeated by the server's own count; EngineShutdown if the server gave
    the answer up.
    """

    def __init__(self, choices: int, prompt_tokens: int, read_choice: ReadChoice) -> None:
        self._events = SSEDecoder()
        self._pending_bytes = 0
        self._is_between = True
        self._choices, self._prompt_tokens = choices, prompt_tokens
        self._read_choice = read_choice
        self._open = set(range(choices))
        self._last: LLMEngineOutput | None = None
        self._details: PromptTokensDetails | None = None
        self.tokens = 0
        """Tokens so far, of all choices."""
        self.is_done = False
        """Whether every terminal chunk was returned."""

    @property
    def usage(self) -> CompletionUsage:
        """The tokens so far."""
        usage = CompletionUsage.of(self._prompt_tokens, self.tokens)
        usage.prompt_tokens_details = self._details
        return usage

    def feed(self, data: bytes) -> Iterable[LLMEngineOutput]:
        """Return the chunks that these bytes complete; an error among them is raised behind those before it.

        Nearly always these are whole events of one line each, which are read without a decoder: 2.6 µs a token instead
        of 5.1.
        """
        outputs: list[LLMEngineOutput] = []
        try:
            if self._is_between and (lines := whole_events(data)):
                for line in lines:
                    self._read(line, outputs)
            else:
                self._decode(data, outputs)
        except PenstockError as error:
            return then_raised(outputs, error)
        return outputs

    def end(self, *, whole: bool) -> Iterable[LLMEngineOutput]:
        """Return the chunks that the end of the body completes. `whole`: whether it ended as HTTP announced.

        An answer all of whose choices have ended is complete, also without `[DONE]`. Raise StreamIncomplete for any
        other, Disconnected if the connection broke.
        """
        outputs: list[LLMEngineOutput] = []
        try:
            self._take(self._events.finish(), outputs)
            if not self.is_done and self._open:
                kind = StreamIncomplete if whole else Disconnected
                raise kind(f"the answer ended after {self.tokens} tokens without a finish reason")
        except PenstockError as error:
            return then_raised(outputs, error)
        if not self.is_done:
            outputs.append(self._finished())
        return outputs

    def cancelled(self) -> LLMEngineOutput:
        """Return the chunk that ends an answer which was stopped here."""
        return LLMEngineOutput.cancelled().with_usage(self.usage)

    def _decode(self, data: bytes, outputs: list[LLMEngineOutput]) -> None:
        """Append the chunks of bytes that are cut anywhere."""
        self._is_between = data.endswith(b"\n\n")
        messages = self._events.feed(data)
        self._pending_bytes = 0 if messages else self._pending_bytes + len(data)
        if self._pending_bytes > MAX_EVENT_BYTES:
            raise InvalidMessage(f"the server sent more than {MAX_EVENT_BYTES} bytes without the end of an event")
        self._take(messages, outputs)

    def _take(self, messages: list[SSEMessage], outputs: list[LLMEngineOutput]) -> None:
        for message in messages:
            if message.data is not None:
                self._read(message.data, outputs)
        if self._events.is_done and not self.is_done:
            if self._open:
                raise StreamIncomplete(f"the answer was done after {self.tokens} tokens without a finish reason")
            outputs.append(self._finished())

    def _finished(self) -> LLMEngineOutput:
        last, self.is_done = self._last, True
        assert last is not None, "a choice has ended"
        return last.with_usage(self.usage)

    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        """Append the chunks of one event."""
        chunk = _object(data)
        if chunk.get("error") or chunk.get("object") == "error":
            raise of_frame(chunk.get("error") or chunk, has_tokens=self.tokens > 0)
        try:
            for choice in chunk["choices"]:
                output = self._chunk(choice)
                if output.token_ids or output.text:
                    outputs.append(output)
                if (reason := choice.get("finish_reason")) is not None:
                    self._close(output, reason, choice.get("stop_reason"), outputs)
            if (usage := chunk.get("usage")) is not None:
                self._count(usage, is_last=not self._open)
        except (InvalidArgument, KeyError, AttributeError, TypeError, ValueError) as error:
            raise InvalidMessage(f"not a chunk of an answer: {excerpt(data)}", cause=error) from error

    def _chunk(self, choice: Mapping[str, Any]) -> LLMEngineOutput:
        """Return the chunk of one choice, without its finish reason."""
        index = choice.get("index") or 0
        if index not in self._open:
            raise InvalidMessage(f"a chunk of choice {index}, which has ended or was not requested")
        ids = choice.get("token_ids") or []
        if type(ids) is not list:
            raise InvalidMessage(f"token ids are a list, the server sent {excerpt(str(ids))}")
        for token in ids:
            if type(token) is not int or not 0 <= token <= U32_MAX:
                raise InvalidMessage(f"token ids are whole numbers, the server sent {excerpt(str(token))}")
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
            outputs.append(last)
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


def then_raised(outputs: list[LLMEngineOutput], error: PenstockError) -> Iterator[LLMEngineOutput]:
    yield from outputs
    raise error


_DATA, _END = b"data: {", b"}\n\n"


def whole_events(data: bytes) -> list[bytes] | None:
    """Return the JSON of bytes that are whole events of one line each; None for any others."""
    if not (data.startswith(_DATA) and data.endswith(_END)) or b"\r" in data:
        return None
    if data.count(b"\n") == 2:
        return [data[6:-2]]
    events = data[:-2].split(b"\n\n")
    if data.count(b"\n") != 2 * len(events) or not all(event.startswith(_DATA) for event in events):
        return None
    return [event[6:] for event in events]


def _object(data: str | bytes) -> dict[str, Any]:
    try:
        chunk = plain_from_json(data)
    except InvalidArgument as error:
        raise InvalidMessage(f"not a chunk of an answer: {excerpt(data)}", cause=error) from error
    if type(chunk) is not dict:
        raise InvalidMessage(f"not a chunk of an answer: {excerpt(data)}")
    return chunk
