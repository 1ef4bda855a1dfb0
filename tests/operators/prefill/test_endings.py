"""Stop, kill, close, drop and a cancelled task, at each point of a hand-over, and the operator contract."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators import KvPushRouter, PrefillError, PrefillRouter, PushPrefill, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline import Annotated, Cancelled, Context, PenstockError
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import PreprocessedRequest, RequestPhase, RoutingHints
from pipeline.rx import AnyIOScheduler
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait, check_operator

from .worlds import Mode, SlowToAnswer, everywhere, prefill_world, prefilled, present_workers, prompt, tokens


@pytest.mark.parametrize("meets", [False, True])
async def test_the_operator_contract(meets: bool) -> None:
    async with AnyIOScheduler() as scheduler:

        def router() -> PrefillRouter:
            workers = static_workers({1: ScriptedEngine([prefilled()])})
            side = PushPrefill(PushRouter(workers))
            health = present_workers(1, configs=everywhere() if meets else {})
            return PrefillRouter(side, health.views, scheduler=scheduler)

        wrong = prompt(routing=RoutingHints(prefill_worker_id=9))
        await check_operator(router, request=prompt(), items=tokens(*[1] * 40), bad_request=wrong)


@pytest.mark.parametrize("enforced", [False, True])
async def test_the_operator_contract_without_prefill(enforced: bool) -> None:
    async with AnyIOScheduler() as scheduler:
        await check_operator(
            lambda: PrefillRouter(None, scheduler=scheduler), request=prompt(), items=tokens(*[1] * 40)
        )


# -- kill and stop


@pytest.mark.parametrize("verb", ["stop", "kill"])
@pytest.mark.parametrize("meets", [False, True])
async def test_decode_gets_the_request_whatever_the_client_did_meanwhile(
    verb: str, meets: bool, open_streams: OpenStreams
) -> None:
    """The blocks need a worker that takes them; decode gets the client's own request, ended as it is"""
    tracker = track_request(lambda: 0)
    request = Context(prompt(tracker=tracker))
    configs = everywhere() if meets else {}
    async with prefill_world(script=[Wait(2), prefilled()], configs=configs) as it:
        if meets:  # decode waits for the phase, with the prefill dispatched
            it.put_in_front(SlowToAnswer)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, it.graph, request)
            await anyio.sleep(1)
            assert (len(it.decodes), it.router.prefills) == (0, 1)
            getattr(request, verb)()
        await anyio.sleep(5)
        ((prefill,), (decode,)) = (it.prefills, it.decodes)
        assert (decode.is_stopped, decode.is_killed, prefill.is_stopped) == (True, verb == "kill", False)
        assert meets or decode.control is request.control
        assert (decode.payload.bootstrap_info is not None) == meets
        it.assert_idle()
        await expect_free(tracker)


