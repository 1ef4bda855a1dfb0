"""The body of a request while it arrives: what it holds is counted before anything is made of it.

A body beyond its limits is refused before the rest of it is read.
"""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint
from attrs import define, field, frozen

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.openai import ChatCompletionRequest
from pipeline.wire import WINDOW, JsonSize

from ...limits import HttpLimits
from ..options import BODY_LIMIT
from ..problems import Refusal

_MB = 1024 * 1024
_SMALL_BYTES = 16 * 1024
"""A body up to this size costs less than its count would save; only brackets are looked for."""
_TURN_BYTES = 8 * WINDOW
"""How much is counted at a time; servers give less at once."""
_SHORT_BYTES, _SHORT_PARTS, _SHORT_VALUES = 512 * 1024, 1_000, 10_000
"""What is decoded, checked and made a record within some 5 ms, whatever it is."""


@frozen
class Body:
    """A body that has arrived whole."""

    content: bytes | bytearray
    is_short: bool
    """Whether it can be parsed at once; a long body is parsed in a worker thread."""


def check_length(size_bytes: int, limit_mb: int) -> None:
    """Raise Refusal (413) if a body of this size is too long."""
    if size_bytes > limit_mb * _MB:
        text = f"Request body exceeds the limit of {limit_mb} MB set by {BODY_LIMIT}"
        raise Refusal(413, text, exceeded=ExceededLimit("body_limit_mb", size_bytes / _MB, limit_mb))


def is_small(content: bytes | bytearray, limits: HttpLimits, most_bytes: int = _SMALL_BYTES) -> bool:
    """Whether a JSON text is so short that what is in it need not be counted, and cannot be nested too deeply."""
    return len(content) <= most_bytes and not (0 < limits.max_json_depth < content.count(b"[") + content.count(b"{"))


@define
class ArrivingBody:
    """A body while it arrives, within its limits so far."""

    _limit_mb: int
    _limits: HttpLimits
    _content: bytearray = field(factory=bytearray)
    _size: JsonSize = field(factory=JsonSize)
    _counted: int = 0

    async def add(self, part: bytes) -> None:
        """Take the next bytes. Raise Refusal (413) if they are too many, InvalidArgument if they hold too much."""
        check_length(len(self._content) + len(part), self._limit_mb)
        with memoryview(part) as view:
            for at in range(0, len(part), WINDOW):
                self._content += view[at : at + WINDOW]
                if len(self._content) - self._counted >= WINDOW:
                    self._count()
                if at % _TURN_BYTES == _TURN_BYTES - WINDOW:
                    await checkpoint()

    def whole(self) -> Body:
        """The body, once its last byte is here. Raise InvalidArgument if it holds too much."""
        content, limits = self._content, self._limits
        if len(content) > _SMALL_BYTES or 0 < limits.max_json_depth < content.count(b"[") + content.count(b"{"):
            self._count()
        size = self._size
        is_short = len(content) <= _SHORT_BYTES and size.parts <= _SHORT_PARTS and size.values <= _SHORT_VALUES
        return Body(content, is_short)

    def _count(self) -> None:
        """Count one window more."""
        with memoryview(self._content) as view:
            self._size.add(bytes(view[self._counted : self._counted + WINDOW]))
        self._counted += WINDOW
        check_json(self._size, self._limits)


def check_json(size: JsonSize, limits: HttpLimits, what: str = "JSON body", field: str = "") -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, if a JSON text holds more than it may."""
    for name, value, threshold, counted in (
        ("max_json_values", size.values, limits.max_json_values, "values"),
        ("max_json_parts", size.parts, limits.max_json_parts, "strings, lists and objects"),
        ("max_json_depth", size.depth, limits.max_json_depth, "levels of lists and objects"),
    ):
        if 0 < threshold < value:
            text = f"Validation: The {what} must have at most {threshold} {counted}"
            raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))


def check_arguments(request: object, limits: HttpLimits, pause: Callable[[], object]) -> None:
    """Raise InvalidArgument if the arguments of a chat's tool calls hold, as JSON, more than a body may.

    Each is one string in the body, and becomes lists and objects before a template sees it.
    """
    if not isinstance(request, ChatCompletionRequest):
        return
    texts = [call.function.arguments for message in request.messages for call in message.tool_calls or ()]
    contents = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(len, contents)) <= _SMALL_BYTES and all(is_small(content, limits) for content in contents):
        return
    size = JsonSize()
    for content in contents:
        size = JsonSize(size.values, size.parts)  # of the next text, on top of those before it
        for at in range(0, len(content), WINDOW):
            size.add(content[at : at + WINDOW])
            check_json(size, limits, "arguments of all tool calls", "messages")
            pause()
