"""Servers that are simulated in virtual time, and engines on them: what all kinds have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import httpx2
from attrs import define, field

from engines import EngineConfig, LLMEngine
from engines.adapter import RequestAdapter
from engines.upstream import Upstream
from pipeline import Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from tests.engines.upstream.wire import Line, Plugged, Received, Wire, as_event, plugged

URL = "http://gpu-1:8000"
VOCABULARY = 32_000

Fault = Callable[[Line], Awaitable[object]]
"""What happens in place of an event of an answer."""

Engine = TypeVar("Engine", bound=Upstream)
Server = TypeVar("Server", bound="FakeServer")


def next_token(sequence: list[int]) -> int:
    """The token that follows a sequence: the same for every server, and another for nearly every other sequence."""
    return (sequence[-1] * 1103 + sequence[0] * 7 + len(sequence) * 12_345 + 1) % VOCABULARY


def continued(prompt: list[int], tokens: int) -> list[int]:
    """The tokens that follow a prompt."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


@define(eq=False)
class FakeServer:
    """A server in memory: its connections, requests and end. Subclasses answer."""

    tasks: Any = None
    """Where its connections are served; set by `running`."""
    received: list[Received] = field(factory=list)
    lines: list[Line] = field(factory=list)
    is_up: bool = True
    started_s: float = 1_700_000_000.0
    """Changes with each restart."""
    keeps_alive: bool = True
    """Whether a connection is kept after an answer; without, its task ends with its request."""
    ignores_hang_ups: bool = False
    """Whether it does not notice that a client has closed its connection, as behind some proxies."""
    pages: dict[str, bytes] = field(factory=dict)
    """What is sent in place of the answer at a path."""
    parts_per_write: int = 1
    """How many events leave at once."""
    open: int = 0
    """Connections."""

    @property
    def transport(self) -> httpx2.AsyncBaseTransport:
        return plugged(self.dial)

    def requests(self, path: str) -> list[Received]:
        return [one for one in self.received if one.path == path]

    def kill(self) -> None:
        """End as a killed process does: every connection breaks, and none is taken."""
        self.is_up = False
        for line in self.lines:
            line.wire.there.close()
            line.wire.back.close()
        self.lines.clear()

    def restart(self) -> None:
        """Take connections again, as another process, which has nothing of the old one."""
        self.started_s += 100.0
        self.is_up = True

    async def dial(self) -> Plugged:
        if not self.is_up:
            raise ConnectionRefusedError(111, "Connection refused")
        to_server, at_server = anyio.create_memory_object_stream[bytes](1000)
        to_client, at_client = anyio.create_memory_object_stream[bytes](1000)
        line = Line(Wire(to_client, at_server), keeps_alive=self.keeps_alive, parts_per_write=self.parts_per_write)
        self.lines.append(line)
        served = anyio.CancelScope()  # ends what is under way at once, within a turn of the loop
        self.tasks.start_soon(self._serve, line, served)
        return Plugged(Wire(to_server, at_client), lambda: line.is_closed, self._hang_up(served))

    def _hang_up(self, served: anyio.CancelScope) -> Callable[[], object]:
        return (lambda: None) if self.ignores_hang_ups else served.cancel

    async def _serve(self, line: Line, served: anyio.CancelScope) -> None:
        self.open += 1
        try:
            with served, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while (received := await line.request()) is not None:
                    self.received.append(received)
                    if (page := self.pages.get(received.path)) is not None:
                        await line.whole(200, page)
                    else:
                        await self.answer(line, received)
                    if not line.keeps_alive:
                        break
        finally:
            self.open -= 1
            line.saw_end.set()
            line.wire.there.close()
            line.wire.back.close()

    async def answer(self, line: Line, received: Received) -> None:
        """Answer one request."""
        raise NotImplementedError

    def left(self) -> int:
        """What is open: connections, and requests for tokens."""
        return self.open


