"""The two replies: an answer as events that leave at once, or as one JSON body at the end.

Generation ── take(output), annotate(item) ──► StreamedReply: a frame each
                                           ──► WholeReply: collected until `end`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import Any

from pipeline import Annotated
from pipeline.errors import ExceededLimit
from pipeline.protocols import BackendOutput
from pipeline.wire import DONE, encode

from ...openai import Answer, Chunks
from ..options import HttpOptions
from ..problems import Refusal, explain
from ..request import JSON_HEADERS, Headers
from ..side_task import SideTask, Work
from .writer import ReplyWriter, Send

STREAM_HEADERS: Headers = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))
"""Shared by all streams; the edge adds the request id."""

_ITEM_BYTES = 40
"""Bytes of an item in a whole answer beside its text, with the id of its token, which clients may want."""

_CANDIDATE_BYTES = 128
"""Bytes of a token or candidate with its log probability (measured: 75 to 115 for a short one)."""


class Reply(ReplyWriter, ABC):
    """The answer of one request, made of the items of all its prompts."""

    __slots__ = ()

    @abstractmethod
    def begin(self) -> None:
        """Called when one more prompt has its first item that is not an error."""

    @abstractmethod
    def take(self, output: BackendOutput, prompt: int) -> bool:
        """Add an item of that prompt. Return whether to await `room` before the next one."""

    @abstractmethod
    def annotate(self, item: Annotated[Any]) -> bool:
        """Add the event and comments of an item, without its data. Return as `take` does."""

    @abstractmethod
    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Complete the answer. `finished`: whether a choice has its finish reason."""


class StreamedReply(Reply):
    """Server-sent events, which leave once no prompt can fail with a status any more."""

    __slots__ = ("_chunks", "_not_begun", "_overload_status")

    def __init__(
        self,
        send: Send,
        on_gone: Callable[[], object],
        start: Callable[[Work], SideTask],
        chunks: Chunks,
        options: HttpOptions,
    ) -> None:
        super().__init__(send, STREAM_HEADERS, on_gone, start, options.keep_alive_s)
        self._chunks = chunks
        self._overload_status = options.overload_status
        self._not_begun = chunks.form.prompts

    def begin(self) -> None:
        self._not_begun -= 1
        if self._not_begun == 0:
            self.commit()

    def take(self, output: BackendOutput, prompt: int) -> bool:
        frame = self._chunks.frame(output, prompt)
        return frame is not None and self.put(frame)

    def annotate(self, item: Annotated[Any]) -> bool:
        frame = encode(item.transfer(None))
        return frame is not None and self.put(frame)

    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Put the failure or the usage, then `[DONE]`, which ends every stream."""
        if failure is not None:
            self.put(explain(failure, self._overload_status).frame())
        elif self._chunks.form.include_usage and finished:
            self.put(self._chunks.usage_frame())
        self.put(DONE)
        self.commit()
        self.finish()


class WholeReply(Reply):
    """One JSON body of at most `max_whole_answer_bytes` as it is held in memory. Annotations are left out.

    `take` raises Refusal (400) for an answer that is longer.
    """

    __slots__ = ("_answer", "_held_bytes", "_limit_bytes")

    def __init__(
        self,
        send: Send,
        on_gone: Callable[[], object],
        start: Callable[[Work], SideTask],
        answer: Answer,
        options: HttpOptions,
    ) -> None:
        super().__init__(send, JSON_HEADERS, on_gone, start)
        self._answer = answer
        self._limit_bytes = options.limits.max_whole_answer_bytes or inf
        self._held_bytes = 0

    def begin(self) -> None:
        return

    def take(self, output: BackendOutput, prompt: int) -> bool:
        self._held_bytes += _ITEM_BYTES + len(output.text or "")
        if output.top_logprobs is not None or output.log_probs is not None:
            positions = output.top_logprobs or ()
            self._held_bytes += _CANDIDATE_BYTES * sum(1 + len(candidates) for candidates in positions)
            self._held_bytes += _CANDIDATE_BYTES * len(output.log_probs or ())
        if self._held_bytes > self._limit_bytes:
            limit = ExceededLimit("max_whole_answer_bytes", self._held_bytes, self._limit_bytes)
            raise Refusal(400, "The answer is too long for one piece: ask for a stream", "validation", exceeded=limit)
        self._answer.add(output, prompt)
        return False

    def annotate(self, item: Annotated[Any]) -> bool:
        return False

    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Put the whole body. Raise CodecError for a text that has no JSON form."""
        parts = self._answer.json_parts()
        self.put_whole(parts, [*JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, parts)))])
