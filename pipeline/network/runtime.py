"""Runtime: one object that holds the planes, serves engines and finds them.

async with Runtime.in_process() as runtime:
    await runtime.serve("ns/backend/generate", engine)
    workers = runtime.workers("ns/backend/generate")
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from pipeline import AsyncEngine
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
        lease_ttl_s: float = LEASE_TTL_S,
    ) -> None:
        self._store = store
        self.discovery = Discovery(store)
        self.requests = requests
        self.events = events
        self.scheduler = scheduler
        self.graceful_timeout_s = graceful_timeout_s
        self.lease_ttl_s = lease_ttl_s
        self._rng = rng
        self.served: dict[str, Served] = {}
        self.instance_id = rng.randint(1, MAX_ID)
        """The id of this process's instances unless they are given another."""

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

        `wall_ms` dates events, by default with the loop's clock; `metrics`, of the component family, count requests.
        """
        rng, scheduler = rng or Random(), AnyIOScheduler()
        events = InProcessEventPlane(wall_ms or (lambda: round(scheduler.now.timestamp() * 1000)), rng)
        return cls(
            InProcessStore(scheduler),
            InProcessRequestPlane(metrics),
            events,
            scheduler,
            rng=rng,
            graceful_timeout_s=graceful_timeout_s,
            lease_ttl_s=lease_ttl_s,
        )

    async def __aenter__(self) -> Self:
        await self.scheduler.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
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
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self.requests.close()
                await self._store.close()
                await self.events.close()
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
        """Serves the engine at the endpoint, first reachable, then visible; if publishing fails neither.

        Without an id the instance has the runtime's, or a new one where that is taken. Raises InvalidArgument for
        names that cannot be, an id that is taken, and a card in conflict with the endpoint's.
        """
        where = EndpointId.parse(endpoint).checked()
        wanted = Instance.of(where, self._free_id(where) if instance_id is None else instance_id)
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

    def workers(self, endpoint: str | EndpointId) -> EndpointWorkers[Any, Any]:
        """The instances of the endpoint, followed until the view is closed or the runtime is left."""
        where = EndpointId.parse(endpoint)
        return EndpointWorkers(where, self.discovery.watch(where.path), self.requests.engine)

    def _free_id(self, endpoint: EndpointId) -> int:
        instance_id = self.instance_id
        while Instance.of(endpoint, instance_id).key in self.served:
            instance_id = self._rng.randint(1, MAX_ID)
        return instance_id
