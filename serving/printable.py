"""Texts that cannot steer a terminal, wherever they came from."""

from __future__ import annotations

import re

_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line feeds, marks that turn the direction of text, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """The text with every character that could steer a terminal, or not be written to it, spelled as `\\x1b`."""
    return _STEERS.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    """The text, printable and without line feeds: those are spelled as `\\n`."""
    return printable(text).replace("\n", "\\n")
