"""StreamedAnswer: what all answers by server-sent events have in common; and chunks that came together as one.

bytes, cut anywhere ──► events ──► a subclass reads each ──► chunks of the tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import Disconnected, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PromptTokensDetails
from pipeline.wire import SSEDecoder, SSEMessage, plain_from_json

from .errors import excerpt, of_frame

U32_MAX = 2**32 - 1

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Most bytes without the end of an event."""

JOINED_MAX_TOKENS = 64
"""Most tokens of a chunk that was joined of several."""


class StreamedAnswer(ABC):
    """The answer to one request with so many tokens, while its bytes arrive.

    Every method raises the errors of the answer: those of an error event, see `of_frame`; InvalidMessage for bytes of
    another form.
    """

    end_mark: ClassVar[str] = "a finish reason"
    """What a whole answer ends with."""

    def __init__(self, prompt_tokens: int) -> None:
        self._events = SSEDecoder()
        self._pending_bytes, self._is_between, self._saw_done = 0, True, False
        self._prompt_tokens = prompt_tokens
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

        Nearly always these are whole events of one line each, which are read without a decoder: for half of the time.
        """
        outputs: list[LLMEngineOutput] = []
        try:
            if self._is_between:
                events, data = whole_events(data)
                self._take(events, outputs)
            if data:
                self._decode(data, outputs)
        except PenstockError as error:
            return _then_raised(outputs, error)
        return outputs

    def end(self, *, whole: bool) -> Iterable[LLMEngineOutput]:
        """Return the chunks that the end of the body completes. `whole`: whether it ended as HTTP announced.

        Raise StreamIncomplete unless the answer is complete, Disconnected if the connection broke.
        """
        outputs: list[LLMEngineOutput] = []
        try:
            self._take_messages(self._events.finish(), outputs)
            if not self.is_done:
                self._finish(outputs, StreamIncomplete if whole else Disconnected)
        except PenstockError as error:
            return _then_raised(outputs, error)
        return outputs

    def cancelled(self) -> LLMEngineOutput:
        """Return the chunk that ends an answer which was stopped here."""
        return LLMEngineOutput.cancelled().with_usage(self.usage)

    # -- of a kind of answer

    @abstractmethod
    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        """Append the chunks of one event."""

    def _finish(self, outputs: list[LLMEngineOutput], kind: type[PenstockError]) -> None:
        """Append the last chunks, at `[DONE]` or the end of the body; raise an error of this kind unless the answer is
        complete."""
        raise kind(f"the answer ended after {self.tokens} tokens without {self.end_mark}")

    def _read_message(self, message: SSEMessage, outputs: list[LLMEngineOutput]) -> None:
        if message.data is not None:
            self._read(message.data, outputs)

    # -- all answers

    def _object(self, data: str | bytes) -> dict[str, Any]:
        """Return the object of an event. Raise the error of one that is an error."""
        try:
            chunk = plain_from_json(data)
        except InvalidArgument as error:
            raise self._invalid(data, error) from error
        if type(chunk) is not dict:
            raise self._invalid(data)
        if chunk.get("error") or chunk.get("object") == "error":
            raise of_frame(chunk.get("error") or chunk, has_tokens=self.tokens > 0)
        return chunk

    def _invalid(self, data: str | bytes, cause: Exception | None = None) -> InvalidMessage:
        return InvalidMessage(f"not a chunk of an answer: {excerpt(data)}", cause=cause)

    def _decode(self, data: bytes, outputs: list[LLMEngineOutput]) -> None:
        """Append the chunks of bytes that are cut anywhere."""
        self._is_between = data.endswith(b"\n\n")
        messages = self._events.feed(data)
        self._pending_bytes = 0 if messages else self._pending_bytes + len(data)
        if self._pending_bytes > MAX_EVENT_BYTES:
            raise InvalidMessage(f"the server sent more than {MAX_EVENT_BYTES} bytes without the end of an event")
        self._take_messages(messages, outputs)

    def _take_messages(self, messages: list[SSEMessage], outputs: list[LLMEngineOutput]) -> None:
        for message in messages:
            self._read_message(message, outputs)
        if self._events.is_done:
            self._take([_DONE], outputs)

    def _take(self, events: list[bytes], outputs: list[LLMEngineOutput]) -> None:
        for event in events:
            if event.endswith(_DONE) and event.strip() == _DONE:
                self._saw_done = True
            else:
                self._read(event, outputs)
        if self._saw_done and not self.is_done:
            self._finish(outputs, StreamIncomplete)


def join(outputs: list[LLMEngineOutput], output: LLMEngineOutput) -> None:
    """Append a chunk, or put its tokens behind those of the last one if both are of one choice.

    All that is behind an engine costs as much for a chunk of many tokens as for one token. A terminal chunk may be
    joined to the tokens before it.
    """
    last = outputs[-1] if outputs else None
    if last is None or not _may_join(last, output):
        outputs.append(output)
        return
    last.token_ids += output.token_ids
    if last.log_probs is not None and output.log_probs is not None:
        last.log_probs += output.log_probs
    if last.top_logprobs is not None and output.top_logprobs is not None:
        last.top_logprobs += output.top_logprobs
    if output.text is not None:
        last.text = (last.text or "") + output.text
    last.finish_reason, last.stop_reason = output.finish_reason, output.stop_reason
    last.completion_usage = output.completion_usage


def _may_join(last: LLMEngineOutput, output: LLMEngineOutput) -> bool:
    if last.index != output.index or last.finish_reason is not None or output.disaggregated_params is not None:
        return False
    if not output.token_ids:
        return True
    return (
        len(last.token_ids) + len(output.token_ids) <= JOINED_MAX_TOKENS
        and (last.log_probs is None) == (output.log_probs is None)
        and (last.top_logprobs is None) == (output.top_logprobs is None)
    )


def checked_ids(ids: Any) -> list[int]:
    """Return a list of token ids. Raise InvalidMessage for anything else."""
    if type(ids) is not list:
        raise InvalidMessage(f"token ids are a list, the server sent {excerpt(str(ids))}")
    for token in ids:
        if type(token) is not int or not 0 <= token <= U32_MAX:
            raise InvalidMessage(f"token ids are whole numbers, the server sent {excerpt(str(token))}")
    return ids


_DATA, _DONE = b"data: ", b"[DONE]"


def whole_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole events of one line each that the bytes begin with, and the bytes behind them.

    No events if there is anything else among them.
    """
    end = data.rfind(b"\n\n") + 2
    events = data[len(_DATA) : end - 2].split(b"\n\n" + _DATA)
    if data.startswith(_DATA) and data.count(b"\n", 0, end) == 2 * len(events) and b"\r" not in data:
        return events, data[end:]
    return [], data


def _then_raised(outputs: list[LLMEngineOutput], error: PenstockError) -> Iterator[LLMEngineOutput]:
    yield from outputs
    raise error
