"""Answers of one piece, and the headers every answer has."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Send

from .problems import Problem
from .request import RequestRecord

Headers = Sequence[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
STREAM_TYPE = b"text/event-stream"


JSON_HEADERS: Headers = ((b"content-type", JSON_TYPE),)
STREAM_HEADERS: Headers = ((b"content-type", STREAM_TYPE), (b"cache-control", b"no-cache"))
"""The headers of any answer, shared by all; the edge adds the request id."""


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
    await reply(send, problem.status, [*JSON_HEADERS, *problem.headers()], problem.body(record.id))
