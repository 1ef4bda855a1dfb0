"""A client that stops reading gives its place at the engine back."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import anyio

from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import app
from tests.serving.socket.worlds import serve


def chat(**fields: Any) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_the_only_place_of_an_engine_is_free_again_when_its_reader_stopped() -> None:
    """It was held for ever."""
    arguments = {"speedup_ratio": "1000", "max_num_seqs": "1", "num_gpu_blocks": "100000"}
    async with hosted_graph(GraphConfig(engine="mocker", engine_args=arguments), HostOptions({})) as opened:
        graph = opened.graph
        async with serve(app({"m": graph}), write_timeout_s=0.4) as served:
            with socket.socket() as stopped:
                stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stopped.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(stopped, ("127.0.0.1", served.port))
                long = chat(model="m", stream=True, max_tokens=100_000, ignore_eos=True)
                await loop.sock_sendall(stopped, long)
                await loop.sock_recv(stopped, 100)
                with anyio.fail_after(15):
                    answer = await served.request(chat(model="m", max_tokens=2, ignore_eos=True))
                assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 2)
            assert served.limits_hit == ["write_timeout_s"]
