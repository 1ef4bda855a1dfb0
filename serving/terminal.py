"""Output to the terminal: texts without characters that could control it, and tables that fit."""

from __future__ import annotations

import re
import sys
from shutil import get_terminal_size

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tabs and line feeds, marks of text direction, and halves of surrogate pairs."""
_WIDEST = 120
"""Columns of a table on a wider terminal, and without a terminal."""


def printable(text: str) -> str:
    """Return the text with every character that could control a terminal, or not be written to it, as `\\x1b`."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    """Return the printable text with line feeds as `\\n`."""
    return printable(text).replace("\n", "\\n")


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print the text, which may come from a file, a name or an error; every command prints with this alone."""
    stream = sys.stderr if err else sys.stdout
    stream.write(printable(text) + ("\n" if nl else ""))
    stream.flush()


def rendered(text: str) -> str:
    """Return the output of a console, printable and without blanks at the ends of its lines."""
    return "\n".join(line.rstrip() for line in printable(text).removesuffix("\n").split("\n")) + "\n"


def table_width() -> int:
    """Return the columns of a table: those of the terminal, at most 120."""
    return min(get_terminal_size((_WIDEST, 0)).columns, _WIDEST)
