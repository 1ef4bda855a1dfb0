"""The HTML of a page: one file with its styles, tables and charts, which loads nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535), "�")
"""Characters that HTML does not allow."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#57606a;--edge:#d5dae0;
--good:#116329;--bad:#a40e26;--mark:#fff3bf}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0f1317;--card:#181e24;--ink:#e8ecf0;--soft:#a2adb8;
--edge:#333c45;--good:#5fd38d;--bad:#ff8f87;--mark:#4d4312}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1400px;padding:20px 24px 48px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.6rem;margin:0 0 4px} h2{font-size:1.2rem;margin:32px 0 10px} p{margin:0 0 10px}
h1,h2,.lead,summary,figcaption{overflow-wrap:anywhere}
.lead,.note{color:var(--soft)} .note{display:block;font-size:.82rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,200px),1fr));gap:10px;margin:0}
.cards div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:8px 12px;display:flex;
flex-direction:column;justify-content:space-between}
.cards dt{font-size:.8rem;color:var(--soft)} .cards dd{margin:0;font-size:1.45rem;font-variant-numeric:tabular-nums}
.two,.four{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));margin-bottom:12px}
.four{grid-template-columns:repeat(auto-fit,minmax(min(100%,240px),1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px;min-width:0}
.wide{overflow-x:auto;margin:8px 0 16px}
table{border-collapse:separate;border-spacing:0;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:4px 12px;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
thead th{border-bottom:2px solid var(--edge);white-space:normal;overflow-wrap:anywhere;min-width:7em}
tbody th{font-weight:500} .value{display:inline-block;max-width:48ch;white-space:normal;overflow-wrap:anywhere}
.change{display:inline-block;min-width:5.8em;font-size:.85em} .good,.best{color:var(--good)} .bad{color:var(--bad)}
.same{color:var(--soft)} mark{background:var(--mark);color:inherit;padding:0 3px}
details{margin:8px 0} summary{cursor:pointer;color:var(--soft)}
@media (max-width:640px){body{padding:12px 10px 32px} figure{padding:8px 4px} th,td{padding:4px 8px}
th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:11em;max-width:44vw}}
@media print{@page{size:A4 landscape;margin:12mm} body{max-width:none;padding:0;font-size:11px}
h2{break-after:avoid} figure,tr{break-inside:avoid} .wide{overflow:visible}
details::details-content{content-visibility:visible;display:block}}
"""

_DRAW = """
const settings = {
  responsive: true, displaylogo: false,
  modeBarButtonsToRemove: ["pan2d", "select2d", "lasso2d", "autoScale2d", "sendChartToCloud"],
};
const draw = box => {
  if (box.dataset.drawn) return;
  box.dataset.drawn = "yes";
  const {data, layout} = JSON.parse(box.querySelector("script").textContent);
  const style = getComputedStyle(box.parentElement);
  layout.font.color = style.color;
  layout.hoverlabel = {...layout.hoverlabel, bgcolor: style.backgroundColor, font: {color: style.color}};
  Plotly.newPlot(box.appendChild(document.createElement("div")), data, layout, settings);
};
const boxes = [...document.querySelectorAll(".chart")];
const seen = new IntersectionObserver(
  entries => entries.filter(one => one.isIntersecting).forEach(one => draw(one.target)), {rootMargin: "400px"});
boxes.forEach(box => seen.observe(box));
addEventListener("beforeprint", () => boxes.forEach(draw));
"""
"""Draw a chart when it comes near the window, in the colours of the page."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, lead: str, body: str, script: str) -> str:
    """Return a whole page. `title` is text, `lead` and `body` are HTML, `script` is the library that draws charts."""
    scripts = f"<script>{script}</script>\n<script>{_DRAW}</script>\n" if 'class="chart"' in body else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
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
