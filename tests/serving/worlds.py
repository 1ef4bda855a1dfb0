"""Builders for tests of the programs and the HTTP app: a client in memory, items of engines, and the program."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field
from starlette.types import ASGIApp

from pipeline import Annotated, AsyncEngine, Context, ResponseStream
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason

JSON = {"content-type": "application/json"}


# -- an in-memory client


@define
class Exchange:
    """One request of an in-memory client to an app, and its answer so far."""

    app: ASGIApp
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(factory=dict)
    status: int = 0
    """Status of the answer; 0 before it begins."""
    response_headers: dict[str, str] = field(factory=dict)
    writes: list[bytes] = field(factory=list)
    """The parts of the answer's body, one for each write of the app."""
    returned: bool = False
    """Whether the app has returned."""
    breaks_on_send: bool = False
    """Whether `send` raises OSError once the client has left, as some servers do."""
    body_delivered: bool = False
    """Whether `receive` has returned the body; set by a test, the body never comes."""
    _gone: anyio.Event = field(factory=anyio.Event)
    _changed: anyio.Event = field(factory=anyio.Event)
    _reads: anyio.Event = field(factory=anyio.Event)

    def __attrs_post_init__(self) -> None:
        self._reads.set()

    @property
    def content(self) -> bytes:
        return b"".join(self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def data(self) -> list[str]:
        """The data of all events so far."""
        lines = self.content.decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def chunks(self) -> list[Any]:
        """The data of all events but the last, `[DONE]`."""
        *chunks, done = self.data
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    @property
    def text(self) -> str:
        """The chat text of all chunks so far."""
        chunks = [json.loads(chunk) for chunk in self.data if chunk != "[DONE]"]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))

    async def run(self) -> Exchange:
        """Run the app with the request, until it returns; return this exchange."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, self._receive, self._send)
        self.returned = True
        self._on_change()
        return self

    def leave(self) -> None:
        """The client goes away."""
        self._gone.set()
        self._reads.set()

    def stop_reading(self) -> None:
        """The client reads nothing more for now."""
        self._reads = anyio.Event()

    def read_on(self) -> None:
        """The client reads again."""
        self._reads.set()

    async def until(self, condition: Callable[[Exchange], object]) -> None:
        """Return once the condition holds; it is checked after each write."""
        while not condition(self):
            self._changed = anyio.Event()
            await self._changed.wait()

    def _on_change(self) -> None:
        self._changed.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self.body_delivered:
            self.body_delivered = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self._reads.wait()
        if self.breaks_on_send and self._gone.is_set():
            raise OSError("connection lost")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.response_headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.writes.append(message.get("body", b""))
            if not message.get("more_body", False):
                self._gone.set()  # servers wake `receive` when the answer is complete
        self._on_change()


def request_to(
    app: ASGIApp, path: str, body: object = None, *, method: str = "POST", headers: Mapping[str, str] = JSON
) -> Exchange:
    """Return an exchange that has not begun. A body that is not bytes is sent as JSON, None as an empty one."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Exchange(app, path, content, method, dict(headers))


def chat(app: ASGIApp, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Exchange:
    """Return a chat with model `m` that has not begun. `fields` replace or extend its body, `headers` its headers."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return request_to(app, "/v1/chat/completions", body, headers={**JSON, **(headers or {})})


def complete(app: ASGIApp, **fields: Any) -> Exchange:
    """Return a text completion with model `m` that has not begun. `fields` replace or extend its body."""
    return request_to(app, "/v1/completions", {"model": "m", "prompt": "p"} | fields)


# -- engines


def token(text: str | None, **fields: Any) -> Annotated[BackendOutput]:
    """Return an item of one token."""
    return Annotated(BackendOutput([1], [text], text, **fields))


def last(reason: FinishReason = FinishReason.STOP, **fields: Any) -> Annotated[BackendOutput]:
    """Return the item that ends an answer to a prompt of 5 tokens."""
    usage = CompletionUsage.of(5, 0)
    return Annotated(BackendOutput([], [], None, finish_reason=reason, completion_usage=usage, **fields))


class Stubborn(AsyncEngine[Any, Any]):
    """Ignores stop and kill: only cancelling its task ends it."""

    def __init__(self, items: Sequence[object], *, in_generate: bool = False) -> None:
        """Yield the items, then wait for ever; with `in_generate` wait before there is a stream."""
        self.items = items
        self.in_generate = in_generate
        self.open = 0
        """Requests that are under way."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        if self.in_generate:
            self.open += 1
            try:
                await anyio.sleep_forever()
            finally:
                self.open -= 1
        return ResponseStream(self._items(), request)

    async def _items(self) -> AsyncGenerator[Any, None]:
        self.open += 1
        try:
            for item in self.items:
                yield item
            await anyio.sleep_forever()
        finally:
            self.open -= 1


# -- the program


@contextmanager
def served_urls(
    *options: str,
    command: tuple[str, ...] = ("serve",),
    cwd: Path | None = None,
    stderr: int = subprocess.PIPE,
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run `penstock serve`, or another command that serves, on a free port; yield the process and the URLs it prints.

    `variables` are added to its environment. The process is killed at the end.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "serving", *command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | dict(variables or {}),
        cwd=cwd,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "://" in line, line + str(process.stderr and process.stderr.read())
            yield process, [word.rstrip(";") for word in line.split() if "://" in word]
        finally:
            process.kill()


@contextmanager
def program(
    *options: str,
    command: tuple[str, ...] = ("serve",),
    cwd: Path | None = None,
    stderr: int = subprocess.PIPE,
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run as `served_urls`; yield the process and the host and port of its first URL."""
    with served_urls(*options, command=command, cwd=cwd, stderr=stderr, variables=variables) as (process, urls):
        yield process, urls[0].partition("://")[2]


def until_it_drains(address: str, timeout_s: float = 20.0) -> None:
    """Wait until a server has acted on its first signal: its `/health` is 503. Two before that may count as one."""
    ends_s = time.monotonic() + timeout_s
    while True:
        with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 503:
                return
        assert time.monotonic() < ends_s, "the signal has no effect"
        time.sleep(0.02)


@contextmanager
def post(address: str, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """Send a chat to a server; yield the response while its connection is open. `fields` are those of the request."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]} | fields
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            yield response
