"""Builders for tests of stores, pools and runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import anyio
from attrs import frozen

from pipeline import AsyncEngine, ReleaseOnce, Watch
from pipeline.loop import running_loop, virtual_clocks
from pipeline.network import EventPlane, Runtime, Workers
from pipeline.network.discovery import Change, Put, Store, Written
from pipeline.network.files import FileStore
from pipeline.network.inprocess import InProcessEventPlane, InProcessStore
from pipeline.network.requests import RequestPlane
from pipeline.network.runtime import GRACEFUL_TIMEOUT_S, LEASE_TTL_S
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.rx import AnyIOScheduler, Observable, Subject, ops
from pipeline.telemetry import Metrics
from pipeline.testing import ScriptedEngine
from tests.pipeline.network.memory_network import MemoryNetwork

WHERE = "ns/comp/ep"
"""The endpoint under test."""

TTL_S = 10.0
"""Seconds that an abandoned key stays in a store under test."""

StoreKind = Literal["memory", "file"]
STORE_KINDS: tuple[StoreKind, ...] = ("memory", "file")


@frozen
class StoreWorld:
    """A deployment as its stores see it. All but that in memory are opened several times, as by several processes."""

    kind: StoreKind
    folder: Path

    @asynccontextmanager
    async def store(self) -> AsyncIterator[InProcessStore | FileStore]:
        """Return one more store of the deployment, open. At the end nothing watches it any more."""
        async with AnyIOScheduler() as scheduler:
            store = self.make(scheduler)
            await store.open()
            yield store
            await store.close()
            assert store.watchers == 0

    def make(self, scheduler: AnyIOScheduler) -> InProcessStore | FileStore:
        """Return one more store of the deployment, which is not open."""
        if self.kind == "memory":
            return InProcessStore(scheduler, TTL_S)
        return FileStore(self.folder, scheduler, TTL_S, now_ns=folder_clock())


def folder_clock() -> Callable[[], int]:
    """Return a clock for the files of a test that advances with the loop's, whatever thread reads it."""
    try:
        seconds = asyncio.get_running_loop().time
    except RuntimeError:
        import trio

        seconds = trio.lowlevel.current_clock().current_time
    return lambda: 10**18 + round(seconds() * 1e9)


def record_watch(store: Store, prefix: str = "") -> tuple[list[Any], Any]:
    """Return the list of the changes under the prefix, which grows with them, and the subscription."""
    received: list[Any] = []
    return received, store.watch(prefix).subscribe(received.append, on_completed=lambda: received.append("completed"))


async def eventually(holds: Callable[[], bool], within_s: float | None = None) -> None:
    """Return as soon as it holds. Fail if it does not within that time: stores of several processes take a moment.

    By default that is 3 s of a virtual clock, and 20 s of a real one: there it only ends a test that hangs.
    """
    if within_s is None:
        within_s = 3.0 if running_loop() in virtual_clocks else 20.0
    with anyio.move_on_after(within_s):
        while not holds():  # noqa: ASYNC110  # what it waits for happens in another process
            await anyio.sleep(0.01)
    assert holds()


def engine_of(*items: Any) -> AsyncEngine[Any, Any]:
    """Return an engine that answers each request with these items."""
    return ScriptedEngine(items)


def card(name: str) -> ModelDeploymentCard:
    """Return a model card."""
    return ModelDeploymentCard.named(name, kv_cache_block_size=16)


class Noted(Watch):
    """Writes down what it sees."""

    __slots__ = ("seen",)

    def __init__(self, seen: list[str]) -> None:
        super().__init__(ReleaseOnce(seen.append, "released"))
        self.seen = seen

    def on_failure(self, error: Exception) -> None:
        self.seen.append(f"failed: {error}")


def watchers(runtime: Runtime) -> int:
    """Return the number of open watches of the runtime's store."""
    assert isinstance(runtime._store, InProcessStore)
    return runtime._store.watchers


def record_changes(workers: Workers[Any, Any]) -> tuple[list[Any], Any]:
    """Return the list of the pool's changes, which grows with them, and the subscription."""
    received: list[Any] = []
    return received, workers.changes().subscribe(received.append, on_completed=lambda: received.append("completed"))


