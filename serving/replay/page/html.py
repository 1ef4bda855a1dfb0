"""The HTML of a page: one file with its styles (page.css), tables and charts (page.js), which loads nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535), "�")
"""Characters that HTML does not allow."""

_FILES = resources.files(__package__ or __name__)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, lead: str, body: str, script: str) -> str:
    """Return a whole page. `title` is text, `lead` and `body` are HTML, `script` is the library that draws charts."""
    style, draw = (_FILES.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    scripts = f"<script>{script}</script>\n<script>\n{draw}</script>\n" if 'class="chart"' in body else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{escaped(title)}</h1>\n<p class="lead">{lead}</p></header>\n'
        f"<main>\n{body}</main>\n{scripts}</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """Return a section under a heading; nothing if it is empty. `title` is text, `body` is HTML."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}</section>\n" if body else ""


def escaped(text: str) -> str:
    """Return text that is safe between tags and in an attribute."""
    return html.escape(visible(text))


def visible(text: str) -> str:
    """Return text with what a page cannot show replaced."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_CONTROLS)


def setting_text(value: Any) -> str:
    """Return the value of a setting: a text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def value_cell(text: str) -> str:
    """Return a cell for text of any length: a long one is broken."""
    return f'<span class="value">{escaped(text)}</span>'


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, caption: str = "") -> str:
    """Return a table; each row has a heading. Headings and caption are text, cells are HTML."""
    columns = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    lines = (
        f'<tr><th scope="row">{escaped(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
        for name, cells in rows
    )
    titled = f'<p class="note">{escaped(caption)}</p>\n' if caption else ""
    body = f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>"
    return f'{titled}<div class="wide"><table>\n{body}</table></div>\n'


def folded(summary: str, body: str, *, is_open: bool = False) -> str:
    """Return a part that a click opens and closes; it is printed open. `summary` is text, `body` is HTML."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escaped(summary)}</summary>\n{body}</details>\n" if body else ""
