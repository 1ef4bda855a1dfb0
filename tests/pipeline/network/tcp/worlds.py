"""Builders for tests of the request plane over a network in memory, and a peer that sends any bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from attrs import define, evolve, frozen

from pipeline import AsyncEngine, Context, PenstockError
from pipeline.network.names import EndpointId, Instance
from pipeline.network.requests import Serving
from pipeline.network.tcp import Address, Link, LinkHandler, TcpOptions, TcpRequestPlane, framing, messages
from pipeline.rx import AnyIOScheduler
from pipeline.wire import to_msgpack
from tests.pipeline.network.memory_network import MemoryNetwork
from tests.pipeline.network.worlds import WHERE

OPTIONS = TcpOptions(has_unix_socket=False)
CALL_HEAD: dict[str, Any] = {"instance": f"{WHERE}/1", "id": "r", "payload": None}
"""The body of a call of the instance that `Pair.serve` serves first, without a payload."""


@frozen
class Pair:
    """A worker and a caller, each with a plane, and the network between."""

    network: MemoryNetwork
    worker: TcpRequestPlane
    caller: TcpRequestPlane
    scheduler: AnyIOScheduler

    async def serve(
        self, engine: AsyncEngine[Any, Any], item_type: Any = Any, instance_id: int = 1
    ) -> tuple[Serving, AsyncEngine[Any, Any]]:
        """Serve the engine; return it as it is served, and as it is called."""
        wanted = Instance.of(EndpointId.parse(WHERE), instance_id)
        instance, serving = await self.worker.serve(wanted, engine)
        return serving, self.caller.engine(instance, item_type)


@asynccontextmanager
async def pair(worker: TcpOptions = OPTIONS, caller: TcpOptions | None = None) -> AsyncIterator[Pair]:
    """Two planes, open. At the end nothing of them is left."""
    async with AnyIOScheduler() as scheduler:
        network = MemoryNetwork(scheduler)
        served = TcpRequestPlane(scheduler, worker, network=network)
        called = TcpRequestPlane(scheduler, caller or worker, network=network)
        await served.open()
        await called.open()
        yield Pair(network, served, called, scheduler)
        await called.close()
        await served.close()
        assert network.links == []


@define(eq=False)
class RawPeer(LinkHandler):
    """One side of a connection whose bytes the test makes."""

    link: Link | None = None
    received_bytes: bytes = b""
    has_ended: bool = False
    error: Exception | None = None
    _out: bytes = b""

    def opened(self, link: Link) -> None:
        self.link = link
        link.ready()

    def received(self, data: bytes) -> None:
        self.received_bytes += data

    def output(self) -> bytes:
        out, self._out = self._out, b""
        return out

    def lost(self, error: Exception | None) -> None:
        self.has_ended, self.error, self.link = True, error, None

    def send(self, *data: bytes) -> None:
        """Send the bytes."""
        self._out += b"".join(data)
        if self.link is not None:
            self.link.ready()

    def frames(self) -> list[tuple[int, int, bytes]]:
        """Return kind, stream and body of the frames that have come."""
        found: list[tuple[int, int, bytes]] = []
        data = self.received_bytes
        while data:
            length = int.from_bytes(data[:4], "big")
            found.append((data[5], int.from_bytes(data[7:11], "big"), data[11 : 4 + length]))
            data = data[4 + length :]
        return found

    def kinds(self) -> list[int]:
        """Return the kinds of the frames that have come."""
        return [kind for kind, _, _ in self.frames()]


def frame(kind: int, stream: int, body: Any = None) -> bytes:
    """Return a frame with this body, of plain values or as bytes."""
    data = body if isinstance(body, bytes) else to_msgpack(body)
    return framing.header(kind, stream, len(data)) + data


NONCE = "ab" * 16


def hello(**changed: Any) -> bytes:
    """Return a first frame, with these fields changed."""
    fields = {
        "version": 1,
        "nonce": NONCE,
        "heartbeat_ms": 10**6,
        "message_limit_bytes": 1000,
        "window_items": 4,
        "window_bytes": 1000,
    }
    return frame(framing.HELLO, 0, fields | changed)


def proof(peer: RawPeer, token: str = "", *, is_caller: bool = True) -> bytes:
    """Return the second frame, for what the other side has sent."""
    theirs = messages.read(peer.frames()[0][2], messages.Hello).nonce
    body = messages.proof(token, is_caller=is_caller, own_nonce=NONCE, other_nonce=theirs)
    return frame(framing.PROOF, 0, body)


async def raw_caller(world: Pair, token: str = "", **changed: Any) -> RawPeer:
    """Connect to the worker and exchange the first frames."""
    peer = RawPeer()
    await world.network.dial(Address.parse(world.worker.transport["tcp"]), peer)
    peer.send(hello(**changed))
    await settled()
    if peer.frames():
        peer.send(proof(peer, token))
    await settled()
    return peer


@asynccontextmanager
async def raw_worker(world: Pair, accept: Callable[[], RawPeer]) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """The engine of an instance that is served by peers of the test."""
    listener = await world.network.listen(Address("raw"), accept)
    instance = Instance.of(EndpointId.parse(WHERE), 9)
    transport = {"tcp": str(listener.address)}
    kind: Any = Any
    yield world.caller.engine(evolve(instance, transport=transport), kind)
    await listener.close()


async def proves_itself(peer: RawPeer, **changed: Any) -> None:
    """Exchange the first frames as the worker that a plane connects to."""
    peer.send(hello(**changed))
    with anyio.fail_after(1):
        while len(peer.frames()) < 2:  # noqa: ASYNC110  # there is no event for it
            await anyio.sleep(0.001)
    peer.send(proof(peer, is_caller=False))
    await settled()


async def settled() -> None:
    """Return when what is under way has arrived and has been answered."""
    for _ in range(5):
        await anyio.sleep(0.001)


async def read_from(sent: list[bytes], options: TcpOptions = OPTIONS) -> list[Any]:
    """Return the answer of a worker that sends these frames to the call, then ends the connection."""
    peer = RawPeer()

    async def answers() -> None:
        await proves_itself(peer)
        peer.send(*sent)
        await settled()
        if peer.link is not None:
            peer.link.close()

    items: list[Any] = []
    errors: list[PenstockError] = []
    async with pair(options) as world, raw_worker(world, lambda: peer) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(answers)
        try:
            items = await (await engine.generate(Context(None))).collect()
        except PenstockError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return items
