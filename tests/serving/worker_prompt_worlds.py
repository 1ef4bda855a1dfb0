"""Processes in virtual time: workers in front of servers that have their model's only tokenizer, and a front end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field

from engines import ShutdownTimes, Worker
from pipeline.network import Runtime
from pipeline.network.objects import InProcessObjects
from serving.deployment import (
    AnnouncedGraph,
    GraphConfig,
    HostOptions,
    Supervisor,
    UpstreamConfig,
    announced_graph,
    upstream_workers,
)
from tests.pipeline.network.worlds import Deployment, deployment
from tests.serving.upstream_worlds import RETRY, Site


@define(eq=False)
class Processes:
    """The processes, over a network in memory. `supervisors` are those of the workers by the URLs of their servers."""

    network: Deployment
    front: AnnouncedGraph
    runtime: Runtime
    """That of the front end."""
    supervisors: Mapping[str, Supervisor] = field(factory=dict)

    def worker(self, url: str) -> Worker:
        """The worker of a server, which is in service."""
        worker = self.supervisors[url].worker
        assert worker is not None
        return worker


@asynccontextmanager
async def processes(
    site: Site, *, workers: Mapping[str, Mapping[str, Any]] | None = None, **front: Any
) -> AsyncIterator[Processes]:
    """A worker process in front of each server of the site, without a tokenizer of its own, and a front end.

    `workers` are fields of GraphConfig by URL, `front` those of the front end.
    """
    objects, times = InProcessObjects(), ShutdownTimes(grace_s=0.5, timeout_s=5.0)
    async with deployment() as network, AsyncExitStack() as running:

        async def process() -> Runtime:
            runtime = network.runtime()
            runtime.objects = objects
            return await running.enter_async_context(runtime)

        supervisors: dict[str, Supervisor] = {}
        for url, server in site.servers.items():
            fields = dict((workers or {}).get(url, {}))
            config = GraphConfig(upstream=UpstreamConfig(urls=(url,)), **fields)
            hosting = HostOptions({}, transports={url: server.transport}, times=times)
            opening = upstream_workers(config, hosting, await process(), lambda _: nullcontext(), retry=RETRY)
            (supervisors[url],) = await running.enter_async_context(opening)
        await anyio.sleep(1)
        runtime = await process()
        graph = announced_graph(GraphConfig(is_announced=True, **front), HostOptions({}), runtime)
        opened = await running.enter_async_context(graph)
        yield Processes(network, opened, runtime, supervisors)


def write_template(folder: Path) -> Path:
    """A chat template that no server has."""
    path = folder / "template.jinja"
    path.write_text("{{ messages[0].content }}", encoding="utf-8")
    return path
