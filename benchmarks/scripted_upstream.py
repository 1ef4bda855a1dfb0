"""A server that answers each request with a fixed number of tokens, at once: the upstream of a proxy that is measured.

    python -m benchmarks.scripted_upstream --port 9001 [--tokens 64]

It has the routes of vLLM's server that routers use: chats and completions as text, `/inference/v1/generate` in tokens,
models, health, metrics. Each token is an event and a write of its own, so a proxy meets them as an engine gives them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping

MODEL = "scripted"
CONTEXT_TOKENS = 131_072
_TOKEN_ID = 100
_EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODEL_CARD = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": CONTEXT_TOKENS}
_METRICS = (
    f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0\n'
    f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0\n'
    f'vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0\n'
    'vllm:cache_config_info{block_size="32",num_gpu_blocks="100000"} 1\n'
)
PAGES: Mapping[str, bytes] = {
    "/v1/models": json.dumps({"object": "list", "data": [_MODEL_CARD]}).encode(),
    "/metrics": _METRICS.encode(),
    "/version": b'{"version": "0.32.0"}',
    "/health": b"",
    "/kv_event_sources": b"{}",
    "/get_model_info": json.dumps({"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}).encode(),
}


def answers(tokens: int) -> Mapping[str, Callable[[bool], list[bytes]]]:
    """Return the events of an answer by its route; each route is given whether the usage comes at the end."""

    def usage(wanted: bool) -> list[dict[str, object]]:
        counts = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}
        return [{"choices": [], "usage": counts}] if wanted else []

    def texts(kind: str, first: dict[str, object], last: dict[str, object]) -> Callable[[bool], list[bytes]]:
        head = {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL}
        chunks: list[dict[str, object]] = [{**head, "choices": [{"index": 0, **first, "finish_reason": None}]}] * tokens
        end: dict[str, object] = {**head, "choices": [{"index": 0, **last, "finish_reason": "length"}]}
        return lambda wanted: _events([*chunks, end, *usage(wanted)])

    def ids(wanted: bool) -> list[bytes]:
        def choice(reason: str | None) -> dict[str, object]:
            return {
                "index": 0,
                "token_ids": [_TOKEN_ID],
                "finish_reason": reason,
                "stop_reason": None,
                "logprobs": None,
            }

        reasons = [None] * (tokens - 1) + ["length"]
        chunks: list[dict[str, object]] = [
            {"request_id": "generate-tokens-1", "choices": [choice(reason)]} for reason in reasons
        ]
        return _events([*chunks, *usage(wanted)])

    return {
        "/v1/chat/completions": texts("chat.completion.chunk", {"delta": {"content": "word "}}, {"delta": {}}),
        "/v1/completions": texts("text_completion", {"text": "word "}, {"text": ""}),
        "/inference/v1/generate": ids,
    }


def _events(chunks: list[dict[str, object]]) -> list[bytes]:
    texts = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return [_chunk(f"data: {text}\n\n".encode()) for text in texts]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream:
    """Answers the requests of each connection, one after the other."""

    def __init__(self, tokens: int) -> None:
        made = answers(tokens)
        self._events = {(route, wanted): made[route](wanted) for route in made for wanted in (False, True)}
        self.served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ", 2)[1].partition("?")[0]
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
                await self._answer(path, b'"include_usage":' in body.replace(b" ", b""), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, with_usage: bool, writer: asyncio.StreamWriter) -> None:
        events = self._events.get((path, with_usage))
        if events is None:
            page = PAGES.get(path)
            status, page = ("404 Not Found", b"{}") if page is None else ("200 OK", page)
            kind = "text/plain" if path == "/metrics" else "application/json"
            head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(page)}\r\n\r\n"
            writer.write(head.encode() + page)
            return
        self.served += 1
        writer.write(_EVENTS)
        for event in events:
            writer.write(event)
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    server = await asyncio.start_server(Upstream(asked.tokens).serve, "127.0.0.1", asked.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
