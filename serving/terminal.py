"""What goes to the terminal: texts that cannot steer it, in tables that fit. A door of typer."""

from __future__ import annotations

import logging
import re
from shutil import get_terminal_size

_WIDEST = 120
"""Columns of a table: of a wider terminal, and where there is none."""
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line feeds, marks that turn the direction of text, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """The text with every character that could steer a terminal, or not be written to it, spelled as `\\x1b`."""
    return _STEERS.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print the text, which may come from a file, a name or an error; every command prints with this alone."""
    import typer

    typer.echo(printable(text), err=err, nl=nl)


def rendered(text: str) -> str:
    """What a console drew, printable and without blanks at the ends of its lines."""
    return "\n".join(line.rstrip() for line in printable(text).removesuffix("\n").split("\n")) + "\n"


def table_width() -> int:
    """How many columns a table may have: those of the terminal, no more than 120."""
    return min(get_terminal_size((_WIDEST, 0)).columns, _WIDEST)


def log_to_stderr(level: str | int) -> None:
    """Have messages of this level and above written to standard error, a line each with its trace below it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _Printable(logging.Formatter):
    """Messages may hold what a client or a file gave; a line feed in one would begin a line that is no message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
