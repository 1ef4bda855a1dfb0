"""A server in memory: what it says is a script, or an ASGI app; what it heard can be looked at."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from attrs import define, field


@define
class Wire(ByteStream):
    """One end of a connection in memory."""

    there: Any
    back: Any

    async def send(self, item: bytes) -> None:
        await self.there.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data: bytes = await self.back.receive()
        return data

    async def send_eof(self) -> None:
        await self.there.aclose()

    async def aclose(self) -> None:
        self.there.close()
        self.back.close()


@define
class Asked:
    """A request as the server heard it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[["Line", Asked], Awaitable[object]]


@define(eq=False)
class Line:
    """The server's end of one connection."""

    wire: Wire
    pending: bytes = b""
    heard_end: anyio.Event = field(factory=anyio.Event)

    async def request(self) -> Asked | None:
        """The next request; None once the client has gone."""
        while b"\r\n\r\n" not in self.pending:
            if not await self._more():
                return None
        head, _, self.pending = self.pending.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0))
        while len(self.pending) < length:
            if not await self._more():
                return None
        body, self.pending = self.pending[:length], self.pending[length:]
        method, path, _ = first.split(" ")
        return Asked(method, path, headers, body)

    async def begin(self, status: int = 200, kind: str = "text/event-stream") -> None:
        """The head of an answer in chunks."""
        head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.wire.send(head.encode())

    async def say(self, data: bytes) -> None:
        await self.wire.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        await self.say(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())

    async def end(self) -> None:
        await self.wire.send(b"0\r\n\r\n")

    async def whole(self, status: int, body: Any) -> None:
        """An answer that is no stream."""
        await self.begin(status, "application/json")
        await self.say(body if isinstance(body, bytes) else json.dumps(body).encode())
        await self.end()

    async def _more(self) -> bool:
        try:
            self.pending += await self.wire.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.heard_end.set()
            return False
        return True


@define(eq=False)
class Server:
    """Answers each request by its script. `models` are the owners by name, `page` is what is said in their stead."""

    script: Script
    tasks: Any
    models: dict[str, str] = field(factory=lambda: {"m": "somebody"})
    page: tuple[int, Any] | None = None
    asked: list[Asked] = field(factory=list)
    lines: list[Line] = field(factory=list)
    open: int = 0

    async def dial(self) -> ByteStream:
        to_server, at_server = anyio.create_memory_object_stream[bytes](1000)
        to_client, at_client = anyio.create_memory_object_stream[bytes](1000)
        line = Line(Wire(to_client, at_server))
        self.lines.append(line)
        self.tasks.start_soon(self._serve, line)
        return Wire(to_server, at_client)

    async def closing(self) -> ByteStream:
        """As `dial`, but nobody stays to answer."""
        wire = await self.dial()
        await self.lines[-1].wire.there.aclose()
        return wire

    async def _serve(self, line: Line) -> None:
        self.open += 1
        try:
            while (asked := await line.request()) is not None:
                if asked.path.endswith("/v1/models"):
                    data = [{"id": name, "object": "model", "owned_by": owner} for name, owner in self.models.items()]
                    await line.whole(*(self.page or (200, {"object": "list", "data": data})))
                else:
                    self.asked.append(asked)
                    await self.script(line, asked)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            line.heard_end.set()
        finally:
            self.open -= 1
            await line.wire.aclose()


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serving() -> Serving:
    """Runs a server with this script; nothing of it may be left open by its clients."""

    @asynccontextmanager
    async def run(script: Script, **fields: Any) -> AsyncIterator[Server]:
        left: list[int] = []
        async with anyio.create_task_group() as tasks:
            server = Server(script, tasks, **fields)
            yield server
            await anyio.sleep(1.0)
            left.append(server.open)
            tasks.cancel_scope.cancel()
        assert left == [0]

    return run


def mounted(app: Any) -> Script:
    """An ASGI app as a script."""

    async def answer(line: Line, asked: Asked) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": asked.method,
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in asked.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        body, done = [asked.body], anyio.Event()

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                await line.begin(message["status"], headers["content-type"])
                return
            if message.get("body"):
                await line.say(message["body"])
            if not message.get("more_body", False):
                await line.end()
                done.set()

        await app(scope, receive, send)

    return answer


@pytest.fixture
def mount() -> Callable[[Any], Script]:
    return mounted
