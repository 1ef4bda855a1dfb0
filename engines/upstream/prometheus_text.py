"""The figures of a server's `/metrics`: Prometheus text, as far as discovery and load need it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

from attrs import frozen

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_WHOLE = re.compile(r"[0-9]{1,18}")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@frozen
class Sample:
    """One line of figures."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str, *names: str) -> Iterator[Sample]:
    """Yield the samples of these names, in order. A line that is none, or has no finite value, is left out."""
    for line in text.splitlines():
        if not line.startswith(names) or (found := _LINE.fullmatch(line)) is None or found[1] not in names:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if isfinite(value):
            labels = {name: _plain(label) for name, label in _LABEL.findall(found[2] or "")}
            yield Sample(found[1], labels, value)


def _plain(label: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), label)


def whole(text: str | None) -> int | None:
    """Return the number in a label, such as a rank; None for none, and for anything else."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None
