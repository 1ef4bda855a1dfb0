"""Runtime: holds the planes, serves engines and finds them.

async with Runtime.in_process() as runtime:
    await runtime.serve("ns/backend/generate", engine)
    workers = runtime.workers("ns/backend/generate")

Served: one engine at one endpoint, from its publication to its end. `withdraw_all` is for several.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import anyio

from pipeline import AsyncEngine, InvalidArgument, PenstockError, StreamClosed, Unavailable
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.rx import AnyIOScheduler

from .backends import Planes, Site, in_process_planes, planes_at
from .discovery import Discovery, Lease, Model, Store
from .events import EventPlane
from .names import MAX_ID, EndpointId, Instance
from .objects import InProcessObjects, Objects
from .requests import RequestPlane, Serving
from .workers import EndpointWorkers

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics

    from .tcp import TcpOptions


_log = logging.getLogger(__name__)


class Served:
    """An engine that is served. It ends with `close`, or with the runtime."""

    def __init__(self, runtime: Runtime, instance: Instance, model: Model | None, serving: Serving) -> None:
        self.instance = instance
        self.leases: tuple[Lease, ...] = ()
        """Held while it is published. Abandoning them stops their renewal, as a hanging process does."""
        self._runtime = runtime
        self._model = model
        self._serving = serving
        self._is_withdrawn = False

    @property
    def instance_id(self) -> int:
        return self.instance.instance_id

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return self._serving.running

    async def publish(self) -> None:
        """Make the instance visible, also again after `unpublish`. With a refused card it stays invisible.

        Raise Unavailable if it has been withdrawn or cut: no caller could reach it.
        """
        if self._is_withdrawn:
            raise Unavailable(f"{self.instance} takes no requests any more")
        if self.leases:
            return
        discovery = self._runtime.discovery
        lease = await discovery.register(self.instance)
        try:
            card = () if self._model is None else (await discovery.register_model(self._model),)
        except BaseException:
            await lease.release()
            raise
        self.leases = (lease, *card)

    async def unpublish(self) -> None:
        """Withdraw it from discovery. Callers that have found it may still send requests.

        Leases that cannot be released lapse; raise the error of the first one then.
        """
        leases, self.leases = self.leases, ()
        failures: list[Exception] = []
        for lease in reversed(leases):  # the card first: who sees no instance may take its id
            try:
                await lease.release()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    async def withdraw(self) -> None:
        """Make the instance invisible, then refuse new requests. If discovery fails, it is logged and leases lapse."""
        self._is_withdrawn = True
        try:
            await self.unpublish()
        except PenstockError as error:
            _log.warning("%s could not be unpublished, its lease runs out: %s", self.instance, error)
        except Exception:
            _log.exception("%s could not be unpublished", self.instance)
        finally:
            self._serving.refuse()

    async def drained(self) -> None:
        """Wait until no request is running."""
        await self._serving.drained()

    async def close(self, graceful_timeout_s: float | None = None) -> None:
        """Withdraw the instance, wait for its requests, and cut those left after the time (default: the runtime's).

        Callers of requests that are cut get Disconnected.
        """
        bound_s = self._runtime.graceful_timeout_s if graceful_timeout_s is None else graceful_timeout_s
        try:
            await self.withdraw()
            with anyio.move_on_after(bound_s):
                await self.drained()
        finally:
            self.cut()

    def cut(self) -> None:
        """Refuse new requests and end the running ones: the engine's are killed, callers get Disconnected."""
        self._is_withdrawn = True
        self._serving.cut()
        if self._runtime.served.get(self.instance.key) is self:  # another may serve the instance meanwhile
            del self._runtime.served[self.instance.key]

    def abort(self) -> None:
        """Simulate a crash: the instance becomes unreachable, its requests are cut, and discovery drops it at once.

        For a crash that discovery notices by the lease only, `cut` it and abandon its leases.
        """
        self.cut()
        if self.leases:
            self._runtime.scheduler.spawn(lambda _: self.withdraw())


async def withdraw_all(served: Iterable[Served]) -> None:
    """`withdraw` all of them at a time: together they take no longer than the one that discovery holds up longest."""
    async with anyio.create_task_group() as tasks:
        for one in served:
            tasks.start_soon(one.withdraw)


GRACEFUL_TIMEOUT_S = 5.0
LEASE_TTL_S = 10.0
_CLOSE_TIMEOUT_S = 5.0

Out = TypeVar("Out")


class Runtime:
    """A process's part in a deployment: the engines it serves and the workers it sees. An async context manager.

    Leaving it has three phases: withdraw everything from discovery and refuse new requests; wait for running requests,
    at most `graceful_timeout_s` (not at all if the block failed); cut the rest and close. Nothing is open afterwards.
    `scheduler` runs its background work and is there for timed operators on its facts.

    Source: dynamo lib/runtime/src/runtime.rs, distributed.rs. The bound is short by default, because streams of one
    process that is no longer read would keep it waiting.
    """

    def __init__(
        self,
        store: Store,
        requests: RequestPlane,
        events: EventPlane,
        scheduler: AnyIOScheduler,
        *,
        objects: Objects | None = None,
        rng: Random,
        graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
    ) -> None:
        self._store = store
        self.discovery = Discovery(store)
        self.requests = requests
        self.events = events
        self.objects = InProcessObjects() if objects is None else objects
        self._planes = (store, requests, events, self.objects)
        self.scheduler = scheduler
        self.graceful_timeout_s = graceful_timeout_s
        self._rng = rng
        self._is_open = self._was_left = False
        self.served: dict[str, Served] = {}
        self.instance_id = rng.randint(1, MAX_ID)
        """The id of this process's instances unless they are given another."""
        self._drawn_ids = {self.instance_id}

    @classmethod
    def in_process(
        cls,
        *,
        rng: Random | None = None,
        wall_ms: Callable[[], int] | None = None,
        graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
        lease_ttl_s: float = LEASE_TTL_S,
        metrics: Metrics | None = None,
    ) -> Self:
        """Return a separate deployment inside this process: no server, no socket, invisible to every other runtime.

        An abandoned instance stays visible for `lease_ttl_s`. `wall_ms` dates events, by default with the loop's clock;
        `metrics`, of the component family, count requests.
        """
        site = _site(rng, lease_ttl_s, wall_ms, metrics)
        return cls._of(in_process_planes(site), site, graceful_timeout_s)

    @classmethod
    def at(
        cls,
        url: str,
        *,
        tcp: TcpOptions | None = None,
        rng: Random | None = None,
        wall_ms: Callable[[], int] | None = None,
        graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
        lease_ttl_s: float = LEASE_TTL_S,
        metrics: Metrics | None = None,
        may_make: bool = True,
    ) -> Self:
        """Return a process's part in the deployment at the URL: `memory`, `file:FOLDER` or `nats://HOST:PORT`.

        `tcp`: where it listens for other processes, and with which it speaks; by default on this machine, with all. A
        process that is gone stays visible for `lease_ttl_s`, a whole number with NATS and the same in all processes.
        `wall_ms` dates events, by default with the loop's clock; `metrics`, of the component family, count requests.
        `may_make`: whether a folder that is not there is made; False for a process that only looks.

        Raise InvalidArgument for another URL. Entering raises CannotConnect if what the URL names cannot be reached.
        """
        site = _site(rng, lease_ttl_s, wall_ms, metrics, may_make=may_make)
        return cls._of(planes_at(url, site, tcp), site, graceful_timeout_s)

    @classmethod
    def _of(cls, planes: Planes, site: Site, graceful_timeout_s: float) -> Self:
        return cls(
            planes.store,
            planes.requests,
            planes.events,
            site.scheduler,
            objects=planes.objects,
            rng=site.rng,
            graceful_timeout_s=graceful_timeout_s,
        )

    async def __aenter__(self) -> Self:
        if self._was_left:
            raise StreamClosed("this runtime was left: make another")
        await self.scheduler.__aenter__()
        try:
            for plane in self._planes:
                await plane.open()
        except BaseException as error:
            await self._close(type(error), error, error.__traceback__)
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._is_open, self._was_left = False, True
        served = list(self.served.values())
        try:
            await withdraw_all(served)
            with anyio.move_on_after(self.graceful_timeout_s if kind is None else 0):
                for one in served:
                    await one.drained()
        finally:
            for one in served:
                one.cut()
            ended = await self._close(kind, error, trace)
        return ended

    async def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._was_left = True
        try:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                async with AsyncExitStack() as planes:
                    for plane in (self.objects, self.events, self._store, self.requests):  # the last one first
                        planes.push_async_callback(plane.close)
        finally:
            ended = await self.scheduler.__aexit__(kind, error, trace)
        return ended

    async def serve(
        self,
        endpoint: str | EndpointId,
        engine: AsyncEngine[Any, Any],
        *,
        card: ModelDeploymentCard | None = None,
        instance_id: int | None = None,
    ) -> Served:
        """Serve the engine at the endpoint, first reachable, then visible; if publishing fails neither.

        Without an id the instance has the runtime's, or a new one where that is taken. Raise InvalidArgument for
        invalid names and ids, an id in use, and a card in conflict with the endpoint's; StreamClosed
        outside of the runtime's block.
        """
        if not self._is_open:
            raise StreamClosed("this runtime is not open: serve inside its `async with` block")
        where = EndpointId.parse(endpoint).checked()
        if instance_id is None:
            instance_id = self._free_id(where)
        elif not 0 <= instance_id < 2**64:
            raise InvalidArgument(f"an instance id has 64 bits, found {instance_id}", field="instance_id")
        wanted = Instance.of(where, instance_id)
        instance, serving = await self.requests.serve(wanted, engine)
        model = None if card is None else Model(where, instance.instance_id, card)
        served = Served(self, instance, model, serving)
        self.served[instance.key] = served
        try:
            await served.publish()
        except BaseException:
            served.cut()
            raise
        return served

    def new_instance_id(self) -> int:
        """Return an id for one more worker of this process, neither returned before nor of an instance served now."""
        taken = self._drawn_ids | {served.instance_id for served in self.served.values()}
        while (instance_id := self._rng.randint(1, MAX_ID)) in taken:
            pass
        self._drawn_ids.add(instance_id)
        return instance_id

    @overload
    def workers(self, endpoint: str | EndpointId) -> EndpointWorkers[Any, Any]: ...
    @overload
    def workers(self, endpoint: str | EndpointId, item_type: type[Out]) -> EndpointWorkers[Any, Out]: ...
    def workers(self, endpoint: str | EndpointId, item_type: Any = Any) -> EndpointWorkers[Any, Any]:
        """Return the instances of the endpoint, followed until the view is closed or the runtime is left.

        Existing instances may take a moment to appear: see `wait_for_instances`. Items that cross as bytes are read as
        the type, or without one as plain values. Raise InvalidArgument for invalid names.
        """
        where = EndpointId.parse(endpoint).checked()
        return EndpointWorkers(
            where,
            self.discovery.watch(where.path),
            lambda instance: self.requests.engine(instance, item_type),
            self.requests.keep_connected,
        )

    def _free_id(self, endpoint: EndpointId) -> int:
        instance_id = self.instance_id
        while Instance.of(endpoint, instance_id).key in self.served:
            instance_id = self.new_instance_id()
        return instance_id


def _site(
    rng: Random | None,
    lease_ttl_s: float,
    wall_ms: Callable[[], int] | None,
    metrics: Metrics | None,
    *,
    may_make: bool = True,
) -> Site:
    scheduler = AnyIOScheduler()
    dates = wall_ms or (lambda: round(scheduler.now_s * 1000))
    return Site(scheduler, rng or Random(), lease_ttl_s, dates, metrics, may_make)
