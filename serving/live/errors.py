"""What a server says instead of an answer -> an error of the tree."""

from __future__ import annotations

from typing import Any

from pipeline import InvalidArgument, PenstockError, StatusError
from pipeline.errors import (
    OVERLOADED,
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    ResourceExhausted,
    Unavailable,
)
from pipeline.wire import from_json

_MESSAGE_MAX = 300
"""Characters of a server's message that are kept."""

_OF_STATUS: dict[int, type[PenstockError]] = {
    429: ResourceExhausted,
    OVERLOADED: ResourceExhausted,
    503: Unavailable,
    502: BackendCannotConnect,
    504: BackendResponseTimeout,
}


def of_status(status: int, body: bytes) -> PenstockError:
    """The error of an answer with a status other than 200.

    Too many requests and overload are refusals, as is 503; what else is the request's fault keeps its status.
    """
    return _error(status, f"HTTP {status}: {_message(body)}")


def of_frame(frame: Any, *, has_tokens: bool) -> PenstockError:
    """The error of an error frame. Once there were tokens it broke, whatever status it names: nothing was refused."""
    code = frame.get("code") if isinstance(frame, dict) else None
    text = _text(frame) or "the answer ends with an error that does not say what it is"
    is_status = isinstance(code, int) and 400 <= code < 600
    return _error(code, text) if is_status and not has_tokens and isinstance(code, int) else BackendUnknown(text)


def _error(status: int, text: str) -> PenstockError:
    if (kind := _OF_STATUS.get(status)) is not None:
        return kind(text)
    return StatusError(text, status=status) if status < 500 else BackendUnknown(text)


def _message(body: bytes) -> str:
    """What a body says: the message of the usual forms, else its text."""
    try:
        said = _text(from_json(body, dict[str, Any]))
    except InvalidArgument:
        said = ""
    return said or _short(body.decode("utf-8", "replace")) or "no message"


def _text(said: Any) -> str:
    """The message in an object, or in the object that it has as its `error`."""
    if isinstance(said, dict):
        inner = said.get("error")
        said = _text(inner) if inner else next((said[name] for name in ("message", "detail") if said.get(name)), "")
    return _short(said if isinstance(said, str) else str(said or ""))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_MAX else line[: _MESSAGE_MAX - 1] + "…"
