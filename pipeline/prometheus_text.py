"""Adding labels to metrics that are text already, in the format that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import InvalidArgument

_STRING = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    rf'(?P<name>[ \t]*(?:[A-Za-z_:][A-Za-z0-9_:]*)?)(?:[ \t]*\{{(?P<labels>(?:[^"{{}}]|{_STRING})*)\}}|[ \t])'
    r"[ \t]*(?P<rest>\S.*)"
)
_LABEL = re.compile(rf"(?P<name>{_STRING}|[A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*{_STRING}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """The text with the labels in every sample, after its own; one that a sample has already is left as it is.

    Comments and lines that are no samples stay unchanged. Raises InvalidArgument for a label that has no valid name.
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
