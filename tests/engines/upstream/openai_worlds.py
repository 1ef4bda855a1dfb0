"""Simulated servers of completions in text, and of llama.cpp."""

from __future__ import annotations

from typing import Any

import anyio
from attrs import define, field

from tests.engines.upstream.wire import Line, Received
from tests.engines.upstream.worlds import VOCABULARY, FakeServer, continued


@define(eq=False)
class FakeText(FakeServer):
    """A server of completions in text, which takes prompts of ids or refuses them."""

    takes_ids: bool = True
    owner: str = "someone"
    has_list: bool = True
    breaks_at: int | None = None
    """Number of the chunk in place of which the connection is closed."""

    async def answer(self, line: Line, received: Received) -> None:
        if received.path == "/v1/models" and self.has_list:
            await line.whole(200, {"data": [{"id": "small", "owned_by": self.owner}]})
        elif received.path != "/v1/completions":
            await line.whole(404, {"detail": "Not Found"})
        elif "return_token_ids" in received.json:
            await line.whole(422, {"detail": "extra fields not permitted"})
        elif not self.takes_ids:
            await line.whole(400, {"error": {"message": "prompt must be a string"}})
        elif not received.json["stream"]:
            await line.whole(200, {"choices": [{"text": "a", "finish_reason": "length"}]})
        else:
            await self._streamed(line, received.json["max_tokens"])

    async def _streamed(self, line: Line, tokens: int) -> None:
        await line.begin()
        for number in range(tokens):
            await anyio.sleep(0.01)
            if number == self.breaks_at:
                await line.wire.aclose()
            await line.event({"choices": [{"index": 0, "text": f"{number} ", "finish_reason": None}]})
        await line.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        await line.event("[DONE]")
        await line.end()


@define(eq=False)
class FakeLlama(FakeServer):
    """llama.cpp's server, as its page describes `/completion`."""

    faults: dict[int, Any] = field(factory=dict)
    """What is sent in place of the chunk with this number."""
    running: int = 0
    has_start_time: bool = False
    """Whether its metrics have the time of its start; llama.cpp's own have not."""
    is_loading: bool = False
    """Whether it still loads its model."""
    token_s: float = 0.001
    context_length: int = 4096

    def left(self) -> int:
        return super().left() + self.running

    async def answer(self, line: Line, received: Received) -> None:
        match received.path:
            case "/v1/models":
                await line.whole(200, {"data": [{"id": "smol.gguf", "owned_by": "llamacpp"}]})
            case "/props":
                settings = {"n_ctx": self.context_length, "params": {}}
                props = {"default_generation_settings": settings, "total_slots": 4, "model_path": "/models/smol.gguf"}
                await line.whole(200, props)
            case "/health" if self.is_loading:
                await line.whole(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
            case "/health":
                await line.whole(200, {"status": "ok"})
            case "/metrics" if self.has_start_time:
                await line.whole(200, f"process_start_time_seconds {self.started_s:.9e}\n".encode())
            case "/completion":
                await self._completion(line, received.json)
            case _:
                await line.whole(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})

    async def _completion(self, line: Line, body: dict[str, Any]) -> None:
        if max(body["prompt"]) >= VOCABULARY:
            error = {"code": 400, "message": "Prompt contains invalid tokens", "type": "invalid_request_error"}
            await line.whole(400, {"error": error})
            return
        self.running += 1
        try:
            most = min(self.context_length - len(body["prompt"]), body["n_predict"] if body["n_predict"] >= 0 else 16)
            tokens = continued(body["prompt"], most)
            await line.begin()
            for number, token in enumerate(tokens):
                await anyio.sleep(self.token_s)
                chunk: Any = {"index": 0, "content": f"<{token}>", "tokens": [token], "stop": False}
                if (candidates := body.get("n_probs")) is not None:
                    top = [{"id": token + place, "token": "", "logprob": -place - 0.5} for place in range(candidates)]
                    chunk["completion_probabilities"] = [{"id": token, "logprob": -0.5, "top_logprobs": top}]
                await line.event(self.faults.get(number, chunk))
            kind = "limit" if body["n_predict"] >= 0 else "eos"
            last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": kind, "stopping_word": ""}
            await line.event(last | {"timings": {"cache_n": 2}})
            await line.end()
        finally:
            self.running -= 1
