"""Cost by workers as a picture that stands alone: the chart of a sweep's page, with its key and its style inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from serving.replay.page_scaling import scaling_figure
from serving.replay.page_style import STYLE
from serving.replay.page_svg import style
from serving.replay.page_text import escaped

_KEY_HEIGHT = 30
_LETTER, _GAP = 7.0, 56.0


def cost_picture(lines: Mapping[str, Sequence[tuple[int, float]]], label: str) -> str:
    """An SVG file of a line for each name, of workers and cost; both axes logarithmic."""
    found = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"(.*)</svg>', scaling_figure(lines, label), re.DOTALL)
    assert found is not None
    width, height, chart = found.groups()
    return (
        f'<svg viewBox="0 -{_KEY_HEIGHT} {width} {int(height) + _KEY_HEIGHT}"{chart}'
        f"{_key(list(lines))}<style>svg{{font-family:sans-serif}}{STYLE}</style>\n</svg>\n"
    )


def _key(names: Sequence[str]) -> str:
    """Which line is which, above the chart."""
    parts, x = [], 60.0
    for at, name in enumerate(names):
        parts.append(f'<path class="line {style(at)}" d="M{x:.1f} -14h26"/>')
        parts.append(f'<text class="name" x="{x + 32:.1f}" y="-10">{escaped(name)}</text>\n')
        x += 32 + len(name) * _LETTER + _GAP
    return "".join(parts)
