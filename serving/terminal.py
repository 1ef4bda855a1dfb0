"""Output to the terminal: printable texts, tables that fit, log messages."""

from __future__ import annotations

import logging
import sys
from shutil import get_terminal_size
from typing import Literal

from .log_format import JsonLines, RequestFields, TextLines
from .printable import printable as printable

ACCESS_LOG = "serving.access"
"""Logger of the access log."""
_WIDEST = 120
"""Columns of a table on a wider terminal, and without a terminal."""


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


def log_to_stderr(level: str | int, form: Literal["text", "json"] = "text", *, access_log: bool = False) -> None:
    """Write messages of this level and above to standard error, and those of the access log if it is on.

    As text a line each with its trace below it, or one JSON object a line: see `log_format`.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RequestFields())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger(ACCESS_LOG).setLevel(logging.INFO if access_log else logging.WARNING)
