"""Text and numbers as a page shows them."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

NOT_KNOWN = "\N{EN DASH}"
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535), "�")
"""No page and no picture may have these."""


def escaped(text: str) -> str:
    """Safe between tags and in an attribute, whatever a file or a setting says."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS))


def number(value: float | None) -> str:
    """With thousands separators, and as many digits as say something."""
    if value is None or not isfinite(value):
        return NOT_KNOWN
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    size = abs(value)
    if size < 1:
        return f"{value:#.3g}"
    return f"{value:,.2f}" if size < 100 else f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"


def percent(value: float | None, base: float | None) -> str:
    """By how much a value differs from a base, with its sign; nothing where that cannot be said."""
    if value is None or base is None or not isfinite(value) or not isfinite(base):
        return ""
    if value == base:
        return "±0 %"
    if base == 0:
        return ""
    change = (value - base) / abs(base) * 100
    if abs(change) < 0.05:
        return "≈0 %"
    return f"{change:+,.1f} %".replace("-", "\N{MINUS SIGN}")


def setting(value: Any) -> str:
    """The value of a setting: a text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def value_cell(text: str) -> str:
    """Text of any length as a cell: a long one is broken."""
    return f'<span class="value">{escaped(text)}</span>'


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, caption: str = "") -> str:
    """A table of cells that are HTML already; each row has a heading of its own."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = (
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n' for name, cells in rows
    )
    titled = f"<caption>{caption}</caption>\n" if caption else ""
    body = f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'<div class="wide"><table>\n{titled}{body}</table></div>\n'


def folded(summary: str, body: str) -> str:
    """Shown when somebody asks, and always on paper."""
    return f"<details><summary>{summary}</summary>\n{body}</details>\n"
