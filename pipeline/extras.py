"""Optional libraries: an import that fails names the extra of penstock that brings what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_OWN = ("pipeline", "operators", "engines", "serving")


@contextmanager
def brought_by(extra: str, *, by: str) -> Iterator[None]:
    """Raise ModuleNotFoundError that names the extra, if the block imports a library that is not installed.

    `by`: the part that needs the library. A missing module of penstock itself is a bug; its error is not changed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in _OWN:
            raise
        text = f"{by} needs {missing.name}: pip install 'penstock[{extra}]'"
        raise ModuleNotFoundError(text, name=missing.name) from missing
