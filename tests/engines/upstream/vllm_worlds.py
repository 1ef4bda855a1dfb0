"""A vLLM server that is simulated, on the wire of a real one, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
from attrs import define, field

from engines.upstream import VllmUpstream
from tests.engines.upstream.wire import Line, Received
from tests.engines.upstream.worlds import Sending, TokenServer, choice_prompts, continued, running, started_on


@define(eq=False)
class FakeVllm(TokenServer):
    """vLLM 0.32 on its wire: discovery, both routes of tokens, aborts, health and metrics."""

    block_size_tokens: int = 32
    total_blocks: int = 512
    ranks: int = 1
    aliases: tuple[str, ...] = ()
    root: str | None = None
    """Where it has the model from; by default a folder of its own machine."""
    generates: bool = True
    """Whether it was started with `--enable-scale-out`."""
    tokens_only: bool = False
    prioritizes: bool = False
    event_sources: dict[str, Any] = field(factory=dict)
    health_s: float = 0.0
    """Time of an answer about its health."""
    health_status: int = 200
    status: int | None = None
    """Status of every answer to a request for tokens."""
    kv_usage: float | None = None
    """Share of the blocks of each rank that requests use; None: not among the metrics."""
    prefix: tuple[int, int] = (0, 0)
    """Prompt tokens that were looked up in the cache of each rank, and found there."""

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
            case "POST", "/inference/v1/generate" | "/v1/completions":
                await self._tokens(line, Asked.of(received))
            case "POST", "/inference/v1/abort_requests" if self.generates:
                await self._abort(line, received)
            case "POST", "/abort_requests" if self.tokens_only:
                await self._abort(line, received)
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

    async def _abort(self, line: Line, received: Received) -> None:
        self.abort(*received.json["request_ids"])
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
        if (refused := self.refusal(asked.prompt)) is not None:
            return _error(400, refused), True
        if asked.priority and not self.prioritizes:
            return _error(400, f"Got priority {asked.priority} but Priority scheduling is not enabled."), True
        if asked.stops and self.tokens_only:
            return _error(400, "stop strings are not supported on a --tokens-only server"), False
        return None, False

    async def _streamed(self, line: Line, asked: Asked, refused: Any, aborted: anyio.Event) -> None:
        await line.begin()
        sending = Sending(line, self.faults)
        if refused is not None:
            await sending.put({"error": refused})
        else:
            await self._steps_sent(sending, asked, aborted)
        await sending.put("[DONE]")
        await line.end()

    async def _steps_sent(self, sending: Sending, asked: Asked, aborted: anyio.Event) -> None:
        for choices in self._steps(asked):
            if await self.step(aborted):
                for index in range(asked.n):
                    await sending.put(asked.chunk([asked.choice(index, [], "abort")]))
                break
            for choice in choices:
                await sending.put(asked.chunk([choice]))
        await sending.put(asked.chunk([], usage=asked.usage()))

    async def _whole(self, line: Line, asked: Asked, aborted: anyio.Event) -> None:
        tokens: dict[int, list[int]] = {index: [] for index in range(asked.n)}
        for choices in self._steps(asked):
            await anyio.sleep(self.token_s)
            for one in choices:
                tokens[one["index"]] += one["token_ids"]
        choices = [asked.choice(index, ids, "length") for index, ids in tokens.items()]
        await line.whole(200, asked.chunk(choices, usage=asked.usage()) | {"kv_transfer_params": asked.transferred})

    def _steps(self, asked: Asked) -> Iterator[list[dict[str, Any]]]:
        """The choices of each step."""
        room = self.context_length - len(asked.prompt)
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        natural = self.answer_tokens(most, asked.min_tokens, ignore_eos=asked.ignore_eos)
        sequences = dict(enumerate(choice_prompts(asked.prompt, asked.n)))
        for begin in range(0, natural, self.tokens_per_chunk):
            end = min(begin + self.tokens_per_chunk, natural)
            step = []
            for index, sequence in [*sequences.items()]:
                ids, reason, met = asked.ended(continued(sequence, end - begin), begin)
                reason = reason or _ending(end, natural, most)
                sequence += ids
                asked.generated += len(ids)
                step.append(asked.choice(index, ids, reason, met))
                if reason is not None:
                    del sequences[index]
            if not step:
                return
            yield step


@define(eq=False)
class Tokenizing(FakeVllm):
    """A vLLM that makes tokens of prompts too, with the route of its tokenizer."""

    tokenize_status: int = 200
    tokenized: Any = None
    """Its answer to every prompt; None: a token for each byte."""

    async def answer(self, line: Line, received: Received) -> None:
        if received.path != "/tokenize":
            await super().answer(line, received)
        elif self.tokenized is not None:
            await line.whole(self.tokenize_status, self.tokenized)
        else:
            await self.tokenize(line, received.json)

    async def tokenize(self, line: Line, asked: dict[str, Any]) -> None:
        """A token for each byte of a prompt; of a chat, for each byte of its JSON with what belongs to the template."""
        text = asked["prompt"] if "prompt" in asked else json.dumps({**asked, "model": None}, sort_keys=True)
        tokens = list(text.encode())
        if len(tokens) >= self.context_length:
            await line.whole(400, {"error": _error(400, "too long")})
            return
        answer = {"count": len(tokens), "max_model_len": self.context_length, "tokens": tokens, "token_strs": None}
        await line.whole(200, answer)


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
    def of(cls, received: Received) -> Asked:
        body, by_generate = received.json, received.path.endswith("/generate")
        if not by_generate:
            assert body["return_token_ids"] is True
        prefix = "generate-tokens" if by_generate else "cmpl"
        return cls(
            id=f"{prefix}-{received.headers.get('x-request-id', body.get('request_id'))}",
            model=body.get("model"),
            prompt=body["token_ids" if by_generate else "prompt"],
            sampling=body["sampling_params"] if by_generate else body,
            stream=body.get("stream", False),
            priority=body.get("priority", 0),
            by_generate=by_generate,
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

    def ended(self, ids: list[int], begin: int) -> tuple[list[int], str | None, int | None]:
        """The tokens from a place on up to a stop id among them, with the reason and that id."""
        stop = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if stop is None or begin + stop + 1 <= self.min_tokens or self.ignore_eos:
            return ids, None, None
        return ids[: stop + 1], "stop", ids[stop]

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


fake_vllm = partial(running, FakeVllm)
started = partial(started_on, VllmUpstream)
