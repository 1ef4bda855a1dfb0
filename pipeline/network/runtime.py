"""Runtime: one object that holds the planes, serves engines and finds them.

async with Runtime.in_process() as runtime:
    await runtime.serve("ns/backend/generate", engine)
    workers = runtime.workers("ns/backend/generate")
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import anyio

from pipeline import AsyncEngine, InvalidArgument, StreamClosed
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.rx import AnyIOScheduler

from .discovery import Discovery, Model
from .event_plane import EventPlane
from .inprocess_events import InProcessEventPlane
from .inprocess_requests import InProcessRequestPlane
from .inprocess_store import InProcessStore
from .names import MAX_ID, EndpointId, Instance
from .request_plane import RequestPlane
from .served import Served
from .store import Store
from .workers import EndpointWorkers

if TYPE_CHECKING:
    from pipeline.metrics import Metrics

GRACEFUL_TIMEOUT_S = 5.0
LEASE_TTL_S = 10.0
_CLOSE_TIMEOUT_S = 5.0

Out = TypeVar("Out")


class Runtime:
    """A process's part in a deployment: what it serves and what it sees. An async context manager.

    Leaving it, in three phases: withdraw everything from discovery and take no new request; wait for what runs, at most
    `graceful_timeout_s` (not at all if the block failed); cut the rest and close. Nothing is open afterwards.
    `scheduler` runs its background work and is there for timed operators on its facts.

    Source: dynamo lib/runtime/src/runtime.rs, distributed.rs. The bound is short by default, because streams of one
    process that nobody reads any more would keep it waiting.
    """

    def __init__(
        self,
        store: Store,
        requests: RequestPlane,
        events: EventPlane,
        scheduler: AnyIOScheduler,
        *,
        rng: Random,
        graceful_timeout_s: float = GRACEFUL_TIMEOUT_S,
    ) -> None:
        self._store = store
        self.discovery = Discovery(store)
        self.requests = requests
        self.events = events
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
        """A deployment of its own inside this process: no server, no socket, invisible to every other runtime.

        What was abandoned stays visible for `lease_ttl_s`. `wall_ms` dates events, by default with the loop's clock;
        `metrics`, of the component family, count requests.
        """
        rng, scheduler = rng or Random(), AnyIOScheduler()
        events = InProcessEventPlane(wall_ms or (lambda: round(scheduler.now.timestamp() * 1000)), rng)
        return cls(
            InProcessStore(scheduler, lease_ttl_s),
            InProcessRequestPlane(metrics),
            events,
            scheduler,
            rng=rng,
            graceful_timeout_s=graceful_timeout_s,
        )

    async def __aenter__(self) -> Self:
        if self._was_left:
            raise StreamClosed("this runtime was left: make another")
        await self.scheduler.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._is_open, self._was_left = False, True
        served = list(self.served.values())
        try:
            for one in served:
                await one.withdraw()
            with anyio.move_on_after(self.graceful_timeout_s if kind is None else 0):
                for one in served:
                    await one.drained()
        finally:
            for one in served:
                one.cut()
            try:
                await self._close()
            finally:
                ended = await self.scheduler.__aexit__(kind, error, trace)
        return ended

    async def _close(self) -> None:
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            async with AsyncExitStack() as planes:
                for plane in (self.events, self._store, self.requests):  # the last one first
                    planes.push_async_callback(plane.close)

    async def serve(
        self,
        endpoint: str | EndpointId,
        engine: AsyncEngine[Any, Any],
        *,
        card: ModelDeploymentCard | None = None,
        instance_id: int | None = None,
    ) -> Served:
        """Serves the engine at the endpoint, first reachable, then visible; if publishing fails neither.

        Without an id the instance has the runtime's, or a new one where that is taken. Raises InvalidArgument for
        names and ids that cannot be, an id that is taken, and a card in conflict with the endpoint's; StreamClosed
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
        """An id for one more worker of this process: never drawn before, nor of an instance that is served now."""
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
        """The instances of the endpoint, followed until the view is closed or the runtime is left.

        What is there already may take a moment to be known: see `wait_for_instances`. Where items cross as bytes they
        are read as the type, without one as plain values. Raises InvalidArgument for names that cannot be.
        """
        where = EndpointId.parse(endpoint).checked()
        return EndpointWorkers(
            where, self.discovery.watch(where.path), lambda instance: self.requests.engine(instance, item_type)
        )

    def _free_id(self, endpoint: EndpointId) -> int:
        instance_id = self.instance_id
        while Instance.of(endpoint, instance_id).key in self.served:
            instance_id = self.new_instance_id()
        return instance_id
