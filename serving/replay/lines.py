"""The lines of trace files, compressed ones too."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from pipeline import InvalidArgument

_FIELD = "trace"


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that have something on them, by their number from 1; of a path that ends in `.gz` what is inside.

    Raises InvalidArgument for a file that cannot be read to its end.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field=_FIELD, cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", field=_FIELD, cause=error) from error
    except ValueError as error:  # a path with a zero byte
        raise InvalidArgument(f"{str(path)!r} is no path: {error}", field=_FIELD, cause=error) from error
