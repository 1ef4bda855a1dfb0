"""The body of a request while it arrives: its size and its JSON are counted before anything is decoded.

A body beyond a limit is refused before the rest of it is read.

Source: dynamo lib/llm/src/http/service/openai.rs. Other than there, bodies are refused while they arrive, not after.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from anyio.lowlevel import checkpoint
from attrs import define, field, frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.openai import ChatCompletionRequest
from pipeline.wire import WINDOW, JsonSize

from ...limits import HttpLimits
from ..problems import Refusal
from .headers import RequestHeaders

_MB = 1024 * 1024
_SMALL_BYTES = 16 * 1024
"""A body up to this size costs less to decode than to count; only its brackets are counted."""
_TURN_BYTES = 8 * WINDOW
"""Bytes counted in one turn of the loop; a server rarely delivers more at once."""
_SHORT_BYTES, _SHORT_PARTS, _SHORT_VALUES = 512 * 1024, 1_000, 10_000
"""Any body within all three is decoded, checked and converted in about 5 ms."""
_LENGTH = re.compile(r"[0-9]{1,20}")


@frozen
class Body:
    """A body that has arrived completely."""

    content: bytes | bytearray
    is_short: bool
    """Whether the event loop may parse it; a long body is parsed in a worker thread."""


async def read_body(headers: RequestHeaders, receive: Receive, limit_mb: int, limits: HttpLimits) -> Body:
    """Return the whole body.

    Raise Refusal (413) as soon as it is too long, InvalidArgument as soon as its JSON is beyond a limit, and
    ClientDisconnect if the client leaves.
    """
    arriving: ArrivingBody | None = None
    announced = _LENGTH.fullmatch(headers.values.get("content-length", ""))
    check_length(int(announced[0]) if announced else 0, limit_mb)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_last = message.get("body", b""), not message.get("more_body", False)
        if arriving is None:
            if is_last and is_small(part, limits):
                return Body(part, is_short=True)
            arriving = ArrivingBody(limit_mb, limits)
        await arriving.add(part)
        if is_last:
            return arriving.complete()


def check_length(size_bytes: int, limit_mb: int) -> None:
    """Raise Refusal (413) if a body of this size is too long."""
    if size_bytes > limit_mb * _MB:
        text = f"Request body exceeds the limit of {limit_mb} MB set by DYN_HTTP_BODY_LIMIT_MB"
        raise Refusal(413, text, exceeded=ExceededLimit("body_limit_mb", size_bytes / _MB, limit_mb))


def is_small(content: bytes | bytearray, limits: HttpLimits, most_bytes: int = _SMALL_BYTES) -> bool:
    """Return whether a JSON text is so short that it needs no count, and cannot be nested too deeply."""
    return len(content) <= most_bytes and not (0 < limits.max_json_depth < content.count(b"[") + content.count(b"{"))


@define
class ArrivingBody:
    """The part of a body that has arrived, within all limits so far."""

    _limit_mb: int
    _limits: HttpLimits
    _content: bytearray = field(factory=bytearray)
    _size: JsonSize = field(factory=JsonSize)
    _counted: int = 0
    """Bytes of the content that `_size` covers."""

    async def add(self, part: bytes) -> None:
        """Append the next bytes. Raise Refusal (413) if the body is too long, InvalidArgument for its JSON."""
        check_length(len(self._content) + len(part), self._limit_mb)
        with memoryview(part) as view:
            for at in range(0, len(part), WINDOW):
                self._content += view[at : at + WINDOW]
                if len(self._content) - self._counted >= WINDOW:
                    self._count()
                if at % _TURN_BYTES == _TURN_BYTES - WINDOW:
                    await checkpoint()

    def complete(self) -> Body:
        """Return the body after its last byte. Raise InvalidArgument if its JSON is beyond a limit."""
        content, limits = self._content, self._limits
        if len(content) > _SMALL_BYTES or 0 < limits.max_json_depth < content.count(b"[") + content.count(b"{"):
            self._count()
        size = self._size
        is_short = len(content) <= _SHORT_BYTES and size.parts <= _SHORT_PARTS and size.values <= _SHORT_VALUES
        return Body(content, is_short)

    def _count(self) -> None:
        """Count one more window."""
        with memoryview(self._content) as view:
            self._size.add(bytes(view[self._counted : self._counted + WINDOW]))
        self._counted += WINDOW
        check_json(self._size, self._limits)


def check_json(size: JsonSize, limits: HttpLimits, what: str = "JSON body", field: str = "") -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, if a JSON text is beyond a limit."""
    for name, value, threshold, counted in (
        ("max_json_values", size.values, limits.max_json_values, "values"),
        ("max_json_parts", size.parts, limits.max_json_parts, "strings, lists and objects"),
        ("max_json_depth", size.depth, limits.max_json_depth, "levels of lists and objects"),
    ):
        if 0 < threshold < value:
            text = f"Validation: The {what} must have at most {threshold} {counted}"
            raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))


def check_tool_arguments(request: object, limits: HttpLimits, pause: Callable[[], object]) -> None:
    """Raise InvalidArgument if the arguments of a chat's tool calls, as JSON, are beyond the limits of a body.

    Each is one string in the body; the chat template gets it as lists and objects.
    """
    if not isinstance(request, ChatCompletionRequest):
        return
    texts = [call.function.arguments for message in request.messages for call in message.tool_calls or ()]
    contents = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(len, contents)) <= _SMALL_BYTES and all(is_small(content, limits) for content in contents):
        return
    size = JsonSize()
    for content in contents:
        size = JsonSize(size.values, size.parts)  # values and parts add up over all texts, depth does not
        for at in range(0, len(content), WINDOW):
            size.add(content[at : at + WINDOW])
            check_json(size, limits, "arguments of all tool calls", "messages")
            pause()
