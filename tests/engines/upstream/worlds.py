"""A vLLM server that is simulated, on the wire of a real one, in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
from attrs import define, field

from engines import EngineConfig, LLMEngine
from engines.adapter import RequestAdapter
from engines.upstream import VllmUpstream
from pipeline import Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from tests.engines.upstream.wire import Line, Plugged, Received, Wire, plugged

URL = "http://gpu-1:8000"
VOCABULARY = 32_000


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

    tasks: Any
    received: list[Received] = field(factory=list)
    lines: list[Line] = field(factory=list)
    is_up: bool = True
    started_s: float = 1_700_000_000.0
    """Changes with each restart."""
    keeps_alive: bool = True
    """Whether a connection is kept after an answer; without, its task ends with its request."""
    ignores_hang_ups: bool = False
    """Whether it does not notice that a client has closed its connection, as behind some proxies."""
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
        line = Line(Wire(to_client, at_server), keeps_alive=self.keeps_alive)
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


@define(eq=False)
class FakeVllm(FakeServer):
    """vLLM 0.32 on its wire: discovery, both routes of tokens, aborts, health and metrics."""

    model: str = "tiny"
    context_length: int = 4096
    block_size_tokens: int = 32
    total_blocks: int = 512
    ranks: int = 1
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    root: str | None = None
    """Where it has the model from; by default a folder of its own machine."""
    generates: bool = True
    """Whether it was started with `--enable-scale-out`."""
    tokens_only: bool = False
    prioritizes: bool = False
    event_sources: dict[str, Any] = field(factory=dict)
    token_s: float = 0.01
    """Time of a token."""
    natural_tokens: int = 16
    """Tokens of an answer that ends by itself."""
    tokens_per_chunk: int = 1
    is_healthy: bool = True
    health_s: float = 0.0
    """Time of an answer about its health."""
    health_status: int = 200
    status: int | None = None
    """Status of every answer to a request for tokens."""
    kv_usage: float | None = None
    """Share of the blocks of each rank that requests use; None: not among the metrics."""
    prefix: tuple[int, int] = (0, 0)
    """Prompt tokens that were looked up in the cache of each rank, and found there."""
    running: dict[str, anyio.Event] = field(factory=dict)
    """Requests by the server's id; the event aborts one."""
    aborted: list[str] = field(factory=list)
    """Ids that were aborted by the route."""
    faults: dict[int, Callable[[Line], Any]] = field(factory=dict)
    """What happens in place of the event with this number, from 0."""

    def kill(self) -> None:
        super().kill()
        self.running.clear()

    async def answer(self, line: Line, received: Received) -> None:
        match received.method, received.path:
            case "GET", "/v1/models":
                await line.whole(200, {"object": "list", "data": self._models()})
            case "GET", "/metrics":
                await line.whole(200, self.metrics().encode())
            case "GET", "/health":
                await anyio.sleep(self.health_s)
                await line.whole(self.health_status if self.is_healthy else 503, b"")
            case "GET", "/kv_event_sources":
                await line.whole(200, self.event_sources)
            case "POST", "/inference/v1/generate" if not self.generates:
                await line.whole(403, {"error": _error(403, "scale-out is off", "ForbiddenError")})
            case "POST", "/inference/v1/generate":
                await self._tokens(line, Asked.of_generate(received, self))
            case "POST", "/v1/completions":
                await self._tokens(line, Asked.of_completion(received, self))
            case "POST", "/inference/v1/abort_requests" if self.generates:
                await self._abort(line, received.json["request_ids"])
            case "POST", "/abort_requests" if self.tokens_only:
                await self._abort(line, received.json["request_ids"])
            case _:
                await line.whole(404, {"detail": "Not Found"})

    def metrics(self) -> str:
        lines = [
            f'vllm:cache_config_info{{block_size="{self.block_size_tokens}",engine="{rank}",'
            f'num_gpu_blocks="{self.total_blocks}",sliding_window="None"}} 1.0'
            for rank in range(self.ranks)
        ]
        running = len(self.running)
        gauges = [f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {running}.0']
        if self.kv_usage is not None:
            for rank in range(self.ranks):
                labels = f'{{engine="{rank}",model_name="{self.model}"}}'
                gauges += [
                    f"vllm:kv_cache_usage_perc{labels} {self.kv_usage}",
                    f"vllm:prefix_cache_queries_total{labels} {self.prefix[0]}.0",
                    f"vllm:prefix_cache_hits_total{labels} {self.prefix[1]}.0",
                ]
        return "\n".join([f"process_start_time_seconds {self.started_s:.9e}", *lines, *gauges, ""])

    def _models(self) -> list[dict[str, Any]]:
        root = f"/models/{self.model}" if self.root is None else self.root
        known: dict[str, Any] = {"owned_by": "vllm", "root": root, "parent": None, "max_model_len": self.context_length}
        bases = [known | {"id": name} for name in (self.model, *self.aliases)]
        adapter = {"owned_by": "vllm", "root": "/adapters", "parent": self.model}
        return [*bases, *(adapter | {"id": name} for name in self.adapters)]

    async def _abort(self, line: Line, ids: list[str]) -> None:
        for one in ids:
            if one in self.running:
                self.aborted.append(one)
                self.running[one].set()
        await line.whole(200, b"")

    async def _tokens(self, line: Line, asked: Asked) -> None:
        if self.status is not None:
            await line.whole(self.status, {"error": _error(self.status, "so it is")})
            return
        refused, is_late = self._refusal(asked)
        if refused is not None and not (is_late and asked.stream):
            await line.whole(refused["code"], {"error": refused})
            return
        aborted = self.running[asked.id] = anyio.Event()
        try:
            if asked.stream:
                await self._streamed(line, asked, refused, aborted)
            else:
                await self._whole(line, asked, aborted)
        finally:
            self.running.pop(asked.id, None)

    def _refusal(self, asked: Asked) -> tuple[dict[str, Any] | None, bool]:
        """The error for a request, and whether it comes within the stream."""
        if asked.model not in (None, self.model, *self.aliases, *self.adapters):
            return _error(404, f"The model `{asked.model}` does not exist.", "NotFoundError"), False
        if len(asked.prompt) >= self.context_length:
            return _error(
                400, f"The decoder prompt (length {len(asked.prompt)}) is longer than the model allows."
            ), True
        if asked.priority and not self.prioritizes:
            return _error(400, f"Got priority {asked.priority} but Priority scheduling is not enabled."), True
        if asked.stops and self.tokens_only:
            return _error(400, "stop strings are not supported on a --tokens-only server"), False
        if wrong := [token for token in asked.prompt if token >= VOCABULARY]:
            return _error(400, f"Token id {wrong[0]} is out of vocabulary"), True
        return None, False

    async def _streamed(self, line: Line, asked: Asked, refused: Any, aborted: anyio.Event) -> None:
        await line.begin()
        number = 0

        async def put(value: Any) -> None:
            nonlocal number
            fault = self.faults.get(number)
            number += 1
            await (line.event(value) if fault is None else fault(line))

        if refused is not None:
            await put({"error": refused})
        else:
            for choices in self._steps(asked):
                with anyio.move_on_after(self.token_s):
                    await aborted.wait()
                if aborted.is_set():
                    for index in range(asked.n):
                        await put(asked.chunk([asked.choice(index, [], "abort")]))
                    break
                for choice in choices:
                    await put(asked.chunk([choice]))
            await put(asked.chunk([], usage=asked.usage()))
        await put("[DONE]")
        await line.end()

    async def _whole(self, line: Line, asked: Asked, aborted: anyio.Event) -> None:
        tokens: dict[int, list[int]] = {index: [] for index in range(asked.n)}
        for choices in self._steps(asked):
            await anyio.sleep(self.token_s)
            for one in choices:
                tokens[one["index"]] += one["token_ids"]
        choices = [asked.choice(index, ids, "length") for index, ids in tokens.items()]
        await line.whole(200, asked.chunk(choices, usage=asked.usage()) | {"kv_transfer_params": asked.transferred})

    def _steps(self, asked: Asked) -> Iterator[list[dict[str, Any]]]:
        """The choices of each step. Each choice of `n` is its own continuation."""
        room = self.context_length - len(asked.prompt)
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        natural = most if asked.ignore_eos else min(most, max(self.natural_tokens, asked.min_tokens))
        sequences = [[*asked.prompt, *([index] if index else [])] for index in range(asked.n)]
        ended = [False] * asked.n
        for begin in range(0, natural, self.tokens_per_chunk):
            size = min(self.tokens_per_chunk, natural - begin)
            step = []
            for index, sequence in enumerate(sequences):
                if ended[index]:
                    continue
                ids = continued(sequence, size)
                met: int | None
                reason: str | None
                stop = next((place for place, token in enumerate(ids) if token in asked.stop_ids), None)
                if stop is not None and begin + stop + 1 > asked.min_tokens and not asked.ignore_eos:
                    ids = ids[: stop + 1]
                    met, reason = ids[-1], "stop"
                else:
                    met, reason = None, _ending(begin + size, natural, most)
                sequence += ids
                asked.generated += len(ids)
                ended[index] = reason is not None
                step.append(asked.choice(index, ids, reason, met))
            if not step:
                return
            yield step


def _ending(generated: int, natural: int, most: int) -> str | None:
    if generated < natural:
        return None
    return "length" if natural == most else "stop"


def _error(code: int, message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}


@define(kw_only=True)
class Asked:
    """A request for tokens, by either route."""

    id: str
    model: str | None
    prompt: list[int]
    sampling: dict[str, Any]
    stream: bool
    priority: int
    by_generate: bool
    transfer: dict[str, Any] | None
    generated: int = 0

    @classmethod
    def of_generate(cls, received: Received, server: FakeVllm) -> Asked:
        body = received.json
        return cls(
            id=f"generate-tokens-{received.headers.get('x-request-id', body.get('request_id'))}",
            model=body.get("model"),
            prompt=body["token_ids"],
            sampling=body["sampling_params"],
            stream=body.get("stream", False),
            priority=body.get("priority", 0),
            by_generate=True,
            transfer=body.get("kv_transfer_params"),
        )

    @classmethod
    def of_completion(cls, received: Received, server: FakeVllm) -> Asked:
        body = received.json
        assert body["return_token_ids"] is True
        return cls(
            id=f"cmpl-{received.headers.get('x-request-id', body.get('request_id'))}",
            model=body.get("model"),
            prompt=body["prompt"],
            sampling=body,
            stream=body.get("stream", False),
            priority=body.get("priority", 0),
            by_generate=False,
            transfer=body.get("kv_transfer_params"),
        )

    @property
    def n(self) -> int:
        return int(self.sampling.get("n", 1))

    @property
    def max_tokens(self) -> int | None:
        # Completions stop at 16 tokens without a limit; the other route goes on as long as it can.
        return self.sampling.get("max_tokens", None if self.by_generate else 16)

    @property
    def min_tokens(self) -> int:
        return int(self.sampling.get("min_tokens", 0))

    @property
    def ignore_eos(self) -> bool:
        return bool(self.sampling.get("ignore_eos", False))

    @property
    def stop_ids(self) -> list[int]:
        return list(self.sampling.get("stop_token_ids", ()))

    @property
    def stops(self) -> list[str]:
        return list(self.sampling.get("stop", ()))

    @property
    def transferred(self) -> dict[str, Any] | None:
        if not (self.transfer or {}).get("do_remote_decode"):
            return None
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": self.id, "remote_port": 5600}

    def usage(self) -> dict[str, Any]:
        prompt = len(self.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def choice(self, index: int, ids: list[int], reason: str | None, met: int | None = None) -> dict[str, Any]:
        logprobs = None
        if (candidates := self.sampling.get("logprobs")) is not None:
            logprobs = self._generated_logprobs(ids, candidates) if self.by_generate else _named(ids, candidates)
        choice = {"index": index, "logprobs": logprobs, "finish_reason": reason, "stop_reason": met, "token_ids": ids}
        return choice if self.by_generate else choice | {"text": "".join(f"<{token}>" for token in ids)}

    def _generated_logprobs(self, ids: list[int], candidates: int) -> dict[str, Any]:
        def one(token: int, place: int) -> dict[str, Any]:
            return {"token_id": token, "logprob": -0.5 * place, "rank": place}

        return {
            "content": [
                one(token, 1) | {"top_logprobs": [one(token + place - 1, place) for place in range(1, candidates + 1)]}
                for token in ids
            ]
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = "request_id" if self.by_generate else "id"
        return {name: self.id, "choices": choices, "usage": None} | more


def _named(ids: list[int], candidates: int) -> dict[str, Any]:
    return {
        "token_logprobs": [-0.5 for _ in ids],
        "tokens": [f"token_id:{token}" for token in ids],
        "top_logprobs": [
            {f"token_id:{token + place - 1}": -0.5 * place for place in range(1, candidates + 1)} for token in ids
        ],
        "text_offset": [0 for _ in ids],
    }


@asynccontextmanager
async def fake_vllm(**fields: Any) -> AsyncIterator[FakeVllm]:
    """Run a server; its clients must leave none of its connections open, and no request running."""
    left: list[Any] = []
    async with anyio.create_task_group() as tasks:
        server = FakeVllm(tasks, **fields)
        yield server
        await anyio.sleep(1.0)
        left.append((server.open, server.running))
        tasks.cancel_scope.cancel()
    assert left == [(0, {})]


@asynccontextmanager
async def started(server: FakeServer, **how: Any) -> AsyncIterator[VllmUpstream]:
    """An engine on the server, started; at its end no request is in flight."""
    engine = VllmUpstream(URL, transport=server.transport, **how)
    try:
        config = await engine.start(1)
        assert isinstance(config, EngineConfig)
        yield engine
    finally:
        await engine.cleanup()
        assert engine.in_flight == 0


def prompt(tokens: int | None = 5, **more: Any) -> PreprocessedRequest:
    """A request of three tokens that wants exactly so many back."""
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


def as_event(value: Any) -> bytes:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
