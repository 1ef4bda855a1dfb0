"""Answers of one piece, and the headers every answer has."""

from __future__ import annotations

from starlette.types import Send

from .problems import Problem
from .request import REQUEST_ID

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
STREAM_TYPE = b"text/event-stream"


def reply_headers(media_type: bytes, request_id: str | None) -> Headers:
    """The headers of any answer; the client's own request id comes back to it."""
    headers = [(b"content-type", media_type)]
    if media_type == STREAM_TYPE:
        headers.append((b"cache-control", b"no-cache"))
    if request_id is not None:
        headers.append((REQUEST_ID.encode(), request_id.encode("latin-1")))
    return headers


async def reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Sends the whole answer; a client that is gone by now is none the worse."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    except OSError:
        return


async def reply_problem(send: Send, problem: Problem, request_id: str | None) -> None:
    """Send the problem as JSON, with its own headers."""
    headers = reply_headers(JSON_TYPE, request_id) + problem.headers()
    await reply(send, problem.status, headers, problem.body())
