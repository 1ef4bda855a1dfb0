"""Metrics as text in the format that Prometheus reads: writing a family, adding labels, putting texts together.

# HELP up Is it up                  a family: its help, its type, then all its samples
# TYPE up gauge
up{worker="7"} 1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import define, field, frozen

from ..errors import InvalidArgument

_STRING = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf'(?P<name>[ \t]*(?:[A-Za-z_:][A-Za-z0-9_:]*)?)(?:[ \t]*\{{(?P<labels>(?:[^"{{}}]|{_STRING})*)\}}|[ \t])'
    r"[ \t]*(?P<rest>\S.*)"
)
_LABEL = re.compile(rf"(?P<name>{_STRING}|[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*{_STRING}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ABOUT = re.compile(r"[ \t]*#[ \t]*(?P<kind>HELP|TYPE)[ \t]+(?P<name>\S+)(?:[ \t]+(?P<text>.*))?")
_END = re.compile(r"[ \t]*#[ \t]*EOF[ \t]*")
_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("total", "created"),
    "histogram": ("bucket", "sum", "count", "created"),
    "gaugehistogram": ("bucket", "gsum", "gcount"),
    "summary": ("sum", "count", "created"),
    "info": ("info",),
}
"""Type of a family -> what its samples may have behind its name and an underscore."""


@frozen
class Sample:
    """One value of a family; `suffix` is behind the family's name, as of a histogram's parts."""

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


def family(name: str, kind: Literal["counter", "gauge", "histogram"], about: str, samples: Iterable[Sample]) -> str:
    """Return the text of a family."""
    help_text = about.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    for sample in samples:
        labels = ",".join(f'{label}="{_escaped(text)}"' for label, text in sample.labels.items())
        lines.append(f"{name}{sample.suffix}{{{labels}}} {float(sample.value)}")
    return "\n".join(lines) + "\n"


def merged(texts: Iterable[str]) -> str:
    """Return the texts as one in which each family stands once, with all its samples; readers refuse any other.

    Of two helps, or types, of a family the first one counts. Families and samples stay in their order. A line that is
    no sample goes with the one before it.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        current = ""
        for line in text.split("\n"):
            if line.strip() and not _END.fullmatch(line):
                current = _sort_in(line, families, current)
    return "".join(line + "\n" for each in families.values() for line in (*each.about.values(), *each.lines))


@define
class _Family:
    kind: str = "untyped"
    about: dict[str, str] = field(factory=dict)
    """Its HELP and its TYPE line."""
    lines: list[str] = field(factory=list)


def _sort_in(line: str, families: dict[str, _Family], current: str) -> str:
    """Put the line into its family, and gives that one's name; `current` is that of the line before."""
    if (about := _ABOUT.fullmatch(line)) is not None:
        name = about["name"]
        its = families.setdefault(name, _Family())
        if about["kind"] not in its.about:
            its.about[about["kind"]] = line
            if about["kind"] == "TYPE":
                its.kind = (about["text"] or "").strip()
        return name
    name = _family_of(line, families) or current
    families.setdefault(name, _Family()).lines.append(line)
    return name


def _family_of(line: str, families: Mapping[str, _Family]) -> str | None:
    """Return the family of a sample; None if the name belongs to no family."""
    found = None if line.lstrip().startswith("#") else _SAMPLE.fullmatch(line)
    if found is None:
        return None
    name = found["name"].strip()
    if not name and (quoted := re.match(_STRING, (found["labels"] or "").lstrip())):
        name = quoted[0]
    base, _, suffix = name.rpartition("_")
    its = families.get(base)
    is_part = name not in families and its is not None and suffix in _SUFFIXES.get(its.kind, ())
    return base if is_part else name


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Return the text with the labels in every sample, after its own; one that a sample has already is left as it is.

    Comments and lines that are no samples stay unchanged. Raise InvalidArgument for a label that has no valid name.
    """
    for name in labels:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no name of a label", field="labels")
    pairs = {name: f'{name}="{_escaped(value)}"' for name, value in labels.items()}
    return "\n".join(_labelled(line, pairs) for line in text.split("\n"))


def _labelled(line: str, pairs: Mapping[str, str]) -> str:
    found = None if line.lstrip().startswith("#") else _SAMPLE.fullmatch(line)
    if found is None:
        return line
    own = (found["labels"] or "").strip().rstrip(",").rstrip()
    known = {label["name"].strip('"') for label in _LABEL.finditer(own)}
    added = [pair for name, pair in pairs.items() if name not in known]
    if not added:
        return line
    inside = ",".join([own, *added] if own else added)
    return f"{found['name']}{{{inside}}} {found['rest']}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
