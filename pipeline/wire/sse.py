"""Items of a stream <-> server-sent events.

Source: dynamo lib/llm/src/http/service/openai.rs (EventConverter) and lib/llm/src/protocols/codec.rs
(SseLineCodec, Message). Other than there, an error item keeps its typed error.
"""

from __future__ import annotations

import codecs
import io
from typing import Any, TypeVar

from attrs import Factory, frozen

from ..annotated import ERROR_EVENT, Annotated
from ..errors import Unknown
from ..protocols.timing import LLM_METRICS_EVENT, PAYLOAD_USAGE_EVENT
from .codec import from_json, to_json

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""
_DONE_VALUE = "[DONE]"
_NO_REASON = "unspecified error"


def encode(item: Annotated[Any]) -> bytes | None:
    """Return the event of an item, None for one with nothing to send. Raises the error of an error item.

    Events of our own metrics are not sent: `llm_metrics` loses its event and comments, `payload_usage` everything.
    """
    if item.is_error:
        if item.error is not None and item.error.message:
            raise item.error
        raise Unknown(" -- ".join(item.comment or ()) or _NO_REASON, cause=item.error)
    if item.event == PAYLOAD_USAGE_EVENT:
        return None
    event, comments = item.event, item.comment or []
    if event == LLM_METRICS_EVENT:
        event, comments = None, []
    if item.data is None and event is None:
        return None
    lines = [] if event is None else [b"event: " + _one_line(event)]
    lines += [b": " + _one_line(comment) for comment in comments]
    if item.data is not None:
        lines.append(b"data: " + to_json(item.data))
    return b"\n".join(lines) + b"\n\n"


def _one_line(text: str) -> bytes:
    return text.replace("\r", " ").replace("\n", " ").encode(errors="replace")


@frozen
class SSEMessage:
    """One event as received; what it lacks is None, or empty for comments."""

    id: str | None = None
    event: str | None = None
    data: str | None = None
    comments: list[str] = Factory(list)


class SSEDecoder:
    """Events out of a stream of bytes that is cut anywhere, also inside a character or a line end."""

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._partial: list[str] = []
        self._fields: dict[str, str] = {}
        self._data: list[str] = []
        self._comments: list[str] = []
        self.is_done = False
        """Whether `[DONE]`, which is no event, has been read."""

    def feed(self, data: bytes) -> list[SSEMessage]:
        """Return the events that are whole now."""
        return self._read(self._text.decode(data))

    def finish(self) -> list[SSEMessage]:
        """Return the stream ended here: what was begun counts as an event."""
        return self._read(self._text.decode(b"", final=True) + "\n\n")

    def _read(self, text: str) -> list[SSEMessage]:
        head, *rest = text.split("\n")
        self._partial.append(head)
        if not rest:
            return []
        lines = ["".join(self._partial), *rest]
        self._partial = [lines.pop()]
        return [message for line in lines if (message := self._line(line)) is not None]

    def _line(self, line: str) -> SSEMessage | None:
        """Take one line; an empty one completes the event."""
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.lstrip(" ")
        if not name:
            self._comments.append(value.strip())
        elif name == "data":
            if value == _DONE_VALUE:
                self.is_done = True
            else:
                self._data.append(value)
        elif name == "event" or (name == "id" and "\0" not in value):
            self._fields[name] = value
        return None

    def _dispatch(self) -> SSEMessage | None:
        """Return the event buffered so far; None if there is nothing of one."""
        fields, data, comments = self._fields, self._data, self._comments
        self._fields, self._data, self._comments = {}, [], []
        if not (fields or data or comments):
            return None
        text = "\n".join(data) if data else None
        return SSEMessage(fields.get("id"), fields.get("event"), text, comments)


def to_annotated(message: SSEMessage, data_type: type[T]) -> Annotated[T]:
    """Return the item a received event stands for.

    Raise Unknown with the comments as text for an error event, InvalidArgument if the data is not of its type.
    """
    if message.event == ERROR_EVENT:
        raise Unknown("\n".join(message.comments) or _NO_REASON)
    data = None if message.data is None else from_json(message.data, data_type)
    return Annotated(data, message.id, message.event, message.comments or None)
