"""Why nobody can be asked: each reason is an error of its own, and nothing is sent."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from operators import AllBusy, PushRouter
from operators.pool.push_router import RouterMode
from pipeline import CannotConnect, Context, Unavailable, WorkerOverloaded
from pipeline.network import Runtime
from pipeline.rx import BehaviorSubject
from pipeline.testing import ScriptedEngine

from .worlds import NAME, PICKING_MODES, answerer, answering, pool, send_to


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_without_an_instance_there_is_an_error_at_once(mode: RouterMode) -> None:
    with pytest.raises(Unavailable, match=f"no instances found for endpoint {NAME}: none has appeared yet"):
        await PushRouter(pool({}), mode).generate(Context(None))


async def test_the_error_without_an_instance_says_why() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(NAME)
        engine: PushRouter[Any, Any] = PushRouter(workers)
        served = await runtime.serve(NAME, ScriptedEngine([]))
        assert engine.refusal() is None
        await served.close()
        with pytest.raises(Unavailable, match="all there were have left"):
            await engine.generate(Context(None))
        workers.close()
        with pytest.raises(Unavailable, match="its discovery was closed"):
            await engine.generate(Context(None))


async def test_an_instance_that_is_not_admitted_is_never_asked() -> None:
    engines = answering(1, 2, 3)
    engine = PushRouter(pool(engines), admits=lambda instance_id: instance_id == 2)
    assert [await answerer(engine) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(CannotConnect, match="instance_id=1 not found"):
        await send_to(engine, 1)
    with pytest.raises(Unavailable, match="is admitted"):
        await PushRouter(pool(engines), admits=lambda _: False).generate(Context(None))
    assert engines[1].requests == engines[3].requests == []


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_a_busy_instance_is_passed_over(mode: RouterMode) -> None:
    """Peeking included."""
    engine = PushRouter(pool(answering(1, 2)), mode, busy=BehaviorSubject[AbstractSet[int]]({1}))
    assert [engine.select_worker(Context(None), advances=False) for _ in range(6)] == [2] * 6
    assert [await answerer(engine) for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_all_busy_is_not_the_same_as_nobody_there(mode: RouterMode) -> None:
    engines = answering(1, 2)
    engine = PushRouter(pool(engines), mode, busy=BehaviorSubject[AbstractSet[int]]({1, 2, 3}))
    with pytest.raises(AllBusy, match=f"all workers are busy: 2 of endpoint {NAME}") as caught:
        await engine.generate(Context(None))
    assert (caught.value.retry_after_s, caught.value.status) == (None, 529)
    for advances in (True, False):
        with pytest.raises(AllBusy):
            engine.select_worker(Context(None), advances=advances)
    assert engines[1].requests == engines[2].requests == []


async def test_an_instance_may_be_busy_before_it_is_there() -> None:
    """One that is not flagged is free at once."""
    async with Runtime.in_process() as runtime:
        engine: PushRouter[Any, Any] = PushRouter(runtime.workers(NAME), busy=BehaviorSubject[AbstractSet[int]]({7}))
        await runtime.serve(NAME, ScriptedEngine([]), instance_id=7)
        assert isinstance(engine.refusal(), AllBusy)
        await runtime.serve(NAME, ScriptedEngine([]), instance_id=8)
        assert engine.health.view.free == (8,)


async def test_where_requests_name_theirs_only_being_busy_refuses() -> None:
    """An instance that is left out may still be named."""
    engines = {1: ScriptedEngine([], fails=CannotConnect("down")), 2: ScriptedEngine([])}
    busy = BehaviorSubject[AbstractSet[int]]({2})
    engine = PushRouter(pool(engines), "direct", busy=busy)
    with pytest.raises(CannotConnect, match="down"):
        await send_to(engine, 1)
    assert list(engine.health.view.routable) == [2]
    assert engine.refusal() is None
    busy.on_next({1, 2})
    assert isinstance(engine.refusal(), AllBusy)
    busy.on_next({1})
    engines[2]._fails = CannotConnect("down")
    with pytest.raises(CannotConnect, match="down"):
        await send_to(engine, 2)
    busy.on_next({1, 2})
    assert isinstance(engine.refusal(), AllBusy)


async def test_a_busy_instance_is_not_asked_directly() -> None:
    engines = answering(1, 2)
    engine = PushRouter(pool(engines), busy=BehaviorSubject[AbstractSet[int]]({1}))
    with pytest.raises(WorkerOverloaded, match="the selected worker 1"):
        await send_to(engine, 1)
    assert engines[1].requests == []
