"""One front end and its workers as programs of one runtime, and a client of the front end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from tests.ports import reserved_port
from tests.processes.worlds import START_TIMEOUT_S, TOKEN, Program, nats_server, penstock


class ProgramSite:
    """Workers of several models, and one front end."""

    def __init__(self, folder: Path, runtime: str, running: ExitStack) -> None:
        self.folder, self._running = folder, running
        self.port = reserved_port()
        self._environment = {
            "PENSTOCK_RUNTIME": runtime,
            "PENSTOCK_RUNTIME_TOKEN": TOKEN,
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def program(self, name: str, port: int, *arguments: str, **variables: str) -> Program:
        """A program of ours, started; it is killed at the end if it runs."""
        url = f"http://127.0.0.1:{port}/health"
        made = Program(name, penstock(*arguments), self.folder, self._environment | variables, health_url=url)
        self._running.callback(made.kill)
        made.start()
        return made

    def worker(self, name: str, *arguments: str) -> Program:
        """A worker that echoes."""
        port = reserved_port()
        return self.program(name, port, "worker", "echo", *arguments, DYN_SYSTEM_PORT=str(port))

    def front_end(self) -> Program:
        return self.program("front-end", self.port, "serve", "--port", str(self.port))

    async def get(self, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the JSON of an answer."""

        def read() -> tuple[int, Any]:
            data = None if body is None else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
            try:
                with urllib.request.urlopen(request, timeout=20) as response:
                    return response.status, json.load(response)
            except urllib.error.HTTPError as refused:
                with refused:
                    return refused.code, json.load(refused)

        return await anyio.to_thread.run_sync(read)

    async def models(self) -> list[str]:
        _, page = await self.get("/v1/models")
        return sorted(one["id"] for one in page["data"])

    async def listed(self, *models: str) -> None:
        """Wait until these models, and no others, are listed."""
        found: list[str] = []
        with anyio.move_on_after(START_TIMEOUT_S):
            while (found := await self.models()) != sorted(models):  # noqa: ASYNC110 - another process has them
                await anyio.sleep(0.1)
            return
        raise AssertionError(f"{found} are listed, not {models}")

    async def chat(self, model: str) -> tuple[int, str]:
        """The status and the text of an answer."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        status, page = await self.get("/v1/chat/completions", body)
        return status, page["choices"][0]["message"]["content"] if status == 200 else page["message"]


@asynccontextmanager
async def site_of(folder: Path, kind: str) -> AsyncIterator[ProgramSite]:
    """A site over a shared folder, or over NATS; what runs at the end is killed."""
    with ExitStack() as running:
        runtime = f"file:{folder / 'runtime'}"
        if kind == "nats":
            broker = nats_server(folder, port := reserved_port())
            running.callback(broker.kill)
            broker.start()
            await broker.ready()
            runtime = f"nats://127.0.0.1:{port}"
        yield ProgramSite(folder, runtime, running)
