"""A disaggregated deployment whose front end and workers are a process each, over a network in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus
from attrs import define, field

from pipeline.network import Runtime
from pipeline.network.direct_events import DirectEventPlane
from pipeline.network.tcp import Address, LinkHandler, Listener, Network, TcpOptions, TcpRequestPlane
from pipeline.rx import AnyIOScheduler
from serving.deployment import GraphConfig, HostOptions
from tests.pipeline.network.memory_network import MemoryNetwork
from tests.pipeline.network.worlds import Deployment, ProcessStore, deployment

from .worlds import ARGS, ENVIRONMENT, Fleet, Half, Host, build

LEASE_TTL_S = 10.0


class MortalNetwork(Network):
    """The part of a network that one process uses; it ends with the process."""

    def __init__(self, whole: MemoryNetwork) -> None:
        self._whole = whole
        self._handlers: list[LinkHandler] = []
        self._listeners: list[Listener] = []
        self._is_dead = False

    async def dial(self, address: Address, handler: LinkHandler) -> None:
        if self._is_dead:
            raise ConnectionRefusedError("this process is dead")
        self._handlers.append(handler)
        await self._whole.dial(address, handler)

    async def listen(self, address: Address, accept: Callable[[], LinkHandler]) -> Listener:
        def accepted() -> LinkHandler:
            self._handlers.append(handler := accept())
            return handler

        self._listeners.append(listener := await self._whole.listen(address, accepted))
        return listener

    def cut(self, other: MortalNetwork) -> None:
        """End the connections between this process and another one."""
        for link in list(self._whole.links):
            if link.handler in self._handlers and link.other.handler in other._handlers:
                link.other.end(ConnectionResetError("the network was cut"))
                link.end(ConnectionResetError("the network was cut"))

    async def die(self) -> None:
        """Refuse connections and end those that are open; both sides see it."""
        self._is_dead = True
        for listener in self._listeners:
            await listener.close()
        for link in list(self._whole.links):
            if link.handler in self._handlers:
                link.other.end(ConnectionResetError("the process is dead"))
                link.end(ConnectionResetError("the process is dead"))


class MortalStore(ProcessStore):
    """What one process has in the store; after its death it writes nothing more, and its keys lapse."""

    is_dead = False

    async def delete(self, key: str) -> None:
        if not self.is_dead:
            await super().delete(key)

    def die(self) -> None:
        self.is_dead = True
        for key in sorted(self._own):
            self.abandon(key)


@define(eq=False)
class Process:
    """A runtime, and what runs in its process."""

    network: MortalNetwork
    store: MortalStore
    runtime: Runtime
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    tasks: TaskGroup = field(init=False)
    is_set_up: anyio.Event = field(factory=anyio.Event)

    @classmethod
    def of(cls, world: Deployment, rng: Random) -> Process:
        network, store, scheduler = MortalNetwork(world.network), MortalStore(world.store), AnyIOScheduler()
        requests = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False), network=network)
        events = DirectEventPlane(store, requests, scheduler, lambda: 0, rng)
        return cls(network, store, Runtime(store, requests, events, scheduler, rng=rng))

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Live until `kill`, or until it is set up and its tasks are done."""
        with self.scope:
            async with self.runtime, anyio.create_task_group() as self.tasks:
                task_status.started()
                await self.is_set_up.wait()

    async def kill(self) -> None:
        """End at once, without a word to any other process."""
        await self.network.die()
        self.store.die()
        self.scope.cancel()


@define(eq=False)
class Processes:
    """The processes of a deployment, beside that of the front end."""

    world: Deployment
    front: Process
    fleet: Fleet
    rng: Random
    lives: TaskGroup
    of_host: dict[Host, Process] = field(factory=dict)

    async def add(self, half: Half, *, meets: bool = True) -> Host:
        """Start one more worker in a process of its own."""
        process = Process.of(self.world, self.rng)
        await self.lives.start(process.run)
        host = await self.fleet.add(half, meets=meets, there=(process.runtime, process.tasks))
        process.is_set_up.set()
        self.of_host[host] = process
        return host

    def cut(self, host: Host, other: Host | None = None) -> None:
        """End the connections between a worker's process and that of another worker, or of the front end."""
        process = self.front if other is None else self.of_host[other]
        process.network.cut(self.of_host[host].network)

    async def kill(self, host: Host) -> None:
        """Kill the worker's process."""
        self.fleet.hosts.remove(host)
        await self.of_host.pop(host).kill()


@asynccontextmanager
async def open_processes(
    prefill_workers: int = 1, workers: int = 1, *, meets: bool = True, **fields: Any
) -> AsyncIterator[Processes]:
    """The standard graph in the process of a front end, over workers in a process each."""
    wanted: dict[str, Any] = {"router": "round-robin"}
    config = GraphConfig(engine="mocker", workers=workers, prefill_workers=prefill_workers, seed=1, **wanted | fields)
    rng = Random(1)
    async with deployment(lease_ttl_s=LEASE_TTL_S) as world:
        front = Process.of(world, rng)
        async with front.runtime, anyio.create_task_group() as lives:
            fleet = Fleet(front.runtime, config, HostOptions(ENVIRONMENT), lives, rng, ARGS)
            every = Processes(world, front, fleet, rng, lives)
            for half, count in (("prefill", prefill_workers), ("decode", workers)):
                for _ in range(count):
                    await every.add(half, meets=meets)  # type: ignore[arg-type]
            async with AsyncExitStack() as stages:
                await build(fleet, stages)
                yield every
            fleet.remove(fleet.hosts, "drain")
