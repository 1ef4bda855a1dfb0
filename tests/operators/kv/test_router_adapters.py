"""KvRouter and adapters: a request goes where its adapter is loaded, if that is known and allowed."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.kv.eligibility import Adapters
from operators.kv.pool import adapters_of
from operators.kv.prompt import PromptBlocks
from operators.kv.queue import PolicyClass, PolicyProfile
from operators.kv.request import RouteRequest
from operators.kv.types import WorkerRank
from pipeline import Unavailable
from pipeline.network import Added, EndpointId, Model, Removed, TaintsUpdated, static_workers
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import LoraInfo, ModelDeploymentCard, ModelRuntimeConfig
from pipeline.rx import BehaviorSubject, Subject
from pipeline.testing import ScriptedEngine

from .worlds import GivenHealth

BLOCK = 4


def router_of(adapters: Adapters | BehaviorSubject[Adapters] | None = None, **given: Any) -> KvRouter:
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in (1, 2, 3)})
    told = adapters if adapters is None or isinstance(adapters, BehaviorSubject) else BehaviorSubject(adapters)
    config = KvRouterConfig(use_kv_events=False)
    return kv_router(pool, config, block_size_tokens=BLOCK, adapters=told, rng=Random(1), **given)


def prompt(adapter: str | None = "french", *, first: int = 0, **given: Any) -> RouteRequest:
    blocks = PromptBlocks(list(range(first, first + 8)), BLOCK, lora_name=adapter)
    return RouteRequest(blocks=blocks, **given)


def asked(router: KvRouter, request: RouteRequest) -> set[int]:
    """The workers the request may go to."""
    return {rank.worker_id for rank in router.advise(request).ranks}


async def test_a_request_goes_where_its_adapter_is_loaded() -> None:
    router = router_of({"french": {2, 3}, "german": {1}})
    assert asked(router, prompt("french")) == {2, 3}
    assert asked(router, prompt("german")) == {1}
    assert asked(router, prompt(None)) == asked(router, prompt("")) == asked(router, prompt("greek")) == {1, 2, 3}


async def test_allowed_workers_are_narrowed_and_never_widened() -> None:
    router = router_of({"french": {2, 3}})
    assert asked(router, prompt(allowed_worker_ids={1, 2})) == {2}
    assert asked(router, prompt(allowed_worker_ids={1})) == {1}


async def test_workers_that_are_not_there_narrow_nothing() -> None:
    health = GivenHealth(1, 2, 3)
    router = router_of({"french": {3, 9}}, health=health)
    assert asked(router, prompt()) == {3}
    health.left_out(3)
    assert asked(router, prompt()) == {1, 2}


async def test_a_named_worker_takes_the_request_without_the_adapter_too() -> None:
    router = router_of({"french": {2}})
    assert router.advise(prompt(worker_id=1)).rank == WorkerRank(1)


async def test_required_taints_hold_beside_the_adapter() -> None:
    configs = BehaviorSubject({i: ModelRuntimeConfig(taints={"a"} if i == 1 else {"b"}) for i in (1, 2, 3)})
    router = router_of({"french": {1, 2}}, configs=configs)
    assert asked(router, prompt(constraints=RoutingConstraints({"b"}))) == {2}
    with pytest.raises(Unavailable):
        router.advise(prompt(constraints=RoutingConstraints({"c"})))


async def test_a_request_that_waits_for_its_adapter_holds_up_no_other() -> None:
    router = router_of({"french": {2}}, profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=0)))
    placed: dict[str, int] = {}

    async def ask(name: str, request: RouteRequest) -> None:
        placed[name] = (await router.reserve(request, request_id=name)).rank.worker_id

    async with anyio.create_task_group() as tasks:
        for name, request in [("a", prompt()), ("b", prompt(first=100)), ("c", prompt(None)), ("d", prompt("german"))]:
            tasks.start_soon(ask, name, request)
            for _ in range(5):
                await checkpoint()
        assert (placed["a"], sorted(placed), len(router.queue)) == (2, ["a", "c", "d"], 1)
        tasks.cancel_scope.cancel()


async def test_a_change_of_adapters_moves_the_queue() -> None:
    adapters: BehaviorSubject[Adapters] = BehaviorSubject({"french": {2}})
    router = router_of(adapters, profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=0)))
    first = await router.reserve(prompt(), request_id="a")
    placed: list[int] = []

    async def ask() -> None:
        placed.append((await router.reserve(prompt(first=100), request_id="b")).rank.worker_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        for _ in range(5):
            await checkpoint()
        assert (placed, first.is_live) == ([], True)
        adapters.on_next({"french": {2, 3}})
    assert placed == [3]


def test_adapters_follow_the_cards() -> None:
    """The card names the adapter; one that does not has the name its key ends with."""

    def model(instance_id: int, suffix: str | None = None, name: str | None = None) -> Model:
        card = ModelDeploymentCard.named("m", kv_cache_block_size=BLOCK)
        named = card if name is None else evolve(card, lora=LoraInfo(name))
        return Model(EndpointId.parse("ns/comp/ep"), instance_id, named, suffix)

    models: Subject[Any] = Subject()
    seen: list[Adapters] = []
    adapters_of(models).subscribe(seen.append)
    models.on_next(Added(model(1)))
    models.on_next(Added(model(1, "fr-1", "fr/1")))
    models.on_next(Added(model(2, "fr-1", "fr/1")))
    models.on_next(Added(model(2, "de")))
    models.on_next(TaintsUpdated(model(2, "de"), ("t",)))
    models.on_next(Removed(model(1, "fr-1", "fr/1")))
    models.on_next(Removed(model(1)))
    models.on_next(Removed(model(2, "de")))
    models.on_next(Removed(model(2, "fr-1", "fr/1")))
    assert seen == [
        {},
        {"fr/1": {1}},
        {"fr/1": {1, 2}},
        {"fr/1": {1, 2}, "de": {2}},
        {"fr/1": {2}, "de": {2}},
        {"fr/1": {2}},
        {},
    ]
