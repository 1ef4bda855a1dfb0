"""PushRouter: which instance is asked, and what happens when there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from operators import PushRouter, RoundRobin, random_pick
from operators.push_router import Picker, RouterMode
from pipeline import (
    Annotated,
    AsyncEngine,
    CannotConnect,
    Context,
    GraphError,
    InvalidArgument,
    Unavailable,
    identity,
)
from pipeline.network import Runtime, Workers, static_workers
from pipeline.protocols import PreprocessedRequest, RoutingHints
from pipeline.rx import Observable
from pipeline.testing import ScriptedEngine, check_engine, watch_streams

pytestmark = pytest.mark.anyio

NAME = "ns/comp/ep"


Engine = AsyncEngine[Any, Any]


def answering(*instance_ids: int) -> dict[int, ScriptedEngine]:
    """Instances that answer with their own id."""
    return {instance_id: ScriptedEngine([Annotated(instance_id)]) for instance_id in instance_ids}


def pool(engines: Mapping[int, Engine]) -> Workers[Any, Any]:
    return static_workers(engines, name=NAME)


def router(
    *instance_ids: int, mode: RouterMode | Picker = "round_robin", rng: Random | None = None
) -> PushRouter[Any, Any]:
    return PushRouter(pool(answering(*instance_ids)), mode, rng)


class ShrinkingPool:
    """A pool in which the instances that are `leaving` are gone by the time they are asked."""

    def __init__(self, instance_ids: Sequence[int], leaving: Sequence[int]) -> None:
        self.name = NAME
        self.engines = answering(*instance_ids)
        self.leaving = leaving
        self._pool = pool(self.engines)

    def instance_ids(self) -> tuple[int, ...]:
        return tuple(self.engines)

    def engine(self, instance_id: int) -> Engine:
        if instance_id in self.leaving:
            del self.engines[instance_id]
            return static_workers({}, name=NAME).engine(instance_id)
        return self.engines[instance_id]

    def changes(self) -> Observable[tuple[int, ...]]:
        return self._pool.changes()

    async def wait_for_instances(self, count: int = 1) -> tuple[int, ...]:
        return await self._pool.wait_for_instances(count)


async def ask(engine: AsyncEngine[Any, Any], payload: object = None) -> Any:
    """The id of the instance that answered."""
    with watch_streams() as streams:
        (item,) = await (await engine.generate(Context(payload))).collect()
    assert streams.open == []
    return item.data


def test_round_robin_peeks_without_moving() -> None:
    """RT-01."""
    picker, ids = RoundRobin(), [10, 20, 30, 40]
    assert {picker.peek(ids) for _ in range(16)} == {10}
    assert [picker(ids) for _ in range(5)] == [10, 20, 30, 40, 10]


def test_a_random_pick_repeats_with_its_seed_and_reaches_all() -> None:
    draws = [[random_pick(Random(seed))([1, 2, 3]) for seed in range(50)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {1, 2, 3}


async def test_round_robin_asks_one_after_the_other() -> None:
    engine = router(1, 2, 3)
    assert [await ask(engine) for _ in range(4)] == [1, 2, 3, 1]


async def test_random_asks_as_its_rng_says() -> None:
    engine, expected = router(1, 2, 3, mode="random", rng=Random(7)), Random(7)
    assert [await ask(engine) for _ in range(40)] == [expected.choice([1, 2, 3]) for _ in range(40)]
    assert await ask(router(1, 2, 3, mode="random")) in {1, 2, 3}


async def test_a_picker_of_ones_own_decides() -> None:
    assert await ask(router(1, 2, 3, mode=max)) == 3


def test_an_unknown_mode_is_refused_at_declaration() -> None:
    unknown: Any = "least_loaded"
    with pytest.raises(GraphError, match="round_robin, random, direct"):
        router(1, mode=unknown)


@pytest.mark.parametrize("mode", ["round_robin", "random"])
async def test_without_an_instance_there_is_an_error_at_once(mode: RouterMode) -> None:
    """RT-13."""
    with pytest.raises(Unavailable, match=NAME):
        await router(mode=mode).generate(Context(None))


async def test_a_request_names_its_instance_in_direct_mode() -> None:
    request = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=2))
    assert await ask(router(1, 2, 3, mode="direct"), request) == 2


@pytest.mark.parametrize("payload", [None, PreprocessedRequest([1]), PreprocessedRequest([1], routing=RoutingHints())])
async def test_a_request_that_names_none_is_refused_in_direct_mode(payload: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await router(1, mode="direct").generate(Context(payload))
    assert caught.value.field == "routing.backend_instance_id"


async def test_an_unknown_instance_is_named_and_no_other_one_is_asked() -> None:
    """RT-20."""
    engines = answering(1)
    with pytest.raises(CannotConnect, match=f"instance_id=9 not found for endpoint {NAME}"):
        await PushRouter(pool(engines)).direct(Context(None), 9)
    request = PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=9))
    with pytest.raises(CannotConnect, match="instance_id=9 not found"):
        await PushRouter(pool(engines), "direct").generate(Context(request))
    assert engines[1].requests == []


async def test_any_instance_can_be_asked_directly_in_every_mode() -> None:
    stream = await router(1, 2).direct(Context(None), 2)
    assert [item.data for item in await stream.collect()] == [2]


async def test_an_instance_that_vanishes_before_the_dispatch_is_replaced() -> None:
    """RT-23."""
    assert await ask(PushRouter(ShrinkingPool([1, 2, 3], leaving=[1]), min)) == 2


async def test_the_last_instance_that_vanishes_is_no_connection_trouble() -> None:
    """RT-22."""
    with pytest.raises(Unavailable, match=r"instance_id=1 not found .*no other instances available"):
        await PushRouter(ShrinkingPool([1], leaving=[1])).generate(Context(None))


async def test_only_one_other_instance_is_tried() -> None:
    with pytest.raises(CannotConnect, match="instance_id=2 not found"):
        await PushRouter(ShrinkingPool([1, 2, 3], leaving=[1, 2]), min).generate(Context(None))


async def test_what_an_instance_cannot_reach_itself_goes_to_the_caller() -> None:
    engines = {**answering(2), 1: ScriptedEngine([], fails=CannotConnect("its own trouble"))}
    with pytest.raises(CannotConnect, match="its own trouble"):
        await PushRouter(pool(engines)).generate(Context(None))
    assert engines[2].requests == []


async def test_the_request_and_the_stream_are_handed_on_as_they_are() -> None:
    engines = answering(1)
    context = Context("payload")
    async with await PushRouter(pool(engines)).generate(context) as stream:
        assert engines[1].requests == [context]
        assert stream.context is context


def test_a_drawing_shows_the_instances() -> None:
    graph = identity() >> router(1, 2)
    assert all(f"{NAME}/{i}" in graph.draw("text") for i in (1, 2))


async def test_a_pool_that_follows_discovery_is_followed() -> None:
    async with Runtime.in_process() as runtime:
        workers: Workers[Any, Any] = runtime.workers(NAME)
        engine = PushRouter(workers)
        first = await runtime.serve(NAME, ScriptedEngine([Annotated("first")]), instance_id=1)
        await runtime.serve(NAME, ScriptedEngine([Annotated("second")]), instance_id=2)
        await workers.wait_for_instances(2)
        assert [await ask(engine) for _ in range(2)] == ["first", "second"]
        await first.close()
        assert {await ask(engine) for _ in range(3)} == {"second"}


@pytest.mark.parametrize("mode", ["round_robin", "random"])
async def test_the_engine_contract_holds(mode: RouterMode) -> None:
    talkative = pool({i: ScriptedEngine([Annotated(n) for n in range(60)]) for i in (1, 2)})
    await check_engine(lambda: PushRouter(talkative, mode), request=None)
    await check_engine(lambda: router(mode=mode), request=None, bad_request="anything", rules=["E2"])
