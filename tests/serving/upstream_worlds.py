"""Graphs in front of simulated servers, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from pipeline import Context
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import GraphConfig, HostOptions, Retry, UpstreamConfig, UpstreamGraph, upstream_graph
from tests.engines.upstream.vllm_worlds import FakeVllm
from tests.engines.upstream.worlds import FakeServer

Server = TypeVar("Server", bound=FakeServer)

RETRY = Retry(first_s=1.0, longest_s=4.0)
ONE, TWO, THREE = "http://gpu-1:8000", "http://gpu-2:8000", "http://gpu-3:8000"


class Site:
    """Servers by URL, and graphs in front of them."""

    def __init__(self, tasks: TaskGroup, folder: Path) -> None:
        self._tasks, self._folder = tasks, folder
        self.servers: dict[str, FakeServer] = {}

    def server(self, url: str, **fields: Any) -> FakeVllm:
        """A vLLM server at the URL."""
        return self.add(url, FakeVllm, **fields)

    def add(self, url: str, kind: type[Server], **fields: Any) -> Server:
        """A server at the URL."""
        made = self.servers[url] = kind(self._tasks, **fields)
        return made

    @asynccontextmanager
    async def graph(
        self,
        *,
        prefill: tuple[str, ...] = (),
        servers: dict[str, Any] | None = None,
        retry: Retry = RETRY,
        **fields: Any,
    ) -> AsyncIterator[UpstreamGraph]:
        """The graph in front of all of them; those of `prefill` compute prompts only.

        `servers` are further fields of UpstreamConfig.
        """
        urls = tuple(url for url in self.servers if url not in prefill)
        transports = {url: server.transport for url, server in self.servers.items()}
        upstream = UpstreamConfig(urls=urls, prefill_urls=prefill, **(servers or {}))
        settings: dict[str, Any] = {"model_path": self._folder, "router": "round-robin", "upstream": upstream} | fields
        hosting = HostOptions({}, transports=transports)
        async with upstream_graph(GraphConfig(**settings), hosting, retry=retry) as opened:
            yield opened

    def left(self) -> list[Any]:
        """The connections and requests that servers have open; empty for none."""
        return [(one.open, getattr(one, "running", {})) for one in self.servers.values() if one.open]


@asynccontextmanager
async def site_of(folder: Path) -> AsyncIterator[Site]:
    """A site whose servers have the model in the folder; at its end no server has an open connection or a request."""
    left: list[Any] = []
    async with anyio.create_task_group() as tasks:
        site = Site(tasks, folder)
        yield site
        for _ in range(100):
            if site.left():
                await anyio.sleep(0.01)
        left += site.left()
        tasks.cancel_scope.cancel()
    assert left == []


def request(first: int = 5, tokens: int = 5, model: str = "tiny") -> Context[PreprocessedRequest]:
    stop = StopConditions(max_tokens=tokens, ignore_eos=True)
    return Context(PreprocessedRequest([first, 6, 7], model=model, stop_conditions=stop))


async def tokens(opened: UpstreamGraph, sent: Context[PreprocessedRequest]) -> list[int]:
    """The tokens of an answer. Raise the error of an error item."""
    found: list[int] = []
    async with await opened.tokens.generate(sent) as stream:
        async for item in stream:
            if (error := item.extract_error()) is not None:
                raise error
            if item.data is not None:
                found += item.data.token_ids
    return found


def generated(server: FakeServer) -> int:
    """How many streamed requests for tokens it had."""
    return sum(1 for one in server.requests("/inference/v1/generate") if one.json.get("stream"))