async def read(graph: Any, request: Any) -> None:
    assert len(await (await graph.generate(request)).collect()) < 3


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_kv_router_below_sends_decode_of_an_ended_request_too(verb: str) -> None:
    engine = ScriptedEngine(tokens(1))
    pool = static_workers({5: engine})
    kv = kv_router(pool, KvRouterConfig(use_kv_events=False), block_size_tokens=4, worker_type="decode")
    request = Context(prompt())
    async with prefill_world(script=[Wait(2), prefilled()]) as it:
        graph = it.router >> KvPushRouter(kv) >> PushRouter(pool)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, graph, request)
            await anyio.sleep(1)
            getattr(request, verb)()
        assert [attempt.is_stopped for attempt in engine.requests] == [True]
        assert [load.decode_blocks for load in kv.loads.sequences.loads(kv.loads.clock())] == [0]


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_request_that_is_stopped_when_decode_is_due_is_still_decodes_business(
    verb: str, open_streams: OpenStreams
) -> None:
    clients: list[Context[Any]] = []
    cases: list[Any] = [{}, everywhere()]

    class Stopping(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            getattr(clients[-1], verb)()
            return await super().generate(request)

    for configs in cases:
        below = Stopping(tokens(1))

        def in_place_of_decode(_: object, below: Stopping = below) -> Stopping:
            return below

        async with prefill_world(configs=configs, below=in_place_of_decode) as it:
            clients.append(Context(prompt()))
            assert await (await it.graph.generate(clients[-1])).collect() == []
            assert [attempt.is_killed for attempt in below.requests] == [verb == "kill"]


async def expect_free(tracker: Any) -> None:
    """No phase is held."""
    with anyio.fail_after(1):
        (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_stop_or_kill_during_decode_leaves_the_prefill_alone(verb: str, open_streams: OpenStreams) -> None:
    request = Context(prompt())
    script = [Wait(9), prefilled()]
    async with prefill_world(script=script, configs=everywhere(), decode=[*tokens(1), Stall()]) as it:
        async with await it.graph.generate(request) as stream:
            await stream.__anext__()
            getattr(request, verb)()
            assert [item async for item in stream] == []
        assert it.decode.open == 0
        assert (it.router.prefills, it.prefills[0].is_stopped) == (1, False)
        await anyio.sleep(10)
        assert sum(engine.delivered for engine in it.engines.values()) == 1
        it.assert_idle()


# -- the task that waits is cancelled


@asynccontextmanager
async def cancelled_after(seconds: float) -> AsyncIterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    assert scope.cancelled_caught


@pytest.mark.parametrize("meets", [False, True])
async def test_a_cancelled_task_leaves_decode_to_take_the_blocks(meets: bool, open_streams: OpenStreams) -> None:
    tracker = track_request(lambda: 0)
    configs = everywhere() if meets else {}
    async with prefill_world(script=[Wait(2), prefilled()], configs=configs, decode=[Stall()]) as it:
        if meets:
            it.put_in_front(SlowToAnswer)
        async with cancelled_after(1):
            await it.collect(prompt(tracker=tracker))
        assert (it.decodes, it.router.prefills) == ([], 2)
        await anyio.sleep(5)
        (decode,) = it.decodes
        assert decode.is_stopped
        assert (decode.payload.bootstrap_info is None, decode.payload.prefill_result is None) == (not meets, meets)
        it.assert_idle()
        await expect_free(tracker)


async def test_the_rest_of_a_failed_prefill_sends_no_request() -> None:
    async with prefill_world(script=[Wait(2), Fail(RuntimeError("broken"))]) as it:
        async with cancelled_after(1):
            await it.collect()
        await anyio.sleep(5)
        assert it.decodes == []
        it.assert_idle()


async def test_a_task_cancelled_before_anything_is_sent_leaves_nothing() -> None:
    tracker = track_request(lambda: 0)
    async with prefill_world() as it:
        held = await tracker.set_phase(RequestPhase.AGGREGATED)
        async with cancelled_after(1):
            await it.collect(prompt(tracker=tracker))
        held.release()
        await checkpoint()
        assert (it.prefills, it.decodes) == ([], [])
        it.assert_idle()
        await expect_free(tracker)


async def test_a_task_cancelled_while_decode_begins_ends_decode() -> None:
    class Hesitant(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            await anyio.sleep(9)
            return await super().generate(request)

    hesitant = Hesitant([])
    async with prefill_world(script=[Wait(3), prefilled()], configs=everywhere(), below=lambda _: hesitant) as it:
        async with cancelled_after(1):
            await it.collect()
        await anyio.sleep(5)
        assert (hesitant.open, hesitant.requests) == (0, [])
        it.assert_idle()


@pytest.mark.parametrize("mode", ["kv", "round_robin"])
@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
async def test_at_no_turn_does_an_end_leave_a_prefill_without_decode(how: str, meets: bool, mode: Mode) -> None:

    async def read_unless_cancelled(graph: Any, request: Any) -> None:
        with suppress(Cancelled):
            await (await graph.generate(request)).collect()

    async with prefill_world(mode, configs=everywhere() if meets else {}) as it:
        for turns in range(14):
            request = Context(prompt())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_unless_cancelled, it.graph, request)
                for _ in range(turns):
                    await checkpoint()
                tasks.cancel_scope.cancel() if how == "cancel" else getattr(request, how)()
            await anyio.sleep(9)
            assert len(it.decodes) >= len(it.prefills)
            it.assert_idle()
        assert it.prefills


# -- the reader goes


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a stream is dropped on purpose
async def test_a_stream_that_is_not_read_on_frees_decode_and_not_prefill(read: int, how: str) -> None:
    script = [Wait(9), prefilled()]
    async with prefill_world(script=script, configs=everywhere(), decode=[*tokens(1), Stall()]) as it:
        stream = await it.graph.generate(Context(prompt()))
        for _ in range(read):
            await stream.__anext__()
        if how == "closed":
            await stream.aclose()
        del stream
        gc.collect(0)
        for _ in range(20):
            await checkpoint()
        assert (it.decode.open, it.router.prefills) == (0, 1)
        await anyio.sleep(10)
        it.assert_idle()


async def test_no_prefill_waits_for_a_decode_that_has_ended() -> None:
    """A prefill that fails behind an unread stream ends at once, it does not wait its patience out."""
    async with prefill_world(
        script=[Wait(1), Fail(RuntimeError("broken"))], configs=everywhere(), decode_patience_s=100
    ) as it:
        async with await it.graph.generate(Context(prompt())):
            await anyio.sleep(2)
            assert it.router.prefills == 1
        await checkpoint()
        await checkpoint()
        assert it.router.prefills == 0


async def test_nor_for_one_that_was_read_to_its_end() -> None:
    script = [Wait(1), Fail(RuntimeError("broken"))]
    async with prefill_world(script=script, configs=everywhere(), decode=[], decode_patience_s=100) as it:
        stream = await it.graph.generate(Context(prompt()))
        assert [item async for item in stream] == []
        await anyio.sleep(2)
        assert it.router.prefills == 0


@pytest.mark.parametrize("verb", ["stop", "kill", None])
async def test_a_caller_that_has_gone_gets_no_error_of_a_failed_prefill(verb: str | None) -> None:
    request = Context(prompt())
    async with (
        prefill_world(script=[Fail(RuntimeError("broken"))], configs=everywhere(), decode=[Stall()]) as it,
        await it.graph.generate(request) as stream,
    ):
        await anyio.sleep(10)
        if verb is None:
            with pytest.raises(PrefillError, match="broken"):
                await stream.__anext__()
        else:
            getattr(request, verb)()
            assert [item async for item in stream] == []


async def test_a_scheduler_that_does_not_run_is_an_error_and_holds_nothing() -> None:
    tracker = track_request(lambda: 0)
    workers = static_workers({1: ScriptedEngine([prefilled()])})
    router = PrefillRouter(PushPrefill(PushRouter(workers)), present_workers(1).views, scheduler=AnyIOScheduler())
    request: Context[PreprocessedRequest] = Context(prompt(tracker=tracker))
    with pytest.raises(PenstockError):
        await (router >> ScriptedEngine([Annotated(None)])).generate(request)
    assert router.prefills == 0
    await expect_free(tracker)
