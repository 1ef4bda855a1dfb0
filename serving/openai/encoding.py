"""JSON for the wire: plain values, and the one text that changes from token to token."""

from __future__ import annotations

from typing import Any

from msgspec.json import Encoder

encode = Encoder().encode
"""The JSON of a plain value; a text comes out quoted and escaped."""

PLACE = "\x00text\x00"
"""Stands for the text in `around`."""


def event(plain: Any) -> bytes:
    """The server-sent event whose data is this plain value."""
    return b"data: " + encode(plain) + b"\n\n"


def around(plain: Any) -> tuple[bytes, bytes]:
    """The event's bytes before and after the text, in a plain value that has `PLACE` in its stead.

    `before + encode(text) + after` is then the event of any text, for a fraction of encoding the whole value.
    """
    before, _, after = event(plain).rpartition(encode(PLACE))
    return before, after
