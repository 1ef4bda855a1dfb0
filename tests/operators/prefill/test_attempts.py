"""Retries of a request, and the end of the operator, with prefills under way."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import anyio
import pytest

from operators import Migration, PrefillError, PrefillRouter, PushPrefill, PushRouter
from pipeline import (
    Annotated,
    AsyncEngine,
    CannotConnect,
    Context,
    Disconnected,
    ResponseStream,
    Unavailable,
)
from pipeline.errors import TransferFailed, chain
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import RequestPhase, RoutingHints
from pipeline.rx import AnyIOScheduler
from pipeline.testing import Fail, Faults, ScriptedEngine, Stall, Wait

from .worlds import (
    Mode,
    SlowToAnswer,
    everywhere,
    meeting_at,
    prefill_world,
    prefilled,
    present_workers,
    prompt,
    tokens,
)

ERROR = Disconnected("lost")


# -- retries


@pytest.mark.parametrize("ending", ["refused", "failed", "unread"])
async def test_a_new_attempt_ends_the_prefill_of_the_one_before(ending: str) -> None:
    script = [Wait(60), prefilled()]
    async with prefill_world(script=script, configs=everywhere(), decode=[Fail(ERROR)]) as it:
        request = Context(prompt(tracker=track_request(lambda: 0)), id="r")
        it.decode._fails = ERROR if ending == "refused" else None
        began_s = anyio.current_time()
        for attempt in (1, 2, 3):
            with suppress(Disconnected):
                async with await it.graph.generate(request.child(request.payload)) as stream:
                    if ending != "unread":
                        await stream.__anext__()
            assert (len(it.prefills), it.router.prefills) == (attempt, 1)
        assert [prefill.is_stopped for prefill in it.prefills].count(True) == 2
        assert not any(prefill.is_killed for prefill in it.prefills)
        assert anyio.current_time() == began_s
        await anyio.sleep(61)
        it.assert_idle()


async def test_an_attempt_that_was_cancelled_is_replaced_once_decode_has_the_request() -> None:
    script = [Wait(60), prefilled()]
    async with prefill_world("round_robin", script, configs=everywhere()) as it:
        request = Context(prompt(tracker=track_request(lambda: 0)))
        it.put_in_front(SlowToAnswer)
        with anyio.move_on_after(1):
            await it.graph.generate(request.child(request.payload))
        await anyio.sleep(5)
        assert ([prefill.is_stopped for prefill in it.prefills], len(it.decodes)) == ([False], 1)
        await (await it.graph.generate(request.child(request.payload))).collect()
        assert [prefill.is_stopped for prefill in it.prefills] == [True, False]
        await anyio.sleep(70)


async def test_a_prefill_that_ignores_a_stop_is_killed() -> None:
    below = ScriptedEngine([prefilled()])
    workers = static_workers({1: Faults(stall_after=0) >> below})
    health = present_workers(1, configs={1: meeting_at()})
    side = PushPrefill(PushRouter(workers))
    async with AnyIOScheduler() as scheduler:
        router = PrefillRouter(side, health.views, scheduler=scheduler)
        graph, request = router >> ScriptedEngine(tokens(1)), Context(prompt())
        for expected_s in (0, 1):
            began_s = anyio.current_time()
            await (await graph.generate(request.child(request.payload))).collect()
            assert anyio.current_time() - began_s == pytest.approx(expected_s)
        assert [sent.is_killed for sent in below.requests] == [True, False]
        assert router.prefills == 1


async def test_siblings_of_one_request_do_not_end_each_other() -> None:
    decode = [*tokens(1), Stall()]
    script = [Wait(60), prefilled()]
    async with prefill_world("round_robin", script, configs=everywhere(), decode=decode) as it:
        request = Context(prompt())
        one, other = [await it.graph.generate(request.child(request.payload)) for _ in range(2)]
        async with one, other:
            await one.__anext__()
            await other.__anext__()
            assert [prefill.is_stopped for prefill in it.prefills] == [False, False]
        await anyio.sleep(61)


async def test_another_request_of_the_same_id_ends_nothing() -> None:
    configs = everywhere()
    async with prefill_world("round_robin", [Wait(60), prefilled()], configs=configs) as it:
        await it.collect(id="r")
        await it.collect(id="r")
        assert it.router.prefills == 2
        assert not any(prefill.is_stopped for prefill in it.prefills)
        await anyio.sleep(61)


# -- its end


async def test_its_end_waits_for_prefills_then_cuts_them() -> None:
    configs = everywhere()
    for wait_s, delivered in ((3, 1), (30, 0)):
        async with prefill_world(script=[Wait(wait_s), prefilled()], configs=configs, drain_timeout_s=5) as it:
            await it.collect()
            began_s = anyio.current_time()
        assert anyio.current_time() - began_s == pytest.approx(min(wait_s, 5))
        assert sum(engine.delivered for engine in it.engines.values()) == delivered
        it.assert_idle()
        assert not it.health.views.observers


async def test_a_request_that_waits_at_its_end_gets_an_error() -> None:
    async with anyio.create_task_group() as tasks:
        async with prefill_world(script=[Stall()], drain_timeout_s=5) as it:

            async def gets_error() -> None:
                with pytest.raises(PrefillError, match="given up"):
                    await it.collect()

            tasks.start_soon(gets_error)
            await anyio.sleep(1)
        it.assert_idle()


async def test_a_scheduler_that_ends_too_holds_up_nothing() -> None:
    """A prefill that was dispatched in the very turn all was cancelled never starts, and nothing waits for it."""
    tracker = track_request(lambda: 0)
    cases: list[Any] = [{}, everywhere()]
    for configs in cases:
        opened: list[Any] = []
        with anyio.CancelScope() as everything, anyio.fail_after(60):
            async with prefill_world("round_robin", configs=configs) as it:
                opened.append(it)
                assert isinstance(it.pool, PushPrefill)
                router: Any = it.pool.router
                select = router.select_worker

                def cancel(request: Any, select: Any = select, scope: Any = everything, **options: Any) -> Any:
                    scope.cancel()
                    return select(request, **options)

                router.select_worker = cancel
                await it.collect(prompt(tracker=tracker))
        assert everything.cancelled_caught
        opened[0].assert_idle()
        (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


async def test_behind_its_end_nothing_begins() -> None:
    """Not even for a request that came before and waited for its phase."""
    tracker = track_request(lambda: 0)
    engine = ScriptedEngine([prefilled()])
    async with AnyIOScheduler() as scheduler, anyio.create_task_group() as tasks:
        side = PushPrefill(PushRouter(static_workers({1: engine})))
        async with PrefillRouter(side, present_workers(1).views, scheduler=scheduler) as router:
            held = await tracker.set_phase(RequestPhase.AGGREGATED)

            async def refused() -> None:
                with pytest.raises(Unavailable, match="closed"):
                    await (router >> ScriptedEngine([])).generate(Context(prompt(tracker=tracker)))

            tasks.start_soon(refused)
            await anyio.sleep(1)
        held.release()
        await anyio.sleep(1)
        assert (engine.requests, router.prefills) == ([], 0)
    (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


# -- below Migration


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("mode", ["kv", "round_robin"])
async def test_a_decode_that_breaks_goes_on_with_a_prefill_of_its_own(mode: Mode, meets: bool) -> None:
    script = [Wait(60), prefilled()]
    configs = everywhere() if meets else {}
    async with prefill_world(mode, script, configs=configs) as it:
        graph = Migration(2) >> it.router >> Faults(disconnect_after=1, times=1) >> it.decode
        request = prompt(tracker=track_request(lambda: 0))
        items = await (await graph.generate(Context(request))).collect()
        assert [item.data and item.data.token_ids for item in items] == [[0]] * 4
        prompts = sorted(len(prefill.payload.token_ids) for prefill in it.prefills)
        assert prompts == [8, 9]
        assert [len(decode.payload.token_ids) for decode in it.decodes] == [8, 9]
        assert it.router.prefills == (1 if meets else 0)
        await anyio.sleep(61)
        it.assert_idle()


@pytest.mark.parametrize("mode", ["kv", "round_robin"])
async def test_a_request_whose_only_prefill_worker_is_lost_is_computed_where_it_decodes(mode: Mode) -> None:
    async with prefill_world(mode, workers=(1,)) as it:
        it.engines[1]._fails = ERROR
        request = prompt(tracker=(tracker := track_request(lambda: 0)))
        items = await (await (Migration(2) >> it.graph).generate(Context(request))).collect()
        assert (len(items), len(it.prefills), len(it.decodes)) == (3, 1, 1)
        assert it.decodes[0].payload.prefill_result is None
        assert tracker.phase is RequestPhase.AGGREGATED
        it.assert_idle()


@pytest.mark.parametrize("mode", ["kv", "round_robin"])
@pytest.mark.parametrize("how", ["enforced", "pinned"])
async def test_such_a_request_fails_where_it_may_not(how: str, mode: Mode) -> None:
    pin = RoutingHints(prefill_worker_id=1) if how == "pinned" else None
    async with prefill_world(mode, workers=(1,), enforce_disagg=how == "enforced") as it:
        it.engines[1]._fails = ERROR
        with pytest.raises(PrefillError):
            await (Migration(2) >> it.graph).generate(Context(prompt(routing=pin)))
        assert it.decodes == []
        it.assert_idle()


async def test_while_the_only_prefill_worker_cools_down_prompts_are_computed_where_they_decode() -> None:
    async with prefill_world("round_robin", workers=(1,)) as it:
        it.engines[1]._fails = CannotConnect("gone")
        with pytest.raises(PrefillError):
            await it.collect()
        it.engines[1]._fails = None
        assert (len(await it.collect()), len(it.prefills)) == (3, 1)
        await anyio.sleep(6)
        assert (len(await it.collect()), len(it.prefills)) == (3, 2)
        it.assert_idle()


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("workers", [(1,), (1, 2)])
async def test_a_failed_transfer_is_not_held_against_decode_and_not_repeated(
    workers: tuple[int, ...], in_stream: bool
) -> None:
    script = [Annotated[Any].from_error(TransferFailed("none came"))] if in_stream else [Fail(TransferFailed("none"))]
    decode = ScriptedEngine(script)
    async with prefill_world("round_robin", workers=workers) as it:
        found: list[bool] = []

        class Decodes(AsyncEngine[Any, Any]):
            """Fails with blocks of worker 1, and goes on without, or with others'."""

            async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
                has_blocks = request.payload.prefill_result is not None
                found.append(has_blocks)
                fails = has_blocks and request.payload.routing.prefill_worker_id == 1
                return await (decode if fails else it.decode).generate(request)

        push = PushRouter(static_workers({11: Decodes()}), rng=Random(1))
        graph = Migration(2) >> it.router >> push
        for _ in range(2):  # whichever prefill worker has the turn
            assert len(await (await graph.generate(Context(prompt()))).collect()) == 3
        assert found.count(True) == len(decode.requests) + (1 if len(workers) > 1 else 0) * 2
        assert found.count(False) == (2 if workers == (1,) else 0)
        assert decode.requests
        it.assert_idle()


