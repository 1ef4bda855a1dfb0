"""The body of a request while it arrives: what it holds is counted before anything is made of it.

A body beyond its limits is refused before the rest of it is read.
"""

from __future__ import annotations

from anyio.lowlevel import checkpoint
from attrs import define, field, frozen

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.json_size import WINDOW, JsonSize

from ..limits import HttpLimits
from .options import BODY_LIMIT
from .problems import Refusal

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

    content: bytearray
    is_short: bool
    """Whether it can be parsed at once; a long body is parsed in a worker thread."""


@define
class ArrivingBody:
    """A body while it arrives, within its limits so far."""

    _limit_bytes: int
    _limits: HttpLimits
    _content: bytearray = field(factory=bytearray)
    _size: JsonSize = field(factory=JsonSize)
    _counted: int = 0

    def announce(self, size_bytes: int) -> None:
        """Raise Refusal (413) if the whole body will be too long."""
        if size_bytes > self._limit_bytes:
            text = f"Request body exceeds the limit of {self._limit_bytes // _MB} MB set by {BODY_LIMIT}"
            raise Refusal(413, text, exceeded=ExceededLimit("body_limit_mb", size_bytes / _MB, self._limit_bytes / _MB))

    async def add(self, part: bytes) -> None:
        """Take the next bytes. Raise Refusal (413) if they are too many, InvalidArgument if they hold too much."""
        self.announce(len(self._content) + len(part))
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
        size, limits = self._size, self._limits
        with memoryview(self._content) as view:
            size.add(bytes(view[self._counted : self._counted + WINDOW]))
        self._counted += WINDOW
        _check("max_json_values", size.values, limits.max_json_values, "values")
        _check("max_json_parts", size.parts, limits.max_json_parts, "strings, lists and objects")
        _check("max_json_depth", size.depth, limits.max_json_depth, "levels of lists and objects")


def _check(name: str, value: int, threshold: int, what: str) -> None:
    if 0 < threshold < value:
        text = f"Validation: The JSON body must have at most {threshold} {what}"
        raise InvalidArgument(text, exceeded=ExceededLimit(name, value, threshold))
