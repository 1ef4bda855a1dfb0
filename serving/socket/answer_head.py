"""The status line and headers of answers, and whole answers to requests that never reach the app."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from uuid import uuid4

from ..http import REQUEST_ID, Problem

Headers = Sequence[tuple[bytes, bytes]]

CLOSE = (b"connection", b"close")

_CONTROLS = bytes([*range(9), *range(11, 32), 127])
"""Bytes that no header may hold, except the line feed, which separates the headers while they are checked."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}
_known_names: set[bytes] = set()
_MAX_KNOWN_NAMES = 1000


def answer_head(status: int, defaults: bytes, headers: Headers) -> bytes:
    """Return the head of an answer; `defaults` are the lines of every answer.

    Raise RuntimeError for an invalid header.
    """
    lines = b"\n".join([b"%b: %b" % header for header in headers])
    if len(lines.translate(None, _CONTROLS)) != len(lines) or lines.count(b"\n") >= max(len(headers), 1):
        raise RuntimeError("Invalid HTTP header value.")
    for name, _ in headers:
        if name not in _known_names:
            _check_name(name)
    separator = b"\r\n\r\n" if lines else b"\r\n"
    return b"%b%b%b%b" % (_STATUS_LINES[status], defaults, lines.replace(b"\n", b"\r\n"), separator)


def _check_name(name: bytes) -> None:
    """Check a name once: an app uses the same names for all its answers."""
    if _NAME.fullmatch(name) is None:
        raise RuntimeError("Invalid HTTP header name.")
    if len(_known_names) < _MAX_KNOWN_NAMES:
        _known_names.add(name)


def header_lines(headers: Headers) -> bytes:
    """Return the headers as lines of a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def answer_of(problem: Problem, defaults: bytes) -> bytes:
    """Return the whole answer that refuses a request, after which the connection ends."""
    body = problem.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REQUEST_ID.encode(), str(uuid4()).encode()),
        CLOSE,
        *problem.headers(),
    ]
    return answer_head(problem.status, defaults, headers) + body
