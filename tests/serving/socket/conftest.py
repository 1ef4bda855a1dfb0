"""A real server on a real socket, with small limits, and connections that send whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, field, frozen

from serving.http import Problem
from serving.limits import HttpLimits
from serving.server import HttpServer, listen

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The programs run on uvloop: what asyncio's own loop does is among the slow tests."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and "[asyncio" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@frozen
class Answer:
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
        """Send it all; a server that closes meanwhile is none of the sender's concern."""
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
        """Everything until the server closes or cuts the connection."""
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
    """A running server. `refused` holds every problem reported, `calls` the app's requests."""

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
        """The answer to these bytes on a connection of their own."""
        raw = await self.connect(**how)
        await raw.send(data)
        answer = await raw.answer()
        await raw.close()
        return answer

    @property
    def limits_hit(self) -> list[str]:
        return [problem.exceeded.name for problem, _ in self.refused if problem.exceeded is not None]


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve() -> Serve:
    """Serves an app, by default one that answers each request with its method, path and body."""

    @asynccontextmanager
    async def serving(app: Any = echo, *, at_once: bool = False, **options: Any) -> AsyncIterator[Served]:
        refused: list[tuple[Problem, str]] = []
        listener = listen("127.0.0.1", 0)
        limits = HttpLimits(**{name: options.pop(name) for name in list(options) if hasattr(HttpLimits(), name)})
        server = HttpServer(app, listener, limits=limits, refused=lambda *which: refused.append(which), **options)
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

    return serving


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it got."""
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
