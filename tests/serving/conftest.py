"""An in-memory client of ASGI apps that can read slowly and go away, items to answer with, and the program itself."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import closing, contextmanager
from typing import Any

import anyio
import pytest
from attrs import define, field

from pipeline import Annotated
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason


@define
class Exchange:
    """One request to an app and what came back so far. `send_gate` set makes the client read nothing more."""

    app: Any
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(factory=dict)
    status: int = 0
    response_headers: dict[str, str] = field(factory=dict)
    writes: list[bytes] = field(factory=list)
    returned: bool = False
    breaks_on_send: bool = False
    _asked: bool = False
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
        """Until the app returns."""
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
        self._notice()
        return self

    def leave(self) -> None:
        """The client goes away."""
        self._gone.set()
        self._reads.set()

    def stop_reading(self) -> None:
        """The client takes nothing more for now."""
        self._reads = anyio.Event()

    def read_on(self) -> None:
        """The client reads again."""
        self._reads.set()

    async def until(self, condition: Callable[[Exchange], object]) -> None:
        """Waits until the condition holds; it is looked at whenever something was sent."""
        while not condition(self):
            self._changed = anyio.Event()
            await self._changed.wait()

    def _notice(self) -> None:
        self._changed.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._asked:
            self._asked = True
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
        self._notice()


JSON = {"content-type": "application/json"}


@pytest.fixture
def request_to() -> Callable[..., Exchange]:
    """Makes an exchange that has not begun: `request_to(app, path, body, method=, headers=)`."""

    def make(app: Any, path: str, body: Any = None, *, method: str = "POST", headers: Any = JSON) -> Exchange:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Exchange(app, path, content, method, dict(headers))

    return make


@pytest.fixture
def chat(request_to: Callable[..., Exchange]) -> Callable[..., Exchange]:
    """A chat with model `m` that has not begun; keywords are fields of the request, `headers` are added."""

    def make(app: Any, *, headers: dict[str, str] | None = None, **fields: Any) -> Exchange:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
        made: Exchange = request_to(app, "/v1/chat/completions", body, headers=JSON | (headers or {}))
        return made

    return make


@pytest.fixture
def complete(request_to: Callable[..., Exchange]) -> Callable[..., Exchange]:
    """A completion with model `m` that has not begun; keywords are fields of the request."""

    def make(app: Any, **fields: Any) -> Exchange:
        made: Exchange = request_to(app, "/v1/completions", {"model": "m", "prompt": "p"} | fields)
        return made

    return make


@pytest.fixture
def token() -> Callable[..., Annotated[BackendOutput]]:
    """An item of one token."""

    def make(text: str | None, **fields: Any) -> Annotated[BackendOutput]:
        return Annotated(BackendOutput([1], [text], text, **fields))

    return make


@pytest.fixture
def last() -> Callable[..., Annotated[BackendOutput]]:
    """The item that ends an answer to a prompt of 5 tokens."""

    def make(reason: FinishReason = FinishReason.STOP, **fields: Any) -> Annotated[BackendOutput]:
        usage = CompletionUsage.of(5, 0)
        return Annotated(BackendOutput([], [], None, finish_reason=reason, completion_usage=usage, **fields))

    return make


@pytest.fixture
def program() -> Any:
    """Runs `penstock serve`, or another command that serves, with these options: gives the process and its address."""

    @contextmanager
    def run(*options: str, command: tuple[str, ...] = ("serve",), cwd: Any = None, **variables: str) -> Iterator[Any]:
        with subprocess.Popen(
            [sys.executable, "-m", "serving", *command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            cwd=cwd,
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert "http://" in line, line + str(process.stderr and process.stderr.read())
                yield process, line.split("http://")[1].partition(";")[0].strip()
            finally:
                process.kill()

    return run


@pytest.fixture
def post() -> Any:
    """Sends a chat to the address and gives the response, its connection open; keywords are fields of the request."""

    @contextmanager
    def send(address: str, **fields: Any) -> Iterator[http.client.HTTPResponse]:
        body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]} | fields
        with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response

    return send
