"""What is refused before anything is sent, and what a prefill meets after that."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from typing import Any

import anyio
import pytest

from operators import AllBusy, KvPrefill, KvPushRouter, PrefillError, PrefillRouter, PushPrefill, PushRouter
from operators.kv import (
    KvRouterConfig,
    PolicyClass,
    PolicyProfile,
    QueueRejected,
    kv_router,
)
from operators.kv.queue import DepthTier
from operators.prefill import NoDisaggregatedParams, TopologyError
from operators.prefill.pool import PrefillWorker
from pipeline import (
    Annotated,
    BackendError,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    WorkerOverloaded,
)
from pipeline.errors import BackendDisconnected, may_migrate
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import (
    LLMEngineOutput,
    PhasePermit,
    RequestPhase,
    RequestTracker,
)
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler, BehaviorSubject
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait

from .worlds import everywhere, prefill_world, prefilled, present_workers, prompt, tokens

# -- refusals


async def test_backpressure_sends_nothing_in_a_kv_pool() -> None:
    workers = static_workers({1: ScriptedEngine([Stall()])})
    kv = kv_router(
        workers,
        KvRouterConfig(use_kv_events=False),
        block_size_tokens=4,
        profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=4)),
        tiers=[DepthTier(0, 1)],
    )
    decode = ScriptedEngine(tokens(1))
    async with AnyIOScheduler() as scheduler:
        stage = KvPushRouter(kv)
        side = KvPrefill(stage, stage >> PushRouter(workers))
        async with PrefillRouter(side, present_workers(1).views, scheduler=scheduler) as router:
            graph = router >> decode
            async with anyio.create_task_group() as tasks:
                for _ in range(2):  # one runs, one waits
                    tasks.start_soon(graph.generate, Context(prompt()))
                    await anyio.sleep(1)
                with pytest.raises(ResourceExhausted, match=r"^router backpressure during prefill resolve") as caught:
                    await graph.generate(Context(prompt()))
                assert "(queued_isl_tokens=8, max_queued_isl_tokens=1)" in caught.value.message
                assert isinstance(caught.value.__cause__, QueueRejected)
                assert decode.requests == []
                tasks.cancel_scope.cancel()


async def test_backpressure_sends_nothing_in_a_plain_pool() -> None:
    workers = static_workers({1: (prefill := ScriptedEngine([prefilled()]))})
    side = PushPrefill(PushRouter(workers, busy=BehaviorSubject[AbstractSet[int]]({1})))
    decode = ScriptedEngine(tokens(1))
    async with (
        AnyIOScheduler() as scheduler,
        PrefillRouter(side, present_workers(1).views, scheduler=scheduler) as router,
    ):
        with pytest.raises(AllBusy, match=r"^router backpressure during prefill resolve: all workers are busy"):
            await (router >> decode).generate(Context(prompt()))
        with pytest.raises(AllBusy, match="router backpressure"):
            router.query_prefill_worker(Context(prompt()))
    assert (prefill.requests, decode.requests) == ([], [])


async def test_only_so_many_prefills_run_at_once() -> None:
    async with prefill_world(script=[Wait(5), prefilled()], configs=everywhere(), prefills_max=2) as it:
        await it.collect()
        await it.collect()
        with pytest.raises(ResourceExhausted, match="2 prefills are under way"):
            await it.collect()
        assert (len(it.prefills), len(it.decodes)) == (2, 2)
        await anyio.sleep(6)
        await it.collect()


async def test_a_request_that_was_stopped_before_is_not_prefilled() -> None:
    request = Context(prompt())
    request.stop()
    async with prefill_world() as it:
        with pytest.raises(Cancelled):
            await it.graph.generate(request)
        assert (it.prefills, it.decodes) == ([], [])


# -- topology


ZONE: dict[str, Any] = {"topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone"}


async def test_decode_is_kept_to_the_domain_of_the_prefill_worker() -> None:
    configs = {i: ModelRuntimeConfig(**ZONE, kv_transfer_enforcement="required") for i in (1, 2, 3)}
    async with prefill_world("round_robin", configs=configs) as it:
        await it.collect()
        assert it.decodes[0].payload.routing.routing_constraints.required_taints == {"dynamo.topology/zone=a"}
        assert it.prefills[0].payload.routing.routing_constraints is None


async def test_a_missing_topology_fails_before_any_work() -> None:
    required = ModelRuntimeConfig(**ZONE, kv_transfer_enforcement="required")
    async with prefill_world("round_robin", configs={9: required}) as it:
        for _ in range(2):
            with pytest.raises(TopologyError):
                await it.collect()
        assert (it.prefills, it.decodes, it.router.prefills) == ([], [], 0)
        it.health.publish({})
        await it.collect()
        assert it.router.query_prefill_worker(Context(prompt())) == PrefillWorker(2)


async def test_preferences_alone_let_an_unknown_worker_prefill() -> None:
    preferred = ModelRuntimeConfig(**ZONE, kv_transfer_enforcement="preferred", kv_transfer_preferred_weight=0.5)
    async with prefill_world("round_robin", configs={9: preferred}) as it:
        await it.collect()
        assert it.decodes[0].payload.routing.routing_constraints is None


# -- what goes wrong

ERROR = Disconnected("lost")


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ([], PrefillError, "no output"),
        ([Annotated[Any].from_error(ERROR)], PrefillError, "error in output: lost"),
        ([Annotated(LLMEngineOutput.error("broken"))], PrefillError, "error in output: error: broken"),
        ([Annotated(LLMEngineOutput.cancelled())], PrefillError, "error in output: cancelled"),
        ([Annotated(None)], NoDisaggregatedParams, "no data field"),
        ([Annotated(LLMEngineOutput([1]))], NoDisaggregatedParams, "missing disaggregated_params"),
        ([Fail(ERROR)], PrefillError, "stream broke: lost"),
        (["ok", Fail(ERROR)], PrefillError, "stream broke: lost"),
        (["ok", Annotated[Any].from_error(ERROR)], PrefillError, "error in output: lost"),
    ],
)
async def test_what_a_prefill_meets_goes_to_the_caller(script: Any, error: type[Exception], text: str) -> None:
    tracker = track_request(lambda: 0)
    async with prefill_world(script=[prefilled() if step == "ok" else step for step in script]) as it:
        with pytest.raises(error, match=text) as caught:
            await it.collect(prompt(tracker=tracker))
        assert type(caught.value) is error
        assert (len(it.prefills), it.decodes) == (1, [])
        it.assert_idle()
        good = "ok" in script or error is NoDisaggregatedParams
        assert (tracker.prefill_complete is not None) == good
        (await tracker.set_phase(RequestPhase.DECODE)).release()


@pytest.mark.parametrize("meets", [False, True])
async def test_a_prefill_that_reaches_no_worker_fails_before_decode(meets: bool) -> None:
    configs = everywhere() if meets else {}
    async with prefill_world("round_robin", configs=configs) as it:
        for engine in it.engines.values():
            engine._fails = CannotConnect("not now")
        with pytest.raises(PrefillError, match="failed to route to prefill worker: not now") as caught:
            await it.collect()
        assert isinstance(caught.value.__cause__, CannotConnect)
        assert it.decodes == []
        it.assert_idle()


@pytest.mark.parametrize("step", [Fail(ERROR), Annotated[Any].from_error(ERROR), Annotated(LLMEngineOutput([1]))])
async def test_a_background_error_is_a_warning_for_decode_that_goes_on(
    step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    configs = everywhere()
    for wait in ([], [Wait(1)]):
        async with prefill_world(
            script=[*wait, step], configs=configs, decode=[*tokens(1), Wait(3), *tokens(1, 1)]
        ) as it:
            assert len(await it.collect()) == 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "failed behind decode's back" in caplog.text
        caplog.clear()


async def test_decode_that_waits_in_vain_ends_with_the_prefills_error() -> None:
    configs = everywhere()
    script = [Wait(10), Fail(ERROR)]
    async with prefill_world(script=script, configs=configs, decode=[Stall()], decode_patience_s=2) as it:
        began_s = anyio.current_time()
        with pytest.raises(PrefillError, match="stream broke: lost"):
            await it.collect()
        assert anyio.current_time() - began_s == pytest.approx(12)
        it.assert_idle()


async def test_decode_that_shows_an_item_in_time_goes_on() -> None:
    configs = everywhere()
    decode = [Wait(1.5), *tokens(1), Wait(9), *tokens(1)]
    async with prefill_world(script=[Fail(ERROR)], configs=configs, decode=decode, decode_patience_s=2) as it:
        assert len(await it.collect()) == 2
        it.assert_idle()


class LateToDecode(RequestTracker):
    """Its phase Decode takes five seconds to come."""

    async def set_phase(self, phase: RequestPhase) -> PhasePermit:
        if phase is RequestPhase.DECODE:
            await anyio.sleep(5)
        return await super().set_phase(phase)


async def test_decode_that_begins_when_the_timeout_is_over_ends_too() -> None:
    configs = everywhere()
    tracker = LateToDecode(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
    async with prefill_world(script=[Fail(ERROR)], configs=configs, decode=[Stall()], decode_patience_s=2) as it:
        with anyio.fail_after(60), pytest.raises(PrefillError, match="stream broke: lost"):
            await it.collect(prompt(tracker=tracker))
        it.assert_idle()


async def test_an_event_of_a_router_is_no_item_of_decode() -> None:
    configs = everywhere()
    decode = [Annotated[Any].from_annotation("router_decision", {}), Stall()]
    async with prefill_world(script=[Fail(ERROR)], configs=configs, decode=decode, decode_patience_s=2) as it:
        with pytest.raises(PrefillError, match="stream broke: lost"):
            await it.collect()
        it.assert_idle()


@pytest.mark.parametrize("wait_s", [2, 20])
async def test_decode_may_take_its_time_behind_a_prefill_that_failed(wait_s: float) -> None:
    decode = [Wait(wait_s), *tokens(1, 1)]
    async with prefill_world(script=[Fail(ERROR)], configs=everywhere(), decode=decode) as it:
        assert len(await it.collect()) == 2
        await anyio.sleep(1)
        it.assert_idle()


@pytest.mark.parametrize("error", [ResourceExhausted("full"), WorkerOverloaded("busy")])
async def test_a_worker_that_refuses_the_prefill_is_no_backpressure_of_the_router(error: Exception) -> None:
    async with prefill_world("round_robin") as it:
        for engine in it.engines.values():
            engine._fails = error
        with pytest.raises(PrefillError, match="failed to route to prefill worker") as caught:
            await it.collect()
        assert caught.value.facts == error.facts  # type: ignore[attr-defined]
        assert it.decodes == []


async def test_blocks_that_may_be_on_their_way_are_waited_for() -> None:
    configs = everywhere()
    script = [prefilled(), Wait(1), Fail(ERROR)]
    async with prefill_world(script=script, configs=configs, decode=[Wait(60), *tokens(1)]) as it:
        assert len(await it.collect()) == 1
        it.assert_idle()


@pytest.mark.parametrize("meets", [False, True])
async def test_a_prefill_that_hangs_is_ended_by_its_time_limit(meets: bool) -> None:
    configs = everywhere() if meets else {}
    async with prefill_world(script=[Stall()], configs=configs, decode=[Stall()], prefill_timeout_s=30) as it:
        with pytest.raises(PrefillError, match="took too long"):
            await it.collect()
        it.assert_idle()


async def test_what_decode_raises_goes_to_the_caller() -> None:
    error = BackendError("no")
    cases: list[Any] = [{}, everywhere()]
    for configs in cases:
        async with prefill_world(configs=configs, decode=[*tokens(1), Fail(error)]) as it:
            with pytest.raises(BackendError) as caught:
                await it.collect()
            assert caught.value is error
            it.decode._fails = error
            with pytest.raises(BackendError) as caught:
                await it.collect()
            assert caught.value is error


# -- whose fault it is


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("prefill_s", "decode_s"), [(1.0, 1.0), (1.0, 0.7), (1.0, 1.3)])
async def test_decode_that_fails_for_want_of_blocks_ends_with_the_prefills_error(
    prefill_s: float, decode_s: float, raises: bool
) -> None:
    """Whichever of the two is known first. The prefill's error may be one after which the request moves on."""
    lost = BackendDisconnected("the source left")
    step = Fail(lost) if raises else Annotated[Any].from_error(lost)
    script = [Wait(prefill_s), Fail(ERROR)]
    async with prefill_world(script=script, configs=everywhere(), decode=[Wait(decode_s), step]) as it:
        began_s = anyio.current_time()
        with pytest.raises(PrefillError, match="stream broke: lost") as caught:
            await it.collect()
        assert may_migrate(caught.value)
        assert anyio.current_time() - began_s == pytest.approx(max(prefill_s, decode_s))
        await anyio.sleep(0.1)
        it.assert_idle()


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (BackendError("mine"), 2.0),  # it might have been for want of blocks, so the prefill had its time to fail
        (Disconnected("decode lost"), 0.5),
        (InvalidArgument("wrong"), 0.5),
        (Unavailable("nobody"), 0.5),
    ],
)
async def test_decode_that_fails_of_itself_ends_with_its_own_error(error: PenstockError, after_s: float) -> None:
    script = [Wait(30), prefilled()]
    decode = [Wait(0.5), Annotated[Any].from_error(error)]
    async with prefill_world(script=script, configs=everywhere(), decode=decode, decode_patience_s=1.5) as it:
        began_s = anyio.current_time()
        items = await it.collect()
        assert [item.extract_error() for item in items] == [error]
        assert anyio.current_time() - began_s == pytest.approx(after_s)
        await anyio.sleep(60)
        it.assert_idle()


