"""Pools of scripted workers, and the ways in which a test sends requests to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from operators import PushRouter
from operators.pool import Loads, assign_worker
from operators.pool.push_router import RouterMode
from pipeline import Annotated, AnyContext, AsyncEngine, Context, PenstockError, ResponseStream
from pipeline.network import Added, EndpointId, EndpointWorkers, Instance, Removed, Workers, static_workers
from pipeline.rx import Subject
from pipeline.testing import ScriptedEngine, watch_streams

NAME = "ns/comp/ep"
"""The endpoint of every pool here."""

PICKING_MODES: list[RouterMode] = [
    "round_robin",
    "random",
    "power_of_two_choices",
    "least_loaded",
    "device_aware_weighted",
]
"""All modes in which the router picks the worker."""

Engine = AsyncEngine[Any, Any]


def answering(*instance_ids: int) -> dict[int, ScriptedEngine]:
    """Instances of which each answers with one item: its own id."""
    return {instance_id: ScriptedEngine([Annotated(instance_id)]) for instance_id in instance_ids}


def pool(engines: Mapping[int, Engine]) -> Workers[Any, Any]:
    """A pool at NAME with these instances, which never changes."""
    return static_workers(engines, name=NAME)


class Changing:
    """The pool at NAME of these instances, which come and go; each is published under its id."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self._watch: Subject[Added[Instance] | Removed[Instance]] = Subject()
        self.workers: EndpointWorkers[Any, Any] = EndpointWorkers(
            EndpointId.parse(NAME), self._watch, lambda instance: engines[instance.instance_id]
        )
        for instance_id in engines:
            self.add(instance_id)

    def add(self, instance_id: int) -> None:
        """Have the instance come."""
        self._watch.on_next(Added(Instance.of(EndpointId.parse(NAME), instance_id)))

    def remove(self, instance_id: int) -> None:
        """Have the instance leave."""
        self._watch.on_next(Removed(Instance.of(EndpointId.parse(NAME), instance_id)))

    def complete(self) -> None:
        """End the watch of the instances, and with it the pool."""
        self._watch.on_completed()


class Shrinking(Changing):
    """The pool at NAME in which the instances that are `leaving` are gone by the time a request reaches them."""

    def __init__(self, instance_ids: Sequence[int], leaving: Sequence[int]) -> None:
        self.engines = answering(*instance_ids)
        super().__init__({i: Leaving(self, i) if i in leaving else engine for i, engine in self.engines.items()})


class Leaving(Engine):
    """An instance that leaves its pool when a request is sent to it."""

    def __init__(self, pool: Changing, instance_id: int) -> None:
        self._pool, self._instance_id = pool, instance_id

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self._pool.remove(self._instance_id)
        return await self._pool.workers.engine(self._instance_id).generate(request)


def router(*instance_ids: int, mode: RouterMode = "round_robin", rng: Random | None = None) -> PushRouter[Any, Any]:
    """A router to instances that answer with their own id."""
    return PushRouter(pool(answering(*instance_ids)), mode, rng)


def lowest(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
    """A picker of one's own: the candidate with the lowest id."""
    return candidates[0]


def in_flight(engine: PushRouter[Any, Any]) -> int:
    """How many requests the router counts as in flight, at all instances together."""
    return sum(load.in_flight for load in engine.loads.current().values())


async def answerer(engine: Engine, payload: object = None) -> Any:
    """Send one request and return the id of the instance that answered; no stream of it stays open."""
    with watch_streams() as streams:
        (item,) = await (await engine.generate(Context(payload))).collect()
    assert streams.open == []
    return item.data


def assigned(worker_id: int, payload: object = None) -> Context[Any]:
    """A request that a stage above has assigned to that worker."""
    request = Context(payload)
    assign_worker(request, worker_id)
    return request


async def send_to(engine: Engine, worker_id: int) -> ResponseStream[Any]:
    """The stream of a request that is assigned to that worker."""
    return await engine.generate(assigned(worker_id))


async def meet(engine: Engine, worker_id: int, error: PenstockError) -> None:
    """Send a request to that worker and get this error, raised or as an item."""
    got: list[Any] = []
    try:
        got = await (await send_to(engine, worker_id)).collect()
    except PenstockError as raised:
        got = [Annotated[Any].from_error(raised)]
    assert got[-1].error is error
