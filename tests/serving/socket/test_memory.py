"""What 1,000 connections hold that each do their worst before the app has a request, in a process of their own."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

COUNT = 1000
KB = 1024

SERVER = """
import asyncio, sys, uvloop
from serving.limits import HttpLimits
from serving.server import HttpServer, listen

async def app(scope, receive, send):
    if scope["path"] == "/late":
        await asyncio.sleep(3600)
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
uvloop.run(HttpServer(app, listener, limits=HttpLimits(max_connections_per_client=0)).run())
"""

HEAD = b"POST /late HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

WORST = {
    # what each connection sends, and how much of the server's memory it may take
    "silence": (b"", 6 * KB),
    "an answered request": (GET, 8 * KB),
    "half a head": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 200 + b"x: " + b"x" * 120_000, 140 * KB),
    "half a body": (HEAD + bytes(800_000), 350 * KB),
    "requests behind one that runs": (b"GET /late HTTP/1.1\r\nHost: a\r\n\r\n" + GET * 30_000, 300 * KB),
}


@pytest.fixture(scope="module", autouse=True)
def files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < COUNT + 100:
        pytest.skip("too few open files")
    if soft < COUNT + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (COUNT + 100, hard))


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The process and the port of a server."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_a_thousand_connections_that_do_their_worst_hold_no_more_than_is_stated(
    server: tuple[int, int], name: str
) -> None:
    data, most_bytes = WORST[name]
    process, port = server
    with ExitStack() as opened:
        with socket.create_connection(("127.0.0.1", port)) as first:
            first.sendall(GET)
            first.recv(1000)
        before = resident_bytes(process)
        connections = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(COUNT)]
        for each in connections:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.send(data)
        time.sleep(2.0)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as another:
            another.sendall(GET)
            assert another.recv(1000).startswith(b"HTTP/1.1 200")
        held = (resident_bytes(process) - before) / COUNT
    assert held <= most_bytes