# -- several processes in one test


MakeEvents = Callable[[Store, RequestPlane, AnyIOScheduler], EventPlane]


class Deployment:
    """Processes that share a store and reach each other over a network in memory.

    async with deployment() as world:
        async with world.runtime() as worker, world.runtime() as caller:
            await worker.serve(WHERE, engine)
            caller.workers(WHERE)
    """

    def __init__(self, scheduler: AnyIOScheduler, lease_ttl_s: float = LEASE_TTL_S) -> None:
        self.network = MemoryNetwork(scheduler)
        self.store = InProcessStore(scheduler, lease_ttl_s)
        """What all processes see. It outlives them."""

    def runtime(
        self,
        *,
        options: TcpOptions | None = None,
        make_events: MakeEvents | None = None,
        metrics: Metrics | None = None,
        rng: Random | None = None,
        graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
    ) -> Runtime:
        """Return the runtime of one more process, to be entered. `make_events` returns its event plane; by default it
        has one of its own, which reaches no other process."""
        scheduler, rng, store = AnyIOScheduler(), rng or Random(), ProcessStore(self.store)
        options = options or TcpOptions(has_unix_socket=False)
        requests = TcpRequestPlane(scheduler, options, metrics, network=self.network)
        events = make_events(store, requests, scheduler) if make_events else InProcessEventPlane(lambda: 0, rng)
        return Runtime(store, requests, events, scheduler, rng=rng, graceful_timeout_s=graceful_timeout_s)


@asynccontextmanager
async def deployment(*, lease_ttl_s: float = LEASE_TTL_S) -> AsyncIterator[Deployment]:
    """Several processes in one test: see `Deployment`."""
    async with AnyIOScheduler() as scheduler:
        yield Deployment(scheduler, lease_ttl_s)


class ProcessStore(Store):
    """A shared store as one process has it: closing it removes what this process wrote, and ends its watches."""

    def __init__(self, shared: InProcessStore) -> None:
        self.shared = shared
        self._own: set[str] = set()
        self._closed: Subject[None] = Subject()

    async def create(self, key: str, value: bytes) -> Written:
        return self._noted(key, await self.shared.create(key, value))

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        return self._noted(key, await self.shared.replace(key, value, revision))

    def _noted(self, key: str, written: Written) -> Written:
        if written.outcome == "created":
            self._own.add(key)
        return written

    async def delete(self, key: str) -> None:
        self._own.discard(key)
        await self.shared.delete(key)

    async def get(self, key: str) -> Put | None:
        return await self.shared.get(key)

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        return await self.shared.entries(prefix)

    def watch(self, prefix: str = "") -> Observable[Change]:
        return ops.take_until(self._closed)(self.shared.watch(prefix))

    def abandon(self, key: str) -> None:
        self._own.discard(key)
        self.shared.abandon(key)

    async def close(self) -> None:
        for key in sorted(self._own):
            await self.shared.delete(key)
        self._closed.on_next(None)


WorldKind = Literal["in process", "tcp"]
WORLDS: tuple[WorldKind, ...] = ("in process", "tcp")
"""The runtimes that hold the same contracts."""


@asynccontextmanager
async def two_runtimes(
    kind: WorldKind,
    *,
    options: TcpOptions | None = None,
    metrics: Metrics | None = None,
    rng: Random | None = None,
    graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
    lease_ttl_s: float = LEASE_TTL_S,
) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """The runtime of a worker and that of its callers: the same one if all is in one process."""
    if kind == "in process":
        async with Runtime.in_process(
            rng=rng, metrics=metrics, graceful_timeout_s=graceful_timeout_s, lease_ttl_s=lease_ttl_s
        ) as runtime:
            yield runtime, runtime
        return
    async with deployment(lease_ttl_s=lease_ttl_s) as world:
        caller = world.runtime(options=options)
        worker = world.runtime(options=options, metrics=metrics, rng=rng, graceful_timeout_s=graceful_timeout_s)
        async with caller, worker:
            yield worker, caller
