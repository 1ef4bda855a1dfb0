"""Peers: how the engine of one worker reaches those of other workers, as to hand KV blocks over.

    prefill   serve(engine) ──► address, which it gives away in its config or its answers
    decode    engine(address) ──► calls over the request plane ──► that engine

Between two workers of one process a call is a function call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from attrs import evolve

from pipeline import AsyncEngine, EngineShutdown, InvalidArgument

if TYPE_CHECKING:
    from pipeline.network import EndpointId, EndpointWorkers, Runtime, Served

Out = TypeVar("Out")

PEERS_ENDPOINT = "peers"
"""Name of the endpoint, in the component of its worker."""
LOOKUP_S = 1.0
"""How long the worker at an address may take to appear in discovery."""
_VIEWS_MAX = 16
"""Components whose workers are followed at the same time."""
_INCARNATION_BYTES = 8


class Peers(ABC):
    """The other workers of a deployment, for the engine of one of them."""

    @abstractmethod
    async def serve(self, engine: AsyncEngine[Any, Any]) -> str:
        """Serve the engine to peers until the worker ends, which cuts its calls; return its address.

        An address is of this start of the worker only: the next one has another, also under the same worker id. Called
        at most once. Raise as `Runtime.serve`.
        """

    @abstractmethod
    async def engine(self, address: str, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        """Return what is served at an address; calls raise CannotConnect if no worker is there.

        Items that cross as bytes are read as the type. A worker that discovery does not show yet is waited for, at most
        `LOOKUP_S`. Raise InvalidArgument for what is no address of this namespace, EngineShutdown once this worker has
        ended.
        """

    @abstractmethod
    def is_address(self, text: str) -> bool:
        """Return whether the text has the form of an address of this namespace."""


class WorkerPeers(Peers):
    """Peers by the runtime of a worker, which calls `cut`, `withdraw` and `abort` at its own."""

    def __init__(self, runtime: Runtime, endpoint: EndpointId, worker_id: int) -> None:
        self._runtime, self._worker_id = runtime, worker_id
        self._endpoint = evolve(endpoint, endpoint=PEERS_ENDPOINT)
        self._served: Served | None = None
        self._views: dict[tuple[EndpointId, Any], EndpointWorkers[Any, Any]] = {}
        self._is_withdrawn = False

    async def serve(self, engine: AsyncEngine[Any, Any]) -> str:
        self._served = await self._runtime.serve(self._endpoint, engine, instance_id=self._worker_id)
        return f"{self._served.instance.key}/{token_hex(_INCARNATION_BYTES)}"

    async def engine(self, address: str, item_type: type[Out]) -> AsyncEngine[Any, Out]:
        if (found := self._parsed(address)) is None:
            raise InvalidArgument(f"{address!r} is no address of a peer in {self._endpoint.namespace}")
        if self._is_withdrawn:
            raise EngineShutdown("this worker has ended: it calls no peer any more")
        where, instance_id = found
        workers = self._followed(where, item_type)
        if workers.incarnation(instance_id) < 0:
            await _appears(workers, instance_id)
        return workers.engine(instance_id)

    def is_address(self, text: str) -> bool:
        return self._parsed(text) is not None

    def _parsed(self, address: str) -> tuple[EndpointId, int] | None:
        try:
            namespace, component, endpoint, instance_id, _ = address.split("/")
            where = evolve(self._endpoint, component=component).checked()
            number = int(instance_id, 16)
        except (ValueError, InvalidArgument):
            return None
        return (where, number) if (namespace, endpoint) == (where.namespace, where.endpoint) else None

    def _followed(self, where: EndpointId, item_type: type[Out]) -> EndpointWorkers[Any, Out]:
        key = where, item_type
        if key not in self._views:
            while len(self._views) >= _VIEWS_MAX:
                self._views.pop(next(iter(self._views))).close()
            self._views[key] = self._runtime.workers(where, item_type)
        return self._views[key]

    async def withdraw(self) -> None:
        """Remove the endpoint from discovery, and follow no worker any more. Failures are logged."""
        self._is_withdrawn = True
        while self._views:
            self._views.popitem()[1].close()
        if self._served is not None:
            await self._served.withdraw()

    def cut(self) -> None:
        """Refuse new calls and end the running ones; their callers get Disconnected."""
        if self._served is not None:
            self._served.cut()

    def abort(self) -> None:
        """Disappear at once, as in a crash."""
        if self._served is not None:
            self._served.abort()


async def _appears(workers: EndpointWorkers[Any, Any], instance_id: int) -> None:
    """Return once the instance is in the pool, or after `LOOKUP_S`."""
    is_there = anyio.Event()
    following = workers.follow(lambda members: is_there.set() if instance_id in members.incarnations else None)
    try:
        with anyio.move_on_after(LOOKUP_S):
            await is_there.wait()
    finally:
        following.dispose()
