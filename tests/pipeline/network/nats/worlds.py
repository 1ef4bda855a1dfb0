"""Builders for tests against a real nats-server, in real time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from subprocess import Popen
from time import monotonic, sleep
from typing import Any

import anyio
from attrs import define, evolve, field, frozen

from pipeline.network.nats import (
    NatsConnection,
    NatsEventPlane,
    NatsObjects,
    NatsOptions,
    NatsServer,
    NatsServerOptions,
    NatsStore,
)
from pipeline.rx import AnyIOScheduler
from tests.ports import reserved_port

TTL_S = 2.0
"""The lease time in tests: whole seconds, and some renewals long."""
QUICK = NatsOptions(heartbeat_s=0.4, reconnect_max_s=0.5, connect_timeout_s=3.0, call_timeout_s=2.0)
"""A connection that notices an outage after 1.6 s."""
PATIENT = evolve(QUICK, call_timeout_s=20.0)
"""The same, whose calls wait for a server that starts, however slowly."""
GRACE_S = TTL_S + QUICK.reconnect_max_s
"""How long a key that an outage may have cost its lease is waited for."""


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Return the URL of a server that runs until the end, in its own process and outside of any loop."""
    port = reserved_port()
    server = NatsServer(folder, NatsServerOptions(port=port))
    with Popen(server.command()) as process:
        try:
            deadline_s = monotonic() + 20.0
            while not _answers(port):
                assert monotonic() < deadline_s, server.log.read_text()
                sleep(0.01)
            yield server.url
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as client:
        return client.recv(4) == b"INFO"
    return False


@frozen
class NatsWorld:
    """A deployment at a server. What is opened are parts of different processes, unless they share a connection."""

    url: str
    folder: Path
    """Names the bucket, so that a test finds it empty."""

    @property
    def bucket(self) -> str:
        return f"test-{self.folder.parent.name}-{self.folder.name}".replace(".", "_")

    @asynccontextmanager
    async def store(self, options: NatsOptions = QUICK, ttl_s: float = TTL_S) -> AsyncIterator[NatsStore]:
        """Return one more store of the deployment, open. At the end nothing watches it any more."""
        async with AnyIOScheduler() as scheduler:
            store = NatsStore(NatsConnection(self.url, scheduler, options), ttl_s, bucket=self.bucket)
            await store.open()
            try:
                yield store
            finally:
                await store.close()
            assert store.watchers == 0

    @asynccontextmanager
    async def events(self, options: NatsOptions = QUICK) -> AsyncIterator[NatsEventPlane]:
        """Return one more event plane, open."""
        async with AnyIOScheduler() as scheduler:
            plane = NatsEventPlane(NatsConnection(self.url, scheduler, options), lambda: 1234, Random())
            await plane.open()
            try:
                yield plane
            finally:
                await plane.close()
            assert plane.subscriptions == 0

    @asynccontextmanager
    async def objects(self, options: NatsOptions = QUICK) -> AsyncIterator[NatsObjects]:
        """Return one more view of the objects, open."""
        async with AnyIOScheduler() as scheduler:
            objects = NatsObjects(NatsConnection(self.url, scheduler, options), bucket=self.bucket)
            await objects.open()
            try:
                yield objects
            finally:
                await objects.close()


@asynccontextmanager
async def own_server(folder: Path, **options: Any) -> AsyncIterator[NatsServer]:
    """Return a server of this test alone, which it may kill, suspend and start again."""
    async with NatsServer(folder / "server", NatsServerOptions(port=reserved_port(), **options)) as server:
        yield server


@asynccontextmanager
async def fake_server(answer: Callable[[bytes], bytes], first: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Return the URL of a server that sends `first`, then an answer to each line, and the lines it has received."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(first)
            while line := await reader.readline():
                received.append(line)
                writer.write(answer(line))
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    finally:
        server.close()
        await server.wait_closed()
        await anyio.sleep(0.05)


@define
class ConfiguredServer(NatsServer):
    """A server with settings that the project itself does not need."""

    more: dict[str, Any] = field(factory=dict)

    def _configuration(self) -> dict[str, object]:
        return super()._configuration() | self.more


def open_files() -> int:
    """Return the number of descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
