"""What VllmUpstream costs beside bare httpx2: CPU for a token and for a request, in front of a scripted server.

    python -m benchmarks.vllm_upstream [--streams 64] [--tokens 256] [--pause-ms 20]

The server is another process with vLLM's form of chunks, one token in each. It writes the whole answer at once, or each
token by itself, with a pause behind it. Bare httpx2 reads the bytes and parses nothing. A token is the difference
between long answers and answers of one token; a request is one of one token. CPU of this process only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from functools import partial
from time import process_time
from typing import Any

import anyio
import httpx2
from attrs import frozen

from engines import GenerateContext
from engines.upstream import VllmUpstream
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, StopConditions

GENERATE = "/inference/v1/generate"
REPEATS = 5
PROMPT = list(range(100, 612))

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    '{"request_id":"generate-tokens-7ce5b4ac5b0a1f43","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    '"finish_reason":%s,"stop_reason":null,"token_ids":[%d],"routed_experts":null,"sampling_mask":null,'
    '"weight_versions":null,"logprobs":null}]}'
)
PAGES = {
    "/health": (200, ""),
    "/v1/models": (200, json.dumps({"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 8192}]})),
    "/metrics": (200, 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="8192"} 1.0\n'),
}


# -- the server


def framed(data: bytes) -> bytes:
    """One part of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    return framed(f"data: {text}\n\n".encode())


async def _answer(writer: asyncio.StreamWriter, asked: dict[str, Any], pause_s: float) -> None:
    """Write an answer of as many tokens as are wanted, each by itself."""
    tokens = asked["sampling_params"]["max_tokens"]
    if not asked.get("stream"):
        choice = {"index": 0, "token_ids": [1], "finish_reason": "length"}
        return _page(writer, 200, json.dumps({"choices": [choice]}))
    writer.write(HEAD)
    for number in range(tokens):
        reason = '"length"' if number == tokens - 1 else "null"
        writer.write(event(CHUNK % (reason, 1000 + number)))
        if pause_s:
            await asyncio.sleep(pause_s)
    usage = {"prompt_tokens": len(asked["token_ids"]), "completion_tokens": tokens}
    usage["total_tokens"] = sum(usage.values())
    writer.write(event(json.dumps({"request_id": "generate-tokens-1", "usage": usage, "choices": []})))
    writer.write(event("[DONE]") + b"0\r\n\r\n")
    return None


def _page(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text.encode())


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0].partition(":")[2])) if lengths else b""
            if (method, path) == ("POST", GENERATE):
                await _answer(writer, json.loads(body), pause_s)
            else:
                _page(writer, *PAGES.get(path, (404, "{}")))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve(pause_s: float) -> None:
    """Serve until the process is ended; the port is the first line of the output."""
    server = await asyncio.start_server(lambda r, w: _serve_connection(r, w, pause_s), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def served(pause_s: float) -> Any:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vllm_upstream", "--serve", str(pause_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


# -- the clients


@frozen
class Cost:
    """CPU of one client, in µs."""

    request: float
    token: float


Once = Callable[[int], Awaitable[int]]
"""Sends one request for so many tokens and returns how many came."""


async def cost_of(once: Once, streams: int, tokens: int) -> Cost:
    """The least of some runs, of long answers and of answers of one token, `streams` at a time."""

    async def cpu_s(length: int, requests: int) -> float:
        async def some() -> None:
            for _ in range(requests):
                assert await once(length) == length

        begun_s = process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(some)
        return (process_time() - begun_s) / (streams * requests)

    await cpu_s(2, 1)
    short_s = min([await cpu_s(1, 8) for _ in range(REPEATS)])
    long_s = min([await cpu_s(tokens, 1) for _ in range(REPEATS)])
    return Cost(short_s * 1e6, (long_s - short_s) / (tokens - 1) * 1e6)


async def bare(url: str, streams: int, tokens: int) -> Cost:
    """httpx2 alone: the same body, the bytes counted and not parsed."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:

        async def once(length: int) -> int:
            sampling = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
            body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
            got = 0
            async with client.stream("POST", GENERATE, json=body) as response:
                async for data in response.aiter_raw():
                    got += data.count(b'"token_ids"')
            return got

        return await cost_of(once, streams, tokens)


async def upstream(url: str, streams: int, tokens: int) -> Cost:
    """VllmUpstream, without the adapter that every engine has around it."""
    engine = VllmUpstream(url)
    await engine.start(1)
    try:

        async def once(length: int) -> int:
            request = PreprocessedRequest(PROMPT, stop_conditions=StopConditions(max_tokens=length, ignore_eos=True))
            got = 0
            async for output in engine.generate(request, GenerateContext(Context(request))):
                got += len(output.token_ids)
            return got

        return await cost_of(once, streams, tokens)
    finally:
        await engine.cleanup()


async def measure(streams: int, tokens: int, pause_s: float) -> None:
    for kind, pause in (("the answer in one go", 0.0), (f"a token each {pause_s * 1e3:g} ms", pause_s)):
        with served(pause) as url:
            floor, cost = await bare(url, streams, tokens), await upstream(url, streams, tokens)
        print(f"{streams} streams, {kind}, CPU in µs:")
        for name, each in (("bare httpx2", floor), ("VllmUpstream", cost)):
            print(f"  {name:14}{each.token:6.1f} a token {each.request:8.0f} a request")
        print(f"  {'ratio':14}{cost.token / floor.token:6.2f} {cost.request / floor.request:16.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_upstream", description="CPU of VllmUpstream.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pause-ms", type=float, default=20.0, help="between two tokens of a stream")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
    else:
        work = partial(measure, options.streams, options.tokens, options.pause_ms / 1e3)
        anyio.run(work, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
