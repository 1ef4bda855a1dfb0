"""Answers of one piece, and the headers every answer has."""

from __future__ import annotations

from starlette.types import Send

from .problems import Problem
from .request_record import RequestRecord

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
STREAM_TYPE = b"text/event-stream"


def reply_headers(media_type: bytes) -> Headers:
    """The headers of any answer; the edge adds the request id."""
    headers = [(b"content-type", media_type)]
    if media_type == STREAM_TYPE:
        headers.append((b"cache-control", b"no-cache"))
    return headers


async def reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Sends the whole answer; a client that is gone by now is none the worse."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    except OSError:
        return


async def reply_problem(send: Send, problem: Problem, record: RequestRecord) -> None:
    """Answer the request with the problem as JSON, with its own headers; a refusal by a limit is noted."""
    record.note(problem)
    headers = reply_headers(JSON_TYPE) + problem.headers()
    await reply(send, problem.status, headers, problem.body(record.id))
