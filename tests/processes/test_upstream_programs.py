"""Programs in front of servers with the only tokenizer of their model: workers without its files, and a front end."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute

from tests.engines.upstream.vllm_worlds import Tokenizing
from tests.engines.upstream.worlds import continued
from tests.ports import reserved_port
from tests.processes.program_site import ProgramSite, site_of
from tests.processes.worlds import Program

pytestmark = pytest.mark.slow

PROMPT, TOKENS = "héllo", 150


def text(count: int) -> str:
    """What the simulated servers say after the prompt."""
    return "".join(f"<{token}>" for token in continued(list(PROMPT.encode()), count))


@asynccontextmanager
async def listening(server: Tokenizing) -> AsyncIterator[str]:
    """Have connections of this machine go to the server, whose URL this yields."""
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as carrying,
    ):
        carrying.start_soon(listener.serve, lambda stream: carried(stream, server))
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        carrying.cancel_scope.cancel()


async def carried(stream: ByteStream, server: Tokenizing) -> None:
    """Carry the bytes of a connection, until one side ends it."""

    async def carry(source: ByteStream, target: ByteStream) -> None:
        try:
            while True:
                await target.send(await source.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            both.cancel_scope.cancel()

    plugged = await server.dial()
    try:
        async with stream, anyio.create_task_group() as both:
            both.start_soon(carry, stream, plugged.wire)
            both.start_soon(carry, plugged.wire, stream)
    finally:
        await plugged.aclose()


def worker(site: ProgramSite, name: str, url: str) -> Program:
    """A worker in front of a server, in a process of its own."""
    port = reserved_port()
    return site.program(name, port, "worker", "--upstream", url, DYN_SYSTEM_PORT=str(port))


def deltas(site: ProgramSite, on_delta: anyio.Event) -> list[str]:
    """The texts of a streamed completion; the event is set with the tenth. Runs in a thread."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{site.port}/v1/completions"

    def lines() -> Iterator[str]:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as got:
            for line in got:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]

    found: list[str] = []
    for one in lines():
        found.append(one)
        if len(found) == 10:
            anyio.from_thread.run_sync(on_delta.set)
    return found


@pytest.mark.parametrize("kind", ["file", "nats"])
async def test_texts_of_servers_without_files_outlive_a_worker(tmp_path: Path, kind: str) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as running:
        servers = [Tokenizing(tasks, root="org/tiny", token_s=0.02) for _ in range(2)]
        urls = [await running.enter_async_context(listening(one)) for one in servers]
        site = await running.enter_async_context(site_of(tmp_path, kind))
        workers = [worker(site, f"worker-{number}", url) for number, url in enumerate(urls)]
        front = site.program("front-end", site.port, "serve", "--port", str(site.port), "--router", "kv")
        for each in (*workers, front):
            await each.ready()
        await site.listed("tiny")

        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
        status, page = await site.get("/v1/completions", body)
        assert (status, page["choices"][0]["text"], page["usage"]["prompt_tokens"]) == (200, text(3), 6)
        assert (await site.chat("tiny"))[0] == 200

        # A worker is killed while it answers: its text goes on at the other one, and its request at the server ends.
        found: list[str] = []
        begun = anyio.Event()

        async def read() -> None:
            found.extend(await anyio.to_thread.run_sync(deltas, site, begun))

        async with anyio.create_task_group() as reading:
            reading.start_soon(read)
            with anyio.fail_after(60):
                await begun.wait()
            next(one for one, server in zip(workers, servers, strict=True) if server.running).kill()
        (busy,) = [number for number, one in enumerate(workers) if not one.is_running]
        assert "".join(found) == text(TOKENS)
        assert servers[busy].running == {}

        # The other one ends in order, and its model has no worker then.
        assert await workers[1 - busy].stop() == 0
        with anyio.fail_after(30):
            while (await site.get("/v1/completions", body))[0] != 503:  # noqa: ASYNC110 - another process knows it
                await anyio.sleep(0.1)
        workers[busy].start()
        await workers[busy].ready()
        with anyio.fail_after(30):
            while (await site.get("/v1/completions", body))[0] != 200:  # noqa: ASYNC110 - another process knows it
                await anyio.sleep(0.1)
        assert await front.stop() == 0
