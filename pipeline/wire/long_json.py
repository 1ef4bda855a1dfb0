"""Long JSON texts: how much one holds, counted before it is decoded, and decoding it piece by piece.

JsonSize counts while the bytes arrive, at the speed of `bytes` methods: a few nanoseconds for a byte, and for each
string and bracket some tens. A text that is no JSON gets counts as well; its decoder finds out what is wrong with it.

A decoder in C holds the interpreter until it returns: 45 MB of text take it 30 to 80 ms. Here the text is cut before
commas and around long strings. A piece from the middle of the text is made whole with the brackets that are open
around it, decoded, and put into the value of the pieces before it:

    {"a": [1, 2, 3], "b": "c"}      the text
    {"a": [1, 2                     its first piece, decoded as {"a": [1, 2]}
                , 3]                the next, decoded as {"…": [null, 3]}: the list goes on
                    , "b": "c"}     the last, decoded as {"…": null, "b": "c"}
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from attrs import define, field

from ..errors import InvalidArgument

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


Decode = Callable[[bytes], Any]
"""The decoder of a whole JSON text. Raise InvalidArgument for a text that is no JSON."""

_PLACE = secrets.token_hex(8)
"""Name of the field that stands for what came before a piece: no client can guess it."""
_LIST, _OBJECT = ord("["), ord("{")
_OPENING = {_LIST: b"[", _OBJECT: b'{"%b":' % _PLACE.encode()}
_CLOSING = {_LIST: b"]", _OBJECT: b"}"}
_PARTNER = {ord("]"): _LIST, ord("}"): _OBJECT}
_BRACKET = re.compile(rb"[\[\]{}]")
_BLANKS = b" \t\r\n"
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_ESCAPE_BYTES, _PAIR_BYTES = 6, 12
_WINDOWS = 16
"""How many windows without a place to cut are put together before the text is refused."""


def decode_in_pieces(
    text: bytes | bytearray, decode: Decode, *, pause: Callable[[], object], window: int = WINDOW
) -> Any:
    """Return the value of a JSON text that is a list or an object, as `decode` would.

    `pause` is called after each piece of about `window` bytes, at least 64; what it raises ends the decoding. Raise
    InvalidArgument for a text that is no JSON, is neither list nor object, has names of fields that fill a piece
    without a comma between them, or many pieces of blanks or brackets alone.
    """
    with memoryview(text) as view:
        return _Pieces(view, decode, pause, max(window, 64)).run()


@define
class _Open:
    """A list or object that has begun in the text and not ended; `at` is its place in the piece it began in."""

    bracket: int
    at: int
    value: Any = None


@define
class _Pieces:
    _text: memoryview
    _decode: Decode
    _pause: Callable[[], object]
    _window: int
    _open: list[_Open] = field(factory=list)
    _root: Any = None

    def run(self) -> Any:
        if bytes(self._text[:1024]).lstrip(_BLANKS)[:1] not in (b"{", b"["):
            raise InvalidArgument("expected an object")
        at = 0
        while (behind := self._next(at)) is not None:
            at = behind
            self._pause()
        self._add(bytes(self._text[at:]), is_last=True)
        return self._root

    def _next(self, start: int) -> int | None:
        """Decode the text from `start` to the next place where a value has ended, and return that place.

        None, with nothing decoded, if the text ends before.
        """
        for size in range(self._window, self._window * _WINDOWS, self._window):
            if start + size >= len(self._text):
                return None
            masked = without_escapes(bytes(self._text[start : start + size]))
            strings = masked.split(b'"')
            if (comma := _last_comma(strings)) > 0:
                self._add(bytes(self._text[start : start + comma]))
                return start + comma
            if len(strings) % 2 == 0:
                return self._add_string(start, len(masked) - len(strings[-1]) - 1)
        raise InvalidArgument("invalid JSON: no value ends for too long")

    def _add_string(self, start: int, before: int) -> int:
        """Decode what lies before a long string, and the string; return the place behind it."""
        piece = bytes(self._text[start : start + before])
        self._add(piece + b"null")
        text, behind = self._string(start + before + 1)
        value = self._open[-1].value
        value[-1 if type(value) is list else self._name(piece, without_escapes(piece))] = text
        return behind

    def _string(self, at: int) -> tuple[str, int]:
        """Return the string whose first character is at this place, and the place behind its closing quote."""
        text = ""
        while True:
            piece = bytes(self._text[at : at + self._window])
            masked = without_escapes(piece)
            is_last = (size := masked.find(b'"')) >= 0
            if not is_last:
                if len(piece) < self._window:
                    raise InvalidArgument("invalid JSON: a string does not end")
                size = _whole_characters(piece, masked)
            # Python grows the text in place. To join all pieces in the end would be one long call and twice the memory.
            text += self._decode(b'"' + piece[:size] + b'"')
            if is_last:
                return text, at + size + 1
            at += size
            self._pause()

    def _add(self, piece: bytes, *, is_last: bool = False) -> None:
        """Decode a piece that begins behind a value and ends behind one; put it into the value of those before it."""
        going_on = [each.value for each in self._open]
        before = b"".join(_OPENING[each.bracket] for each in self._open) + (b"null" if going_on else b"")
        masked = without_escapes(piece)
        kept = 0 if is_last else self._follow(masked)
        after = b"" if is_last else b"".join(_CLOSING[each.bracket] for each in reversed(self._open))
        found = self._decode(before + piece + after)
        if going_on:
            _extend(going_on, found)
        else:
            self._root = found
        if not is_last:
            self._find_values(kept, piece, masked)

    def _follow(self, masked: bytes) -> int:
        """Take the brackets of a piece; return how many lists and objects stayed open from its first byte to its last.

        Raise InvalidArgument for a bracket without a partner, and if the outermost one has closed.
        """
        strings = masked.split(b'"')
        strings[1::2] = map(bytes, map(len, strings[1::2]))
        kept, opened = len(self._open), list[int]()
        for at in map(re.Match.start, _BRACKET.finditer(b'"'.join(strings))):
            if (partner := _PARTNER.get(masked[at])) is None:
                opened.append(at)
            elif (masked[opened.pop()] if opened else self._open.pop().bracket if self._open else None) != partner:
                raise InvalidArgument("invalid JSON: a bracket has no partner")
            elif not opened:
                kept = min(kept, len(self._open))
        self._open += [_Open(masked[at], at) for at in opened]
        if not self._open:
            raise InvalidArgument("invalid JSON: trailing characters")
        return kept

    def _find_values(self, kept: int, piece: bytes, masked: bytes) -> None:
        """Find what the piece has left open in the value: it is the last thing in whatever is around it."""
        for above, each in zip([None, *self._open][kept:], self._open[kept:], strict=False):
            if above is None:
                each.value = self._root
            elif above.bracket == _LIST:
                each.value = above.value[-1]
            else:
                each.value = above.value[self._name(piece[: each.at], masked[: each.at])]

    def _name(self, piece: bytes, masked: bytes) -> str:
        """Return the name, with its colon the last in a piece, of the field whose value follows the piece."""
        end = masked.rindex(b'"')
        name: str = self._decode(piece[masked.rindex(b'"', 0, end) : end + 1])
        return name


def _extend(going_on: Sequence[Any], found: Any) -> None:
    """Put each level of the decoded piece into the list or object that it continues."""
    for value in going_on:
        if type(value) is list:
            found, rest = found[0], found
            value += rest[1:]
        else:
            found, rest = found.pop(_PLACE), found
            value.update(rest)


def _last_comma(strings: Sequence[bytes]) -> int:
    """Return the place of the last comma outside of strings in a text that was split at its quotes; -1 if none."""
    end = sum(map(len, strings)) + len(strings) - 1
    for index in range(len(strings) - 1, -1, -1):
        end -= len(strings[index])
        if index % 2 == 0 and (comma := strings[index].rfind(b",")) >= 0:
            return end + comma
        end -= 1
    return -1


def _whole_characters(piece: bytes, masked: bytes) -> int:
    """Return the length of a string's piece that can be decoded alone, without cutting its last escape in two."""
    size = len(piece)
    if (escape := masked.rfind(b"\\", size - _PAIR_BYTES)) >= 0:
        before = escape - _ESCAPE_BYTES
        return before if _HIGH_SURROGATE.match(masked, max(before, 0)) else escape
    while size > len(piece) - 4 and piece[size - 1] & 0xC0 == 0x80:
        size -= 1
    return size - 1 if piece[size - 1] >= 0xC0 else size
