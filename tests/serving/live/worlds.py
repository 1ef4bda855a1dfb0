"""A server in memory, by a script or an ASGI app; its requests can be inspected."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from attrs import define, field
from starlette.types import ASGIApp

from pipeline import Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from serving.live import Address, LiveEngine
from tests.engines.upstream.wire import Line, Plugged, Received, Script, Wire, plugged


@define(eq=False)
class Server:
    """Answers each request by its script. `models` are the owners by name, `page` replaces that list."""

    script: Script
    tasks: Any
    models: dict[str, str] = field(factory=lambda: {"m": "owner"})
    page: tuple[int, Any] | None = None
    received: list[Received] = field(factory=list)
    lines: list[Line] = field(factory=list)
    closes_in_sight: bool = True
    """Whether a look at a connection shows that the server has closed it, or only its next use."""
    open: int = 0

    @property
    def transport(self) -> httpx2.AsyncBaseTransport:
        return plugged(self.dial)

    @property
    def closing(self) -> httpx2.AsyncBaseTransport:
        """As `transport`, but the server closes each connection without an answer."""

        async def dial() -> Plugged:
            end = await self.dial()
            await self.lines[-1].wire.there.aclose()
            return end

        return plugged(dial)

    async def dial(self) -> Plugged:
        to_server, at_server = anyio.create_memory_object_stream[bytes](1000)
        to_client, at_client = anyio.create_memory_object_stream[bytes](1000)
        line = Line(Wire(to_client, at_server))
        self.lines.append(line)
        self.tasks.start_soon(self._serve, line)
        return Plugged(Wire(to_server, at_client), lambda: self.closes_in_sight and line.is_closed)

    async def _serve(self, line: Line) -> None:
        self.open += 1
        try:
            while (received := await line.request()) is not None:
                if received.path.endswith("/v1/models"):
                    data = [{"id": name, "object": "model", "owned_by": owner} for name, owner in self.models.items()]
                    await line.whole(*(self.page or (200, {"object": "list", "data": data})))
                else:
                    self.received.append(received)
                    await self.script(line, received)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            line.saw_end.set()
        finally:
            self.open -= 1
            await line.wire.aclose()


@asynccontextmanager
async def serve(script: Script, **fields: Any) -> AsyncIterator[Server]:
    """Run a server with this script; its clients must leave none of its connections open."""
    left: list[int] = []
    async with anyio.create_task_group() as tasks:
        server = Server(script, tasks, **fields)
        yield server
        await anyio.sleep(1.0)
        left.append(server.open)
        tasks.cancel_scope.cancel()
    assert left == [0]


def mount(app: ASGIApp) -> Script:
    """An ASGI app as a script."""

    async def answer(line: Line, received: Received) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": received.method,
            "scheme": "http",
            "path": received.path,
            "raw_path": received.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in received.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        body, done = [received.body], anyio.Event()

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
                await line.put(message["body"])
            if not message.get("more_body", False):
                await line.end()
                done.set()

        await app(scope, receive, send)

    return answer


# -- an engine, its requests, and events of a server

ADDRESS = Address.parse("http://far:8000/api/v1/")
DONE = "[DONE]"


def prompt(tokens: int = 3, **more: Any) -> PreprocessedRequest:
    """A request of three tokens that wants exactly so many back."""
    stop = StopConditions(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return PreprocessedRequest([5, 6, 7], **{"stop_conditions": stop, **more})


def chunk(text: str = "a", reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A completion chunk of a server."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]} | more


def usage(completion: int, prompt: int = 3, **more: Any) -> dict[str, Any]:
    """The token counts that a server sends with its last chunk."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion} | more


def answering(*events: Any, every_s: float = 0.0) -> Callable[[Any, Any], Awaitable[None]]:
    """A script: these events; bytes go out as they are."""

    async def script(line: Line, received: Received) -> None:
        await line.begin()
        for event in events:
            await anyio.sleep(every_s)
            await (line.put(event) if isinstance(event, bytes) else line.event(event))
        await line.end()

    return script


@asynccontextmanager
async def engine_of(server: Server, **how: Any) -> AsyncIterator[LiveEngine]:
    """An engine on the server; at its end no request is in flight."""
    engine = LiveEngine(ADDRESS, "m", transport=server.transport, **how)
    try:
        yield engine
    finally:
        await engine.aclose()
        assert engine.in_flight == 0


async def outputs(engine: LiveEngine, request: PreprocessedRequest | None = None) -> list[LLMEngineOutput]:
    """All outputs of the engine for one request, by default `prompt()`."""
    async with await engine.generate(Context(request or prompt())) as stream:
        return [item.data async for item in stream if item.data is not None]


async def answer_to(*events: Any, **how: Any) -> list[LLMEngineOutput]:
    """All outputs of an engine whose server answers with these events."""
    async with serve(answering(*events)) as server, engine_of(server, **how) as engine:
        return await outputs(engine)
