"""A real server on a real socket with small limits, and connections that send any bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from attrs import define, field, frozen
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.limits import HttpLimits
from serving.problems import Problem
from serving.server import HttpServer, listen

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


@frozen
class Answer:
    """An answer that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send all bytes. The error of a connection that the server closes meanwhile is ignored."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> Answer:
        """Read one answer with a length or in chunks. Raise EOFError if the connection ends before it does."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(status_line.split(" ")[1]), headers, body)

    async def rest(self) -> bytes:
        """Return all bytes until the server closes or cuts the connection."""
        parts = []
        with suppress(ConnectionError):
            while part := await self.reader.read(65536):
                parts.append(part)
        return b"".join(parts)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


@define
class Served:
    """A running server. `refused` has every problem that it reported."""

    server: HttpServer
    port: int
    refused: list[tuple[Problem, str]]
    _opened: list[Raw] = field(factory=list)

    async def connect(self, **how: Any) -> Raw:
        if "ssl" in how:
            how["server_hostname"] = "127.0.0.1"
        if "sock" not in how:
            how |= {"host": "127.0.0.1", "port": self.port}
        raw = Raw(*await asyncio.open_connection(**how))
        self._opened.append(raw)
        return raw

    async def request(self, data: bytes, **how: Any) -> Answer:
        """Return the answer to these bytes on a connection of their own."""
        raw = await self.connect(**how)
        await raw.send(data)
        answer = await raw.answer()
        await raw.close()
        return answer

    @property
    def limits_hit(self) -> list[str]:
        return [problem.exceeded.name for problem, _ in self.refused if problem.exceeded is not None]


@asynccontextmanager
async def serve(app: ASGIApp | None = None, *, at_once: bool = False, **options: Any) -> AsyncIterator[Served]:
    """Serve an app, by default `echo`. `options` are fields of `HttpLimits` and parameters of `HttpServer`.

    At the end the server stops, `at_once` without waiting for connections, and nothing may be counted any more.
    """
    refused: list[tuple[Problem, str]] = []
    listener = listen("127.0.0.1", 0)
    limits = HttpLimits(**{name: options.pop(name) for name in list(options) if hasattr(HttpLimits(), name)})
    server = HttpServer(app or echo, listener, limits=limits, refused=lambda *which: refused.append(which), **options)
    served = Served(server, listener.getsockname()[1], refused)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        try:
            with anyio.fail_after(20):
                yield served
        finally:
            for raw in served._opened:
                await raw.close()
            server.stop(at_once=at_once)
    assert server._connections.open == {}, "a connection is still counted"
    assert server._connections._by_client == {}
    assert server._connections._body_bytes == 0, "bytes of a body are still counted"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer each request with its method, path, query and body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    answer = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode() + body
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer})


def post(body: bytes, *lines: str) -> bytes:
    head = ["POST / HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


class Counting:
    """An app that answers when it is let, and counts what reached it."""

    def __init__(self, *, held: bool = False) -> None:
        self.requests = self.running = self.body_bytes = 0
        self.may_answer = asyncio.Event()
        if not held:
            self.may_answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        self.running += 1
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                self.body_bytes += len(message["body"])
                more = message["more_body"]
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.running -= 1
