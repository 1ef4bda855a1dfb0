"""A deployment of many processes inside this one: a shared store, request planes that reach each other by bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, TypeVar

import anyio
from attrs import define, field

from pipeline import AsyncEngine, CannotConnect, Context, Disconnected, ReleaseOnce, ResponseStream, Unavailable
from pipeline.network import Runtime
from pipeline.network.direct_events import DirectEventLimits, DirectEventPlane
from pipeline.network.discovery import Change, Put, Store, Written
from pipeline.network.inprocess import InProcessRequestPlane, InProcessStore
from pipeline.network.names import Instance
from pipeline.network.requests import RequestPlane, Serving
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.rx import AnyIOScheduler, CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase
from pipeline.signatures import Signature
from pipeline.wire import from_msgpack, to_msgpack
from tests.pipeline.network.memory_network import MemoryNetwork

Out = TypeVar("Out")

LEASE_TTL_S = 10.0
"""Seconds for which the keys of a process stay that crashed."""


@define(eq=False)
class Faults:
    """What goes wrong between the processes."""

    cut: set[int] = field(factory=set)
    """Processes that cannot be reached by others, by their number."""
    is_store_away: bool = False
    """Whether the store answers nothing, and its watches show nothing."""
    held: anyio.Event | None = None
    """Until it is set, readers of streams from other processes read nothing."""
    refused_at_s: list[float] = field(factory=list)
    """When requests were made to, or by, processes that cannot be reached."""
    calls: set[_Call] = field(factory=set)
    """The requests under way between processes."""

    def break_streams(self) -> None:
        """End each request under way with Disconnected."""
        for call in list(self.calls):
            call.is_lost = True
            call.context.kill()


@define(eq=False)
class _Call:
    """One request from a process to another."""

    context: Context[Any]
    is_lost: bool = False


class Process(Runtime):
    """One process of a deployment: a Runtime whose number is `number`."""

    number: int
    events: DirectEventPlane
    store: ProcessStore

    def crash(self) -> None:
        """Become unreachable at once, with what is under way lost; keys lapse after their time to live."""
        assert isinstance(self.requests, ProcessRequests)
        self.requests.cut()
        self.store.lapse()


@define(eq=False)
class Deployment:
    """Processes share its store; see `process`."""

    scheduler: AnyIOScheduler
    store: InProcessStore
    requests: InProcessRequestPlane
    network: MemoryNetwork | None = None
    """Over which requests go, on connections of TCP; None: `faults` are what happens to requests."""
    faults: Faults = field(factory=Faults)
    count: int = 0

    @asynccontextmanager
    async def process(self, limits: DirectEventLimits | None = None, **given: Any) -> AsyncIterator[Process]:
        """Give another process, until the block ends."""
        number, scheduler, rng = self.count, AnyIOScheduler(), Random(self.count)
        self.count += 1
        store, requests = ProcessStore(self), self._requests_of(number, scheduler)

        def wall_ms() -> int:
            return round(scheduler.now.timestamp() * 1000)

        events = DirectEventPlane(store, requests, scheduler, wall_ms, rng, limits)
        process = Process(store, requests, events, scheduler, rng=rng, **given)
        process.number, process.store = number, store
        async with process:
            yield process

    def _requests_of(self, number: int, scheduler: AnyIOScheduler) -> RequestPlane:
        if self.network is None:
            return ProcessRequests(self, number)
        return TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False), network=self.network)


@asynccontextmanager
async def deployment(*, has_network: bool = False) -> AsyncIterator[Deployment]:
    """Give a deployment without processes, with a network in memory or without. At the end nothing of them is left."""
    async with AnyIOScheduler() as scheduler:
        network = MemoryNetwork(scheduler) if has_network else None
        made = Deployment(scheduler, InProcessStore(scheduler, LEASE_TTL_S), InProcessRequestPlane(), network)
        yield made
        await anyio.sleep(2 * LEASE_TTL_S)
        assert network is None or network.links == []
        assert await made.store.entries() == {}
        assert made.store.watchers == 0
        assert made.requests.serving == {}
        assert not made.faults.calls


@asynccontextmanager
async def processes(count: int, **given: Any) -> AsyncIterator[tuple[Deployment, list[Process]]]:
    """Give a deployment of so many processes."""
    async with deployment() as made, AsyncExitStack() as stack:
        yield made, [await stack.enter_async_context(made.process(**given)) for _ in range(count)]


class ProcessStore(Store):
    """The shared store as one process sees it. Its own keys are removed when it is closed."""

    def __init__(self, made: Deployment) -> None:
        self._made, self._own = made, set[str]()
        self._watches: set[ObserverBase[Change]] = set()
        self._has_crashed = False

    def _check(self) -> InProcessStore:
        if self._made.faults.is_store_away or self._has_crashed:
            raise Unavailable("the store is away")
        return self._made.store

    async def create(self, key: str, value: bytes) -> Written:
        self._own.add(key)
        return await self._check().create(key, value)

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        self._own.add(key)
        return await self._check().replace(key, value, revision)

    async def delete(self, key: str) -> None:
        await self._check().delete(key)
        self._own.discard(key)

    async def get(self, key: str) -> Put | None:
        return await self._check().get(key)

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        return await self._check().entries(prefix)

    def watch(self, prefix: str = "") -> Observable[Change]:
        def subscribe(observer: ObserverBase[Change], scheduler: Any = None) -> DisposableBase:
            self._watches.add(observer)
            watching = self._made.store.watch(prefix).subscribe(observer, scheduler=scheduler)
            return CompositeDisposable(watching, Disposable(lambda: self._watches.discard(observer)))

        return Observable(subscribe)

    def abandon(self, key: str) -> None:
        self._made.store.abandon(key)

    def lapse(self) -> None:
        """Answer nothing more; the keys lapse."""
        self._has_crashed = True
        for key in self._own:
            self._made.store.abandon(key)

    async def close(self) -> None:
        if not self._has_crashed:
            for key in self._own:
                await self._made.store.delete(key)
        for observer in list(self._watches):
            observer.on_completed()


class ProcessRequests(RequestPlane):
    """The request plane of one process. What goes to others, and comes back, is translated to bytes and back."""

    def __init__(self, made: Deployment, number: int) -> None:
        self._made, self._number = made, number
        self._own: dict[str, Serving] = {}

    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        takes = Signature.of(engine, AsyncEngine).takes
        served, serving = await self._made.requests.serve(instance, _OverWire(engine, takes))
        self._own[instance.key] = serving
        return Instance(
            **{name: getattr(served, name) for name in ("namespace", "component", "endpoint", "instance_id")},
            transport={"process": str(self._number)},
        ), serving

    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        found = self._made.requests.engine(instance, item_type)
        return _Remote(self._made.faults, found, int(instance.transport["process"]), self._number, item_type)

    def cut(self) -> None:
        """Lose all requests and instances."""
        for serving in self._own.values():
            serving.cut()

    async def close(self) -> None:
        self.cut()


class _OverWire(AsyncEngine[Any, Any]):
    """The server's side: bytes to the declared type, items to bytes."""

    def __init__(self, engine: AsyncEngine[Any, Any], takes: Any) -> None:
        self._engine, self._takes = engine, takes

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        stream = await self._engine.generate(request.with_payload(from_msgpack(request.payload, self._takes)))
        return stream.map(to_msgpack)


