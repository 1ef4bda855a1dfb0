"""A prefill worker is chosen once, and what is booked for a prefill is released on every way out."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from operators import KvPrefill, KvPushRouter, PrefillError, PrefillRouter, PushRouter
from operators.kv import KvRouterConfig, PolicyClass, PolicyProfile, kv_router
from operators.prefill import TopologyError
from operators.prefill.task import TRANSITIONS, PrefillEvent, PrefillState
from pipeline import AsyncEngine, Cancelled, Context, Disconnected, Operator, ResponseStream
from pipeline.network import static_workers
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler
from pipeline.testing import ScriptedEngine, Stall

from .worlds import Mode, everywhere, prefill_world, prefilled, present_workers, prompt, tokens

UNREACHABLE = ModelRuntimeConfig(
    topology_domains={"zone": "a"}, kv_transfer_domain="zone", kv_transfer_enforcement="required"
)
"""Settings of a worker 9: with them the way of blocks from any worker without settings is unknown."""


async def test_a_kv_router_decides_once_for_each_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Any] = [{}, everywhere()]
    for configs in cases:
        async with prefill_world(configs=configs) as it:
            steps: list[str] = []
            router = it.kv
            for part, step in ((router, "_select"), (router.loads, "enter")):
                original = getattr(part, step)

                def counted(*args: Any, of: Any = original, step: str = step, steps: Any = steps) -> Any:
                    steps.append(step)
                    return of(*args)

                monkeypatch.setattr(part, step, counted)
            await it.collect()
            assert (steps, len(it.prefills)) == (["_select", "enter"], 1)
            assert len(it.kv.loads) == 0


@pytest.mark.parametrize("mode", ["kv", "round_robin"])
async def test_a_reservation_is_given_back_where_the_plan_fails(mode: Mode) -> None:
    async with prefill_world(mode, configs={9: UNREACHABLE}) as it:
        with pytest.raises(TopologyError):
            await it.collect()
        assert it.prefills == []
        if mode == "kv":
            assert len(it.kv.loads) == 0
        it.health.publish({})
        await it.collect()
        assert mode == "kv" or len(it.engines[1].requests) == 1, "the turn was given back"


class Refusing(Operator[Any, Any, Any, Any]):
    """A stage above the router of the pool that fails, or waits for ever, and never calls the next one."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        if self._waits:
            await anyio.sleep_forever()
        raise Disconnected("not here")


@pytest.mark.parametrize("waits", [False, True])
async def test_a_reservation_that_no_stage_takes_is_given_back(waits: bool) -> None:
    workers = static_workers({1: ScriptedEngine([prefilled()])})
    router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, worker_type="prefill")
    stage = KvPushRouter(router)
    pool = KvPrefill(stage, Refusing(waits) >> stage >> PushRouter(workers))
    async with AnyIOScheduler() as scheduler:
        prefill = PrefillRouter(pool, present_workers(1).views, scheduler=scheduler)
        async with prefill:
            graph = prefill >> ScriptedEngine(tokens(1))
            if waits:
                with anyio.move_on_after(1):
                    await graph.generate(Context(prompt()))
                assert len(router.loads) == 1
            else:
                with pytest.raises(PrefillError, match="not here"):
                    await graph.generate(Context(prompt()))
                assert len(router.loads) == 0
        assert (len(router.loads), prefill.prefills) == (0, 0)


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_prefill_that_waits_for_room_leaves_the_queue_with_its_client(verb: str) -> None:
    engine = ScriptedEngine([Stall()])
    workers = static_workers({1: engine})
    one_prompt = PolicyProfile.single(PolicyClass(prefill_busy_threshold=4))
    router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, profile=one_prompt)
    stage = KvPushRouter(router)
    pool = KvPrefill(stage, stage >> PushRouter(workers))
    decode = ScriptedEngine(tokens(1))
    async with AnyIOScheduler() as scheduler, anyio.create_task_group() as tasks:
        prefill = PrefillRouter(pool, present_workers(1).views, scheduler=scheduler)
        async with prefill:
            graph = prefill >> decode
            tasks.start_soon(graph.generate, Context(prompt()))
            await anyio.sleep(1)
            request = Context(prompt())

            async def leave() -> None:
                await anyio.sleep(1)
                assert (len(router.queue), prefill.prefills) == (1, 2)
                getattr(request, verb)()

            tasks.start_soon(leave)
            with pytest.raises(Cancelled):
                await graph.generate(request)
            assert (len(router.queue), len(router.loads), prefill.prefills) == (0, 1, 1)
            assert (len(engine.requests), decode.requests) == (1, [])
            tasks.cancel_scope.cancel()
    assert len(router.loads) == 0


def test_every_state_of_a_prefill_is_reached_and_its_ends_are_final() -> None:
    reached = {PrefillState.RESERVING} | {state for moves in TRANSITIONS.values() for state in moves.values()}
    assert reached == set(PrefillState)
    assert set(PrefillState) - TRANSITIONS.keys() == {PrefillState.DONE, PrefillState.FAILED, PrefillState.STARVED}
    assert {event for moves in TRANSITIONS.values() for event in moves} == set(PrefillEvent)


def test_a_prefill_can_fail_in_every_state_in_which_it_runs() -> None:
    running = set(PrefillState) - {
        PrefillState.DONE,
        PrefillState.FAILED,
        PrefillState.STARVING,
        PrefillState.STARVED,
    }
    assert {state for state, moves in TRANSITIONS.items() if PrefillEvent.ERROR in moves} == running
