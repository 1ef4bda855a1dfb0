"""The report of an error that ends a program: one line, and for foreign code the error's class and its own frames.

    Error: KeyError: 'name'
      my_engine.py:12 in start
      my_engine.py:31 in load
      the whole traceback: --log-level debug

Foreign code is neither of this project, nor installed, nor of Python itself: the module that a user writes and runs. If
an installed engine fails, there is no such frame, and its last frames are shown instead.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import chain, described

HINT = "the whole traceback: --log-level debug"

_OURS = tuple(
    f"{Path(__file__).resolve().parents[1] / name}{os.sep}" for name in ("pipeline", "operators", "engines", "serving")
)
_INSTALLED = ("site-packages", "dist-packages")
_PYTHON = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_LAST_FRAMES = 3
"""Frames shown of installed code."""
_FRAMES_MAX = 12
_INDENT = "  "


def report(error: BaseException, place: str = "") -> list[str]:
    """Return the lines to print. `place`, such as an option, comes before the message unless it is part of it."""
    foreign = next((link for link in chain(error) if not isinstance(link, PenstockError)), None)
    text = _one_line(str(error))
    is_bare = foreign is not None and not isinstance(error, OSError) and text == _one_line(described(foreign))
    if foreign is not None and is_bare:
        text = _headline(foreign)
    first = f"Error: {'' if place in text else place}{text}"
    if isinstance(error, OSError) or (isinstance(error, InvalidArgument) and foreign is None):
        return [first]  # its text is written for users
    own = _own_frames(error if foreign is None else foreign)
    if not own and (not is_bare or isinstance(error, InvalidArgument)):
        return [first]
    details = [f"{_INDENT}{line}" for line in (own if foreign is None else _details(foreign))]
    return [first, *details, f"{_INDENT}{HINT}"] if details else [first]


def _details(error: BaseException) -> Iterator[str]:
    """Yield the error's frames; those of each error in a group; those of its cause."""
    yield from _own_frames(error) or _last_frames(error)
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _below(_headline(each), each)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if isinstance(cause, Exception) and not isinstance(cause, PenstockError):  # a cancellation explains nothing
        yield from _below(f"because of {_headline(cause)}", cause)


def _below(headline: str, error: BaseException) -> Iterator[str]:
    yield headline
    for line in _details(error):
        yield f"{_INDENT}{line}"


def _headline(error: BaseException) -> str:
    text, name = _one_line(str(error)), type(error).__name__
    return f"{name}: {text}" if text else name


def _own_frames(error: BaseException) -> list[str]:
    """Return the frames of the code that a user writes and runs."""
    return [
        _shown(frame)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_OURS, *_PYTHON))
        and not any(part in _INSTALLED for part in Path(frame.filename).parts)
        and Path(frame.filename).is_file()
    ][-_FRAMES_MAX:]


def _last_frames(error: BaseException) -> list[str]:
    """Return the last frames of installed code, without those of the import system."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_OURS)) and "importlib" not in Path(frame.filename).parts
    ]
    return [_shown(frame) for frame in frames[-_LAST_FRAMES:]]


def _shown(frame: traceback.FrameSummary) -> str:
    """Return `file:line in function`; a file below the current folder is shown relative to it."""
    file = frame.filename.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"{file}:{frame.lineno} in {frame.name}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
