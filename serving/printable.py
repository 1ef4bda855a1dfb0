"""Texts without characters that could control a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tabs and line feeds, marks of text direction, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """Return the text with every character that could control a terminal, or not be written to it, as `\\x1b`."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    """Return the printable text with line feeds as `\\n`."""
    return printable(text).replace("\n", "\\n")
