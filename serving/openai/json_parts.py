"""JSON that grows with an answer: each token is encoded when it arrives, so the end of a long answer costs little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from pipeline.wire import to_json

PART_BYTES = 16 * 1024
_TEXTS_AT_ONCE = 256


@define
class JsonParts:
    """Bytes in parts of some kilobytes: they are never copied all at once."""

    _parts: list[bytes] = field(factory=list)
    _recent: bytearray = field(factory=bytearray)

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._recent += data
        if len(self._recent) >= PART_BYTES:
            self._close()

    def extend(self, parts: Iterable[bytes]) -> None:
        """Append all parts; long ones are not copied."""
        for part in parts:
            if len(part) < PART_BYTES:
                self.add(part)
            else:
                self._close()
                self._parts.append(part)

    def all(self) -> list[bytes]:
        """Return all bytes, in order. The caller must not change the list."""
        self._close()
        return self._parts

    def _close(self) -> None:
        if self._recent:
            self._parts.append(bytes(self._recent))
            self._recent.clear()


@define
class JsonText:
    """A JSON string, without its quotes."""

    _parts: JsonParts = field(factory=JsonParts)
    _recent: list[str] = field(factory=list)

    def add(self, text: str) -> None:
        """Append a text. Raise CodecError, now or later, if it has no JSON form."""
        self._recent.append(text)
        if len(self._recent) >= _TEXTS_AT_ONCE:
            self._encode()

    def all(self) -> list[bytes]:
        """Return the string so far, as `JsonParts.all`. Raise CodecError if a text has no JSON form."""
        self._encode()
        return self._parts.all()

    def _encode(self) -> None:
        if self._recent:
            self._parts.add(to_json("".join(self._recent))[1:-1])
            self._recent.clear()


@define
class JsonList:
    """A JSON list, without its brackets."""

    _parts: JsonParts = field(factory=JsonParts)
    is_empty: bool = True

    def add(self, entries: Sequence[Any]) -> None:
        """Append entries. Raise CodecError if one has no JSON form."""
        if entries:
            encoded = to_json(entries)[1:-1]
            self._parts.add(encoded if self.is_empty else b"," + encoded)
            self.is_empty = False

    def all(self) -> list[bytes]:
        """Return the list so far, as `JsonParts.all`."""
        return self._parts.all()


def filled(frame: bytes, places: Iterable[tuple[bytes, bytes, Iterable[bytes]]]) -> list[bytes]:
    """Return the JSON with parts inserted at places, in order. A place is the texts around it, and the parts.

    Each place is the first match behind the former one. The quotes in these texts keep them from matching in a string.
    """
    whole = JsonParts()
    for before, behind, parts in places:
        head, _, rest = frame.partition(before + behind)
        whole.add(head + before)
        whole.extend(parts)
        frame = behind + rest
    whole.add(frame)
    return whole.all()
