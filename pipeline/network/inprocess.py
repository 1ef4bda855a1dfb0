"""The request plane of one process: a function call.

The event plane of one process: a fan-out for each scope and topic.

The store of one process: a dict.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from pipeline import (
    AsyncEngine,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    to_error,
)
from pipeline.foreign import raise_if_ours
from pipeline.rx import AnyIOScheduler, CompositeDisposable, Disposable, DisposableBase, Observable, ObserverBase

from ..loop import LoopHandle
from .discovery import Change, Gone, Put, Store, Written
from .events import Event, EventPlane, Fanout, Publisher, Scope, all_but
from .names import MAX_ID, Instance, matches_prefix
from .requests import CallMeter, MeteredCall, RequestPlane, Serving, count_taken, not_found

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics


Out = TypeVar("Out")


class InProcessRequestPlane(RequestPlane):
    """Instances of one process, by their full identity. Payloads are passed by reference, not copied.

    `metrics`, of the component family, count the requests of each instance.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self.serving: dict[str, InProcessServing] = {}

    async def serve(self, instance: Instance, engine: AsyncEngine[Any, Any]) -> tuple[Instance, Serving]:
        if instance.key in self.serving:
            raise InvalidArgument(f"{instance} is served already", field="instance_id")
        meter = None if self._metrics is None else CallMeter(self._metrics, instance)
        serving = self.serving[instance.key] = InProcessServing(self, instance, engine, meter)
        return instance, serving

    def engine(self, instance: Instance, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        return _InstanceEngine(self, instance)

    async def close(self) -> None:
        for serving in list(self.serving.values()):
            serving.cut()


class InProcessServing(Serving):
    """Runs each request under a separate context, so that the engine can be killed without its caller."""

    def __init__(
        self,
        plane: InProcessRequestPlane,
        instance: Instance,
        engine: AsyncEngine[Any, Any],
        meter: CallMeter | None,
    ) -> None:
        self._plane = plane
        self._instance = instance
        self._engine = engine
        self._meter = meter
        self._calls: dict[Context[Any], None] = {}  # in the order they came, which is that in which they are cut
        self._is_cut = False
        self._idle = anyio.Event()

    @property
    def running(self) -> int:
        return len(self._calls)

    def refuse(self) -> None:
        if self._plane.serving.get(self._instance.key) is self:
            del self._plane.serving[self._instance.key]

    async def drained(self) -> None:
        while self._calls:
            await self._idle.wait()

    def cut(self) -> None:
        self.refuse()
        self._is_cut = True
        for call in list(self._calls):
            call.kill()

    async def take(self, request: Context[Any]) -> ResponseStream[Any]:
        """Return the engine's answer, relayed."""
        call = Context(request.payload, id=request.id, metadata=request.metadata)
        call.trace = request.trace
        request.control.link_child(call.control)
        if not self._calls:
            self._idle = anyio.Event()
        self._calls[call] = None
        metered = None if self._meter is None else self._meter.begun(request.payload)
        ended = ReleaseOnce(self._end, call, request, metered)
        try:
            stream = await self._engine.generate(call)
        except BaseException as error:
            ended.release()
            raise_if_ours(error)
            self._fail(request, error)
            raise
        relay = partial(count_taken, metered)
        return ResponseStream(self._relay(stream, request, ended, metered), request, stream, ended, relay=relay)

    async def _relay(
        self, stream: ResponseStream[Any], request: Context[Any], ended: ReleaseOnce, metered: MeteredCall | None
    ) -> AsyncGenerator[Any, None]:
        try:
            async with stream:
                async for item in stream:
                    if metered is not None:
                        try:  # noqa: SIM105  # 40 ns an item; any other way to look for tokens costs more
                            metered.tokens += len(item.data.token_ids)
                        except (AttributeError, TypeError):
                            pass
                    yield item
            if self._is_lost_to(request):
                raise self._lost()
        except BaseException as error:
            raise_if_ours(error)
            self._fail(request, error)
            raise
        finally:
            ended.release()

    def _is_lost_to(self, request: Context[Any]) -> bool:
        """Return whether the instance went away under a request that still wants an answer."""
        return self._is_cut and not request.is_stopped

    def _lost(self) -> Disconnected:
        return Disconnected(f"{self._instance} was lost")

    def _fail(self, request: Context[Any], error: BaseException) -> None:
        """Count the error. Raise the error that the caller gets in its place, if that is another one."""
        if self._meter is not None:
            self._meter.failed()
        if self._is_lost_to(request) and not isinstance(error, Disconnected):
            raise self._lost() from error
        if not isinstance(error, PenstockError):
            raise to_error(error) from error

    def _end(self, call: Context[Any], request: Context[Any], metered: MeteredCall | None) -> None:
        self._calls.pop(call, None)
        if self._meter is not None and metered is not None:
            self._meter.ended(metered, cancelled=request.is_stopped)
        if not self._calls:
            self._idle.set()


class _InstanceEngine(AsyncEngine[Any, Any]):
    """One instance, as an engine for its callers."""

    def __init__(self, plane: InProcessRequestPlane, instance: Instance) -> None:
        self._plane = plane
        self._instance = instance
        self._key = instance.key

    def __str__(self) -> str:
        return str(self._instance)

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        serving = self._plane.serving.get(self._key)
        if serving is None:
            raise not_found(str(self._instance.endpoint_id), self._instance.instance_id)
        return await serving.take(request)


T = TypeVar("T")
Key = tuple[Scope, str]


class InProcessEventPlane(EventPlane):
    """Delivers payloads by reference, on the thread the publisher was made in, without loss.

    `wall_ms` dates the events, `rng` draws the publisher ids.
    """

    def __init__(self, wall_ms: Callable[[], int], rng: Random) -> None:
        self._wall_ms = wall_ms
        self._rng = rng
        self._topics: dict[Key, Fanout[Event[Any]]] = {}
        self._closed = False

    @property
    def subscriptions(self) -> int:
        """Number of subscribers."""
        return sum(len(fanout) for fanout in self._topics.values())

    def publisher(self, scope: Scope, topic: str) -> Publisher:
        return _InProcessPublisher(self, (scope, topic), self._rng.randint(1, MAX_ID))

    def push(self, key: Key, publisher_id: int, sequence: int, payload: object) -> None:
        """Deliver an event to its subscribers. Called in the publisher's loop."""
        if (fanout := self._topics.get(key)) is not None:
            fanout.push(Event(publisher_id, sequence, self._wall_ms(), key[1], payload))

    def subscribe(
        self, scope: Scope, topic: str, payload_type: type[T], *, but: Publisher | None = None
    ) -> Observable[Event[T]]:
        key, accepts = (scope, topic), all_but(but)

        def tidy() -> None:
            if key in self._topics and not self._topics[key]:
                del self._topics[key]

        def subscribe(observer: ObserverBase[Event[T]], _: Any = None) -> DisposableBase:
            if self._closed:
                observer.on_completed()
                return Disposable()
            listening = self._topics.setdefault(key, Fanout()).add(observer, accepts=accepts)
            return CompositeDisposable(listening, Disposable(tidy))

        return Observable(subscribe)

    async def close(self) -> None:
        self._closed = True
        topics, self._topics = self._topics, {}
        for fanout in topics.values():
            fanout.complete()


class _InProcessPublisher(Publisher):
    def __init__(self, plane: InProcessEventPlane, key: Key, publisher_id: int) -> None:
        self.publisher_id = publisher_id
        self._plane, self._key = plane, key
        self._numbers, self._handle = count(), LoopHandle()

    def publish(self, payload: object) -> None:
        # Numbered where it is delivered, so that events of several threads arrive in the order of their numbers.
        self._handle.run(lambda: self._plane.push(self._key, self.publisher_id, next(self._numbers), payload))


class InProcessStore(Store):
    """A dict. Its owner exists as long as it does, so keys need no renewal; only abandoned keys expire.

    For one thread. `scheduler` measures the `ttl_s` seconds that an abandoned key stays.
    """

    def __init__(self, scheduler: AnyIOScheduler, ttl_s: float) -> None:
        self._scheduler = scheduler
        self._ttl_s = ttl_s
        self._entries: dict[str, Put] = {}
        self._lapsing: dict[str, DisposableBase] = {}
        self._watchers: Fanout[Change] = Fanout()

    @property
    def watchers(self) -> int:
        """Number of watches."""
        return len(self._watchers)

    async def create(self, key: str, value: bytes) -> Written:
        if (entry := self._entries.get(key)) is not None:
            return Written("exists", entry.revision)
        self._write(Put(key, value, 0))
        return Written("created", 0)

    async def replace(self, key: str, value: bytes, revision: int) -> Written:
        if (entry := self._entries.get(key)) is None:
            return Written("missing")
        if entry.revision != revision:
            return Written("retry", entry.revision)
        self._write(Put(key, value, revision + 1))
        return Written("created", revision + 1)

    async def delete(self, key: str) -> None:
        self._remove(key)

    async def get(self, key: str) -> Put | None:
        return self._entries.get(key)

    async def entries(self, prefix: str = "") -> dict[str, bytes]:
        return {put.key: put.value for put in self._under(prefix)}

    def watch(self, prefix: str = "") -> Observable[Change]:
        def subscribe(observer: ObserverBase[Change], _: Any = None) -> DisposableBase:
            return self._watchers.add(
                observer, first=self._under(prefix), accepts=lambda change: matches_prefix(change.key, prefix)
            )

        return Observable(subscribe)

    def abandon(self, key: str) -> None:
        if key in self._entries and key not in self._lapsing:
            self._lapsing[key] = self._scheduler.schedule_relative(self._ttl_s, lambda *_: self._remove(key))

    async def close(self) -> None:
        for key in list(self._entries):
            self._remove(key)
        self._watchers.complete()

    def _under(self, prefix: str) -> list[Put]:
        return [entry for key, entry in sorted(self._entries.items()) if matches_prefix(key, prefix)]

    def _write(self, entry: Put) -> None:
        self._renew(entry.key)
        self._entries[entry.key] = entry
        self._watchers.push(entry)

    def _remove(self, key: str) -> None:
        self._renew(key)
        if self._entries.pop(key, None) is not None:
            self._watchers.push(Gone(key))

    def _renew(self, key: str) -> None:
        if (lapsing := self._lapsing.pop(key, None)) is not None:
            lapsing.dispose()