async def test_a_failed_transfer_between_the_only_two_is_the_callers_where_both_are_needed() -> None:
    decode = ScriptedEngine([Fail(TransferFailed("none came"))])
    async with prefill_world("round_robin", workers=(1,), enforce_disagg=True) as it:
        graph = Migration(2) >> it.router >> PushRouter(static_workers({11: decode}))
        with pytest.raises(TransferFailed, match="none came") as caught:
            await (await graph.generate(Context(prompt()))).collect()
        assert "this request has failed on 1" in " ".join(map(str, chain(caught.value)))
        assert (len(it.prefills), len(decode.requests)) == (1, 1)
        it.assert_idle()


async def test_a_failed_transfer_is_tried_with_another_decode_worker_first() -> None:
    broken, good = ScriptedEngine([Fail(TransferFailed("none came"))]), ScriptedEngine(tokens(1, 1))
    async with prefill_world("round_robin", workers=(1,), enforce_disagg=True) as it:
        graph = Migration(2) >> it.router >> PushRouter(static_workers({11: broken, 12: good}))
        for _ in range(2):
            assert len(await (await graph.generate(Context(prompt()))).collect()) == 2
        assert (len(it.prefills), len(broken.requests), len(good.requests)) == (4, 2, 2)
        it.assert_idle()


async def test_a_prefill_worker_that_is_lost_is_replaced() -> None:
    async with prefill_world("round_robin") as it:
        it.engines[1]._fails = ERROR
        items = await (await (Migration(2) >> it.graph).generate(Context(prompt()))).collect()
        assert len(items) == 3
        lost, *others = (len(engine.requests) for engine in it.engines.values())
        assert (lost, sum(others)) == (1, 1)