@pytest.mark.parametrize("raises", [False, True])
async def test_a_request_stopped_while_its_error_waits_for_the_prefills_ends_with_decodes_own(raises: bool) -> None:
    """There is no client any more for whom a migration could help."""
    lost = BackendDisconnected("the source left")
    step = Fail(lost) if raises else Annotated[Any].from_error(lost)
    script = [Wait(1), Fail(ERROR)]
    async with prefill_world(script=script, configs=everywhere(), decode=[Wait(0.5), step]) as it:
        request = Context(prompt())
        stream = await it.graph.generate(request)
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await anyio.sleep(0.7)
                request.stop()

            tasks.start_soon(stop)
            if raises:
                with pytest.raises(BackendDisconnected) as caught:
                    await stream.collect()
                assert caught.value is lost
            else:
                assert [item.extract_error() for item in await stream.collect()] == [lost]
        await anyio.sleep(1)
        it.assert_idle()


async def test_an_error_behind_the_first_item_is_decodes_own() -> None:
    error = BackendError("mine")
    decode = [*tokens(1), Wait(2), Fail(error)]
    async with prefill_world(script=[Wait(1), Fail(ERROR)], configs=everywhere(), decode=decode) as it:
        with pytest.raises(BackendError) as caught:
            await it.collect()
        assert caught.value is error
        it.assert_idle()
