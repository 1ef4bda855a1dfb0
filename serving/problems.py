"""From an error to the part of it that a client may see: an HTTP status, a message, and a class for the metrics.

    explain(error)  ──►  Problem  ──►  body() and headers() of an error answer, or frame() in a stream

Only this module decides it. The status is in the error's facts; the message is the error's own only if it was written
for the client.

Source: dynamo lib/llm/src/http/service/openai.rs, ErrorMessage, and error.rs. Other than there, one table serves
whole answers, streams and metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from math import ceil, isfinite
from typing import Any, Literal

from attrs import asdict, evolve, field, frozen

from pipeline import (
    Annotated,
    Cancelled,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    ResponseTimeout,
    Unavailable,
    WorkerOverloaded,
    to_error,
)
from pipeline.errors import CLIENT_CLOSED_REQUEST, OVERLOADED, BackendInvalidArgument, ExceededLimit, StatusError, chain

from .openai import encode, event

ErrorKind = Literal[
    "validation",
    "not_found",
    "overload",
    "unavailable",
    "cancelled",
    "response_timeout",
    "not_implemented",
    "internal",
]
"""Classes of errors in the metrics."""

_OVERLOADED = "Overloaded"
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {
    413: "Payload Too Large",
    CLIENT_CLOSED_REQUEST: "Client Closed Request",
    OVERLOADED: _OVERLOADED,
}
_SENDABLE = range(200, 600)
"""The statuses of answers that every server can send."""
_INTERNAL = "Internal server error"
_CANCELLED = "Request cancelled"
_VALIDATION = "Validation: "
_MESSAGE_BYTES_MAX = 3_072
"""Longest message as JSON: with it every error body stays below 4 KiB, whatever text of the client it repeats."""


def bounded(message: str) -> str:
    """Return the message, cut to at most `_MESSAGE_BYTES_MAX` as JSON, with no half of a character."""
    shown = message[:_MESSAGE_BYTES_MAX]
    if not shown.isascii():
        shown = shown.encode("utf-8", "replace").decode()
    # The longest form of a character is "\\u0000".
    while len(shown) * 6 > _MESSAGE_BYTES_MAX and len(encode(shown)) > _MESSAGE_BYTES_MAX:
        shown = shown[: len(shown) * 7 // 8]
    return shown + "..." if len(shown) < len(message) else shown


@frozen
class Problem:
    """An error as its client sees it."""

    status: int
    message: str = field(converter=bounded)
    """Shortened if it is too long."""
    kind: ErrorKind
    """Its class in the metrics."""
    details: dict[str, Any] | None = None
    retry_after_s: int | None = None
    """Whole seconds after which to try again; None if unknown."""
    type: str | None = None
    """Replaces the status in words."""
    exceeded: ExceededLimit | None = None
    """The limit that refused the request; the body and a header name it."""

    @property
    def reason(self) -> str:
        """`type`, else the status in words."""
        return _REASONS.get(self.status, "Error") if self.type is None else self.type

    def body(self, request_id: str | None = None) -> bytes:
        """Return the JSON body of the error answer to the request with this id."""
        plain: dict[str, Any] = {"message": self.message, "type": self.reason, "code": self.status}
        if self.details is not None:
            plain["details"] = self.details
        if self.exceeded is not None:
            plain["limit"] = asdict(self.exceeded)
        if request_id is not None:
            plain["request_id"] = request_id
        return encode(plain)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the error answer, beside those of every answer."""
        headers = [(b"www-authenticate", b"Bearer")] if self.status == 401 else []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if (exceeded := self.exceeded) is not None:
            text = f"{exceeded.name}; value={exceeded.value:.15g}; threshold={exceeded.threshold:.15g}"
            headers.append((LIMIT_HEADER, text.encode("latin-1", "replace")))
        return headers

    def frame(self) -> bytes:
        """Return the event for a stream that has begun; the stream's header and chunks have the request's id."""
        reason = self.reason.lower().replace(" ", "_").replace("-", "_")
        error: dict[str, Any] = {"message": self.message, "type": reason, "code": self.status}
        if self.exceeded is not None:
            error["limit"] = asdict(self.exceeded)
        return event({"error": error})


REQUEST_ID = "x-request-id"
"""Header of every request and answer: the client's own id, or ours."""

LIMIT_HEADER = b"x-penstock-limit"
"""Header of a refusal by a limit: `name; value=N; threshold=M`."""

INTERNAL = Problem(500, _INTERNAL, "internal")
"""The problem of every error that is hidden from the client."""

CLIENT_GONE = Problem(CLIENT_CLOSED_REQUEST, _CANCELLED, "cancelled")
"""The problem of a request whose client left; it is never sent."""