@define(eq=False)
class TokenServer(FakeServer):
    """A server of tokens. Subclasses have the routes and the forms of one kind."""

    model: str = "tiny"
    context_length: int = 4096
    adapters: tuple[str, ...] = ()
    token_s: float = 0.01
    """Time of a token."""
    natural_tokens: int = 16
    """Tokens of an answer that ends by itself."""
    tokens_per_chunk: int = 1
    is_healthy: bool = True
    running: dict[str, anyio.Event] = field(factory=dict)
    """Requests by the server's id; the event aborts one."""
    aborted: list[str] = field(factory=list)
    """Ids that were aborted by the route."""
    faults: dict[int, Fault] = field(factory=dict)
    """What happens in place of the event with this number, from 0, of each answer."""

    def kill(self) -> None:
        super().kill()
        self.running.clear()

    def left(self) -> int:
        return super().left() + len(self.running)

    def held_prompts(self) -> int:
        """Prompts whose KV blocks it keeps for another server."""
        return 0

    def abort(self, *ids: str) -> None:
        """What the route for it does."""
        for one in ids:
            if one in self.running:
                self.aborted.append(one)
                self.running[one].set()

    def refusal(self, prompt: list[int]) -> str | None:
        """Why a prompt cannot be answered."""
        if len(prompt) >= self.context_length:
            return f"The prompt ({len(prompt)} tokens) is longer than the model allows."
        if wrong := [token for token in prompt if token >= VOCABULARY]:
            return f"Token id {wrong[0]} is out of vocabulary"
        return None

    def answer_tokens(self, most: int, min_tokens: int, *, ignore_eos: bool) -> int:
        """Tokens of an answer to a request that allows so many."""
        return most if ignore_eos else min(most, max(self.natural_tokens, min_tokens))

    async def step(self, aborted: anyio.Event) -> bool:
        """Take the time of a token, unless the request is aborted; return whether it is."""
        with anyio.move_on_after(self.token_s):
            await aborted.wait()
        return aborted.is_set()


@define(eq=False)
class Sending:
    """The events of one answer, with their faults."""

    line: Line
    faults: dict[int, Fault]
    number: int = 0

    async def put(self, value: Any) -> None:
        fault = self.faults.get(self.number)
        self.number += 1
        await (self.line.event(value) if fault is None else fault(self.line))


def sends(value: Any) -> Fault:
    """A fault: another event, or these bytes."""
    return lambda line: line.put(value if isinstance(value, bytes) else as_event(value))


async def cut(line: Line) -> None:
    """A fault: the connection is closed."""
    await line.wire.aclose()


def choice_prompts(prompt: list[int], choices: int) -> list[list[int]]:
    """What each choice continues, so that no two are the same."""
    return [[*prompt, *([index] if index else [])] for index in range(choices)]


@asynccontextmanager
async def all_running(*servers: FakeServer) -> AsyncIterator[None]:
    """Run these servers; their clients must leave none of their connections open, and no request running."""
    left: list[int] = []
    async with anyio.create_task_group() as tasks:
        for server in servers:
            server.tasks = tasks
        yield
        await anyio.sleep(1.0)
        left += [server.left() for server in servers]
        tasks.cancel_scope.cancel()
    assert left == [0] * len(servers)


@asynccontextmanager
async def running(kind: type[Server], **fields: Any) -> AsyncIterator[Server]:
    """Run one server of a kind, as `all_running` does."""
    async with all_running(server := kind(**fields)):
        yield server


@asynccontextmanager
async def started_on(kind: type[Engine], server: FakeServer, url: str = URL, **how: Any) -> AsyncIterator[Engine]:
    """An engine on the server, started; at its end no request is in flight."""
    engine = kind(url, transport=server.transport, **how)
    try:
        assert isinstance(await engine.start(1), EngineConfig)
        yield engine
    finally:
        await engine.cleanup()
        assert engine.in_flight == 0


def prompt(tokens: int | None = 5, **more: Any) -> PreprocessedRequest:
    """A request of three tokens, for exactly so many of an answer."""
    stop = StopConditions(max_tokens=tokens, ignore_eos=True if tokens else None)
    return PreprocessedRequest([5, 6, 7], stop_conditions=stop, **more)


async def outputs(
    engine: LLMEngine, request: PreprocessedRequest | None = None, *, into: list[int] | None = None, **how: Any
) -> list[LLMEngineOutput]:
    """All outputs of the engine for one request, by default `prompt()`. Raise the error of an error item.

    The tokens also go `into` a list, for answers that fail.
    """
    found = []
    async with await RequestAdapter(engine).generate(Context(request or prompt(), **how)) as stream:
        async for item in stream:
            if item.error is not None:
                raise item.error
            assert item.data is not None
            found.append(item.data)
            if into is not None:
                into += item.data.token_ids
    return found


def tokens_of(found: list[LLMEngineOutput], choice: int = 0) -> list[int]:
    """The tokens of one choice."""
    return [token for output in found if (output.index or 0) == choice for token in output.token_ids]