class _Remote(AsyncEngine[Any, Any]):
    """The caller's side: the request to bytes, bytes to items; and faults."""

    def __init__(self, faults: Faults, engine: AsyncEngine[Any, Any], to: int, number: int, item_type: Any) -> None:
        self._faults, self._engine, self._item_type = faults, engine, item_type
        self._ends = {to, number}

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        if len(self._ends) > 1 and self._ends & self._faults.cut:
            self._faults.refused_at_s.append(anyio.current_time())
            raise CannotConnect("the process cannot be reached")
        context: Context[Any] = Context(to_msgpack(request.payload), id=request.id, metadata=dict(request.metadata))
        context.trace = request.trace
        request.control.link_child(context.control)
        call = _Call(context)
        self._faults.calls.add(call)
        ended = ReleaseOnce(self._faults.calls.discard, call)
        try:
            stream = await self._engine.generate(context)
        except BaseException:
            ended.release()
            raise
        return ResponseStream(self._items(stream, call), request, stream, ended)

    async def _items(self, stream: ResponseStream[Any], call: _Call) -> AsyncGenerator[Any, None]:
        async with stream:
            async for data in stream:
                if self._faults.held is not None and len(self._ends) > 1:
                    await self._faults.held.wait()
                yield from_msgpack(data, self._item_type)
        if call.is_lost:
            raise Disconnected("the connection broke")
