"""The frame of a chart as SVG: its size, axes, grid, and what it says to those who cannot see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from .page_axes import Axis
from .page_text import escaped

STYLES = 8
"""So many colours and dashes differ; after them they begin again."""
_LETTER = 6.6
"""How wide a character of the small text is, about."""


@frozen
class Frame:
    """The rectangle of a chart in which values have their place, and the paper around it. In CSS pixels."""

    x: Axis
    y: Axis
    width: float = 640.0
    height: float = 250.0
    left: float = 56.0
    right: float = 14.0
    top: float = 12.0
    bottom: float = 42.0

    @classmethod
    def of(cls, x: Axis, y: Axis, width: float = 640.0, height: float = 250.0) -> Frame:
        """With room for what is written at the axes."""
        widest = max((len(text) for _, text in y.ticks), default=1) * _LETTER
        last = len(x.ticks[-1][1]) * _LETTER / 2 if x.ticks else 0.0
        return cls(
            x,
            y,
            width,
            height,
            left=widest + (30 if y.label else 12),
            right=max(14.0, last + 4),
            bottom=42.0 if x.label else 26.0,
        )

    @property
    def inner_width(self) -> float:
        return self.width - self.left - self.right

    @property
    def inner_height(self) -> float:
        return self.height - self.top - self.bottom

    def place_x(self, value: float) -> float:
        return self.left + self.x.part(value) * self.inner_width

    def place_y(self, value: float) -> float:
        return self.top + (1 - self.y.part(value)) * self.inner_height

    def path(self, points: Iterable[tuple[float, float | None]]) -> str:
        """A line through the points, broken where there is none; a point alone is a dash."""
        pieces: list[list[tuple[float, float]]] = [[]]
        for x, y in points:
            if y is not None and self.y.shows(y) and self.x.shows(x):
                pieces[-1].append((self.place_x(x), self.place_y(y)))
            elif pieces[-1]:
                pieces.append([])
        return "".join(_piece(places) for places in pieces if places)

    def svg(self, title: str, description: str, *marks: str, grid_x: bool = False, grid_y: bool = True) -> str:
        """The picture. Its description says in words what the marks show."""
        said = escaped(f"{title}. {description}" if description else title)
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{said}" '
            f'xmlns="http://www.w3.org/2000/svg">\n{self._axes(grid_x, grid_y)}{"".join(marks)}</svg>\n'
        )

    def _axes(self, grid_x: bool, grid_y: bool) -> str:
        left, right, foot = self.left, self.width - self.right, self.height - self.bottom
        parts = []
        for value, text in self.y.ticks:
            at = self.place_y(value)
            parts.append(f'<path class="grid" d="M{left:.1f} {at:.1f}H{right if grid_y else left - 4:.1f}"/>')
            parts.append(_text(left - 6, at + 4, text, "end"))
        for value, text in self.x.ticks:
            at = self.place_x(value)
            reach = self.top if grid_x else foot + 4
            parts.append(f'<path class="grid" d="M{at:.1f} {foot:.1f}V{reach:.1f}"/>')
            parts.append(_text(at, foot + 17, text, "middle"))
        parts.append(f'<path class="axis" d="M{left:.1f} {foot:.1f}H{right:.1f}"/>')
        if self.x.label:
            parts.append(_text(left + self.inner_width / 2, self.height - 6, self.x.label, "middle", "name"))
        if self.y.label:
            middle = self.top + self.inner_height / 2
            turned = f' transform="rotate(-90 13 {middle:.1f})"'
            parts.append(_text(13, middle, self.y.label, "middle", "name", turned))
        return "\n".join(parts) + "\n"


def style(index: int) -> str:
    """The class of the one with this number among those in a chart."""
    return f"s{index % STYLES}"


def tip(text: str) -> str:
    """What a mark says under the pointer."""
    return f"<title>{escaped(text)}</title>"


def dot(frame: Frame, x: float, y: float, at: int, text: str, is_front: bool = False) -> str:
    """A point in the style of a number, with what it says under the pointer; one in front stands out."""
    kind, radius = ("dot front", 6) if is_front else ("dot", 4.5)
    place = f'cx="{frame.place_x(x):.1f}" cy="{frame.place_y(y):.1f}"'
    return f'<circle class="{kind} {style(at)}" {place} r="{radius}">{tip(text)}</circle>\n'


def figure(title: str, svg: str, *, key: str = "", note: str = "") -> str:
    """A chart with its title, the key to its lines and a note."""
    said = f'<span class="note">{escaped(note)}</span>' if note else ""
    return f"<figure>\n<figcaption><strong>{escaped(title)}</strong>{key}{said}</figcaption>\n{svg}</figure>\n"


def legend(labels: Iterable[str], *, of_dots: bool = False) -> str:
    """Which line is which, or which dot."""
    mark, shape = ("dot", "M9 4a4 4 0 1 0 8 0a4 4 0 1 0 -8 0") if of_dots else ("line", "M1 4H25")
    rows = (
        f'<li><svg class="key" viewBox="0 0 26 8" aria-hidden="true">'
        f'<path class="{mark} {style(at)}" d="{shape}"/></svg>{escaped(label)}</li>'
        for at, label in enumerate(labels)
    )
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _piece(places: Sequence[tuple[float, float]]) -> str:
    if len(places) == 1:
        ((x, y),) = places
        return f"M{x - 2:.1f} {y:.1f}h4"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "", more: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{more}>{escaped(text)}</text>'
