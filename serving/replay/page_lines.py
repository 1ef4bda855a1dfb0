"""A chart of lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from attrs import frozen

from .page_axes import Axis
from .page_svg import Frame, figure, legend, style, tip
from .page_text import number

Points: TypeAlias = list[tuple[float, float | None]]
Said: TypeAlias = Sequence[tuple[float, str]]


@frozen
class Line:
    """One line of a chart: its points in the units of the axes, None where it is broken."""

    label: str
    points: Points


def line_chart(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, *, unit: str, said: Said = (), note: str = ""
) -> str:
    """A figure of some lines; `said` is what is told under the pointer at some places of x."""
    frame = Frame.of(x, y)
    paths = [
        f'<path class="line {style(at)}" d="{frame.path(line.points)}"/>\n'
        for at, line in enumerate(lines)
        if line.points
    ]
    description = "; ".join(_in_words(line, unit) for line in lines)
    key = legend([line.label for line in lines]) if len(lines) > 1 else ""
    return figure(title, frame.svg(title, description, *paths, _bands(frame, said)), key=key, note=note)


def _bands(frame: Frame, said: Said) -> str:
    """Upright bands that say what is in them; each reaches half way to its neighbours."""
    places = [frame.place_x(at) for at, _ in said]
    edges = [frame.left, *((left + right) / 2 for left, right in pairwise(places))]
    edges.append(frame.width - frame.right)
    return "".join(
        f'<path class="band" d="M{left:.1f} {frame.top:g}H{right:.1f}V{frame.top + frame.inner_height:g}H{left:.1f}z">'
        f"{tip(text)}</path>\n"
        for left, right, (_, text) in ((*edge, what) for edge, what in zip(pairwise(edges), said, strict=True))
    )


def _in_words(line: Line, unit: str) -> str:
    known = [value for _, value in line.points if value is not None]
    if not known:
        return f"{line.label}: nothing"
    return f"{line.label}: {number(min(known))} to {number(max(known))} {unit}, at the end {number(known[-1])}"