class Refusal(PenstockError):
    """Raised where the HTTP side itself refuses a request; `problem` is the whole answer."""

    def __init__(
        self, status: int, message: str, kind: ErrorKind | None = None, *, exceeded: ExceededLimit | None = None
    ) -> None:
        super().__init__(message)
        self.exceeded = exceeded
        self.problem = Problem(status, message, kind or kind_of(status, message), exceeded=exceeded)


def kind_of(status: int, message: str, overload_status: int = OVERLOADED) -> ErrorKind:
    """Return the class of a status without one of its own."""
    if status == overload_status:
        return "overload"
    if status == 400:
        return "validation" if message.startswith(_VALIDATION) else "internal"
    return _KINDS.get(status, "validation" if 400 <= status < 500 else "internal")


_KINDS: dict[int, ErrorKind] = {
    404: "not_found",
    429: "overload",
    OVERLOADED: "overload",
    503: "unavailable",
    CLIENT_CLOSED_REQUEST: "cancelled",
    501: "not_implemented",
}


def explain(error: BaseException, overload_status: int = OVERLOADED) -> Problem:
    """Return the problem of an error and its causes: the first row of `_PRECEDENCE` that matches any of them."""
    links = [link for link in chain(to_error(error)) if isinstance(link, PenstockError)]
    for errors, describe in _PRECEDENCE:
        if found := [link for link in links if isinstance(link, errors)]:
            exceeded = next((link.exceeded for link in found if link.exceeded is not None), None)
            problem = describe(found[0], overload_status)
            return evolve(problem, retry_after_s=_retry_after_s(found), exceeded=exceeded)
    return INTERNAL


def _retry_after_s(links: Sequence[PenstockError]) -> int | None:
    """Return the first `retry_after_s` among the errors, rounded up to whole seconds."""
    for link in links:
        known_s = getattr(link, "retry_after_s", None)
        if isinstance(known_s, int | float) and isfinite(known_s) and known_s >= 0:  # it may have come by the wire
            return ceil(known_s)
    return None


def _fixed(kind: ErrorKind, message: str, type: str | None = None) -> Callable[[PenstockError, int], Problem]:
    """Return a row for errors with a fixed text: the status of the error's facts, the same type with every status."""

    def describe(error: PenstockError, overload_status: int) -> Problem:
        status = error.facts.status
        is_default = status == OVERLOADED or status not in _SENDABLE
        return Problem(overload_status if is_default else status, message, kind, type=type)

    return describe


def _own_text(error: PenstockError, _: int) -> Problem:
    return Problem(error.facts.status, error.message, "validation")


def _asserted(error: PenstockError, overload_status: int) -> Problem:
    """Return the problem of a status that an engine set: with its text only if the client is to blame."""
    assert isinstance(error, StatusError)
    status, kind = error.status, kind_of(error.status, error.message, overload_status)
    if 400 <= status < CLIENT_CLOSED_REQUEST:
        return Problem(status, error.message, kind)
    if status == CLIENT_CLOSED_REQUEST:
        return Problem(status, _CANCELLED, kind)
    if status in (503, overload_status):
        return Problem(status, _INTERNAL, kind)
    if 500 <= status < 600:
        return Problem(500, _INTERNAL, "internal", {"backend_status": status})
    return INTERNAL


def _refused(error: PenstockError, _: int) -> Problem:
    assert isinstance(error, Refusal)
    return error.problem


_PRECEDENCE: tuple[tuple[tuple[type[PenstockError], ...], Callable[[PenstockError, int], Problem]], ...] = (
    ((Refusal,), _refused),
    ((ResourceExhausted, WorkerOverloaded), _fixed("overload", "Service temporarily overloaded", _OVERLOADED)),
    ((Unavailable,), _fixed("unavailable", "Service temporarily unavailable")),
    ((InvalidArgument, BackendInvalidArgument), _own_text),
    ((Cancelled,), _fixed("cancelled", _CANCELLED)),
    ((StatusError,), _asserted),
    ((ResponseTimeout,), _fixed("response_timeout", _INTERNAL)),
)


def error_of(item: Annotated[Any]) -> PenstockError | None:
    """Return the error of an error item; an item with only a comment may have its status there, as JSON."""
    error = item.extract_error()
    if error is None or item.error is not None:
        return error
    return _status_error("".join(item.comment or ())) or error


def _status_error(comment: str) -> StatusError | None:
    """Return the error in a comment of the form `{"message": text, "code": status}`."""
    try:
        plain = json.loads(comment)
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("code"), int):
        return None
    return StatusError(str(plain.get("message", "")), status=plain["code"])
