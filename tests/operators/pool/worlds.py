"""Pools of scripted workers, and the ways in which a test sends requests to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from operators import PushRouter
from operators.pool import Loads, assign_worker
from operators.pool.push_router import RouterMode
from pipeline import Annotated, AnyContext, AsyncEngine, Context, PenstockError, ResponseStream
from pipeline.network import Workers, static_workers
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
