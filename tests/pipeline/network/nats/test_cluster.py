"""A cluster of three real servers: discovery, events and files go on without any one of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from pipeline import CannotConnect, Unavailable
from pipeline.network import Added, Instance, Removed, Runtime, Scope
from pipeline.network.nats import NatsServer, NatsServerOptions
from pipeline.testing import ScriptedEngine
from tests.pipeline.network.nats.worlds import ConfiguredServer
from tests.pipeline.network.worlds import WHERE, card, eventually
from tests.ports import reserved_port

pytestmark = pytest.mark.slow

TTL_S = 10.0
"""That of programs. Servers elect a leader in less, or a little more."""
ELECTED_S = 30.0
"""Until a cluster has a leader again, which the servers take up to ten seconds for, and clients are connected."""


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[list[NatsServer]]:
    """Three servers that know each other."""
    routes = [reserved_port() for _ in range(3)]
    servers: list[NatsServer] = [
        ConfiguredServer(
            folder / f"server-{number}",
            NatsServerOptions(port=reserved_port()),
            more={
                "server_name": f"server-{number}",
                "cluster": {
                    "name": "cluster",
                    "listen": f"127.0.0.1:{route}",
                    "routes": [f"nats://127.0.0.1:{each}" for each in routes],
                },
            },
        )
        for number, route in enumerate(routes)
    ]
    async with AsyncExitStack() as stack:
        for each in servers:
            await stack.enter_async_context(each)
        yield servers


@asynccontextmanager
async def runtime(url: str) -> AsyncIterator[Runtime]:
    """A runtime at the cluster, which takes a moment until all servers are in it."""
    async with AsyncExitStack() as stack:
        until_s = anyio.current_time() + ELECTED_S
        while True:
            try:
                opened = Runtime.at(url, lease_ttl_s=TTL_S, graceful_timeout_s=0.5)
                await stack.enter_async_context(opened)
                break
            except CannotConnect:
                if anyio.current_time() > until_s:
                    raise
            await anyio.sleep(0.2)
        yield opened


async def test_any_one_server_of_three_may_be_lost(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").write_bytes(os.urandom(300_000))
    async with cluster(tmp_path) as servers:
        url = "nats://" + ",".join(each.url.removeprefix("nats://") for each in servers) + "?replicas=3"
        async with runtime(url) as worker, runtime(url) as front_end:
            served = {(await worker.serve(WHERE, ScriptedEngine([1]), card=card("model"))).instance.key}
            stored = await worker.objects.put(tmp_path / "tokenizer")
            present, removed = set[str](), list[str]()
            front_end.discovery.watch().subscribe(lambda change: _note(present, removed, change))
            await eventually(lambda: present == served, 10.0)
            received: list[Any] = []
            front_end.events.subscribe(Scope("ns"), "load", int).subscribe(lambda event: received.append(event.payload))
            publisher = worker.events.publisher(Scope("ns"), "load")
            lost = servers[Random().randrange(3)]  # any of them, over the runs of this test
            await lost.kill()
            await _until_published(publisher, received, 7)
            with anyio.fail_after(ELECTED_S):
                served.add(await _until_written(worker))
            await anyio.sleep(TTL_S + 4)  # what could lapse, or was waited for, is gone now
            assert present == served
            assert removed == []
            with anyio.fail_after(ELECTED_S):
                await _until_fetched(front_end, stored, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == (tmp_path / "tokenizer").read_bytes()


async def _until_published(publisher: Any, received: list[Any], number: int) -> None:
    with anyio.fail_after(ELECTED_S):
        while number not in received:
            publisher.publish(number)
            await anyio.sleep(0.05)


async def _until_written(runtime: Runtime) -> str:
    """Return the key of an instance that could be announced."""
    while True:
        try:
            return (await runtime.serve("ns/comp/other", ScriptedEngine([1]))).instance.key
        except Unavailable:
            await anyio.sleep(0.2)


async def _until_fetched(runtime: Runtime, stored: Any, path: Path) -> None:
    while True:
        try:
            return await runtime.objects.get(stored, path)
        except Unavailable:
            await anyio.sleep(0.2)


def _note(present: set[str], removed: list[str], change: Added[Instance] | Removed[Instance]) -> None:
    if isinstance(change, Added):
        present.add(change.item.key)
    else:
        present.discard(change.item.key)
        removed.append(change.item.key)
