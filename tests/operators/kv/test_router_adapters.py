"""KvRouter and adapters: a request goes where its adapter is loaded, if that is known and allowed."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.kv.prompt import PromptBlocks
from operators.kv.queue import PolicyClass, PolicyProfile
from operators.kv.request import RouteRequest
from operators.kv.types import WorkerRank
from operators.pool import Adapters, Configs
from pipeline import Unavailable
from pipeline.network import static_workers
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import ScriptedEngine

from .worlds import GivenHealth

BLOCK = 4


def router_of(health: GivenHealth, **given: Any) -> KvRouter:
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in (1, 2, 3)})
    config = KvRouterConfig(use_kv_events=False)
    return kv_router(pool, config, block_size_tokens=BLOCK, health=health, rng=Random(1), **given)


def loaded(adapters: Adapters, configs: Configs | None = None) -> GivenHealth:
    """The views of a pool of workers 1, 2 and 3, which have these adapters loaded."""
    health = GivenHealth(1, 2, 3)
    health.publish(configs, adapters)
    return health


def prompt(adapter: str | None = "french", *, first: int = 0, **given: Any) -> RouteRequest:
    blocks = PromptBlocks(list(range(first, first + 8)), BLOCK, lora_name=adapter)
    return RouteRequest(blocks=blocks, **given)


def chosen(router: KvRouter, request: RouteRequest) -> set[int]:
    """The workers the request may go to."""
    return {rank.worker_id for rank in router.advise(request).ranks}


async def test_a_request_goes_where_its_adapter_is_loaded() -> None:
    router = router_of(loaded({"french": {2, 3}, "german": {1}}))
    assert chosen(router, prompt("french")) == {2, 3}
    assert chosen(router, prompt("german")) == {1}
    assert chosen(router, prompt(None)) == chosen(router, prompt("")) == chosen(router, prompt("greek")) == {1, 2, 3}


async def test_allowed_workers_are_narrowed_and_never_widened() -> None:
    router = router_of(loaded({"french": {2, 3}}))
    assert chosen(router, prompt(allowed_worker_ids={1, 2})) == {2}
    assert chosen(router, prompt(allowed_worker_ids={1})) == {1}


async def test_workers_that_are_not_there_narrow_nothing() -> None:
    health = loaded({"french": {3, 9}})
    router = router_of(health)
    assert chosen(router, prompt()) == {3}
    health.left_out(3)
    assert chosen(router, prompt()) == {1, 2}


async def test_a_named_worker_takes_the_request_without_the_adapter_too() -> None:
    router = router_of(loaded({"french": {2}}))
    assert router.advise(prompt(worker_id=1)).rank == WorkerRank(1)


async def test_required_taints_hold_beside_the_adapter() -> None:
    configs = {i: ModelRuntimeConfig(taints={"a"} if i == 1 else {"b"}) for i in (1, 2, 3)}
    router = router_of(loaded({"french": {1, 2}}, configs))
    assert chosen(router, prompt(constraints=RoutingConstraints({"b"}))) == {2}
    with pytest.raises(Unavailable):
        router.advise(prompt(constraints=RoutingConstraints({"c"})))


async def test_a_request_that_waits_for_its_adapter_holds_up_no_other() -> None:
    router = router_of(loaded({"french": {2}}), profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=0)))
    placed: dict[str, int] = {}

    async def send(name: str, request: RouteRequest) -> None:
        placed[name] = (await router.reserve(request, request_id=name)).rank.worker_id

    async with anyio.create_task_group() as tasks:
        for name, request in [("a", prompt()), ("b", prompt(first=100)), ("c", prompt(None)), ("d", prompt("german"))]:
            tasks.start_soon(send, name, request)
            for _ in range(5):
                await checkpoint()
        assert (placed["a"], sorted(placed), len(router.queue)) == (2, ["a", "c", "d"], 1)
        tasks.cancel_scope.cancel()


async def test_a_change_of_adapters_moves_the_queue() -> None:
    health = loaded({"french": {2}})
    router = router_of(health, profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=0)))
    first = await router.reserve(prompt(), request_id="a")
    placed: list[int] = []

    async def send() -> None:
        placed.append((await router.reserve(prompt(first=100), request_id="b")).rank.worker_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        for _ in range(5):
            await checkpoint()
        assert (placed, first.is_live) == ([], True)
        health.publish(adapters={"french": {2, 3}})
    assert placed == [3]
