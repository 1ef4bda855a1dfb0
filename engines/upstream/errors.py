"""The errors of servers as errors of the tree: of a status and its body, and of an error within a stream."""

from __future__ import annotations

from typing import Any

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import (
    OVERLOADED,
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    EngineShutdown,
    ResourceExhausted,
    StatusError,
    Unavailable,
    WorkerOverloaded,
)
from pipeline.wire import from_json

_EXCERPT = 80
_MESSAGE_MAX = 300
"""Characters of a server's message that are kept."""

_OF_STATUS: dict[int, type[PenstockError]] = {
    400: InvalidArgument,
    422: InvalidArgument,
    429: ResourceExhausted,
    OVERLOADED: ResourceExhausted,
    503: Unavailable,
    502: BackendCannotConnect,
    504: BackendResponseTimeout,
}

_OF_ONE_SERVER: dict[type[PenstockError], type[PenstockError]] = {
    ResourceExhausted: WorkerOverloaded,
    Unavailable: WorkerOverloaded,
}
"""What a refusal means where another server may take the request."""

_ENGINE_IS_DEAD = "EngineCore encountered an issue"
"""In the message of a vLLM whose engine process has ended. Source: vllm/v1/engine/exceptions.py, EngineDeadError."""


def of_status(status: int, body: bytes) -> PenstockError:
    """Return the error of an answer with a status other than 200.

    400 and 422 mean a wrong request; too many requests, overload and 503 are refusals; any other 4xx keeps its status.
    """
    return _error(status, f"HTTP {status}: {_message(body)}")


def of_frame(frame: Any, *, has_tokens: bool) -> PenstockError:
    """Return the error of an error event. After tokens it is a failure, whatever its status: nothing was refused."""
    code = frame.get("code") if isinstance(frame, dict) else None
    text = _text(frame) or "the answer ends with an error without a message"
    is_status = isinstance(code, int) and 400 <= code < 600
    return _error(code, text) if is_status and not has_tokens and isinstance(code, int) else _failure(text)


def of_one_server(error: PenstockError) -> PenstockError:
    """Return the error of one of several servers: what it refuses as too busy, another may take."""
    kind = _OF_ONE_SERVER.get(type(error))
    return error if kind is None else kind(error.message)


def excerpt(text: str | bytes) -> str:
    """Return the beginning of a text in quotes."""
    text = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")


def _error(status: int, text: str) -> PenstockError:
    if (kind := _OF_STATUS.get(status)) is not None:
        return kind(text)
    return StatusError(text, status=status) if status < 500 else _failure(text)


def _failure(text: str) -> PenstockError:
    kind = EngineShutdown if _ENGINE_IS_DEAD in text else BackendUnknown
    return kind(text)


def _message(body: bytes) -> str:
    """Return the message in a body of the usual forms, else its text."""
    try:
        text = _text(from_json(body, dict[str, Any]))
    except InvalidArgument:
        text = ""
    return text or _short(body.decode("utf-8", "replace")) or "no message"


def _text(plain: Any) -> str:
    """Return the message in an object, or in the object that is its `error`."""
    if isinstance(plain, dict):
        inner = plain.get("error")
        plain = _text(inner) if inner else next((plain[name] for name in ("message", "detail") if plain.get(name)), "")
    return _short(plain if isinstance(plain, str) else str(plain or ""))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_MAX else line[: _MESSAGE_MAX - 1] + "…"
