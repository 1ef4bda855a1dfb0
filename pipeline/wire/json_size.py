"""JsonSize: how much a JSON text holds, counted while its bytes arrive and before anything is made of them.

The counting runs at the speed of `bytes` methods: a few nanoseconds for a byte, and for each string and bracket some
tens. A text that is no JSON gets counts as well; its decoder finds out what is wrong with it.
"""

from __future__ import annotations

from itertools import accumulate

from attrs import define, field

WINDOW = 32 * 1024
"""Bytes that callers should count, or decode, at a time: a few milliseconds of work at the most."""

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def without_escapes(text: bytes) -> bytes:
    r"""Return the text with each `\\` and `\"` replaced by two blanks, so that every quote left delimits a string.

    A backslash left at the very end belongs to what follows the text.
    """
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")


@define
class JsonSize:
    """What has been counted of one JSON text so far."""

    values: int = 0
    """Commas, lists and objects outside of strings: there is at most one value more, and few less."""
    parts: int = 0
    """Strings, names of fields included, lists and objects: each is an object in memory, and takes time to make."""
    depth: int = 0
    """The deepest nesting of lists and objects."""
    _level: int = 0
    _in_string: bool = False
    _carried: bytes = field(default=b"", repr=False)

    def add(self, text: bytes) -> None:
        """Count the next bytes of the text. The time grows with their number, so give no more than `WINDOW`."""
        text = without_escapes(self._carried + text)
        self._carried = b"\\" if text.endswith(b"\\") else b""
        pieces = text.split(b'"')
        self.parts += (len(pieces) - self._in_string) // 2  # quotes that open a string
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        self.values += opened + outside.count(b",")
        self.parts += opened
        if opened or self._level:
            self._follow(outside.translate(None, _NOT_BRACKETS))

    def _follow(self, brackets: bytes) -> None:
        if brackets:
            levels = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._level))
            self.depth = max(self.depth, max(levels))
            self._level = levels[-1]
