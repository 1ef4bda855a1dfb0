"""A client that leaves withdraws its prefill, as long as no transfer of blocks can have begun."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators import KvPushRouter, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline import Annotated, AsyncEngine, Cancelled, Context, Disconnected, Operator, ResponseStream
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import RequestPhase
from pipeline.protocols.card import STOPS_PREFILLS, DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait

from .worlds import Mode, PrefillWorld, SlowToSend, everywhere, prefill_world, prefilled, prompt, tokens

ENDINGS = pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
KINDS = pytest.mark.parametrize("meets", [False, True])


def promising(meets: bool) -> Mapping[int, ModelRuntimeConfig]:
    """Workers that promise to bear the stop of a prefill; with `meets` they wait for decode somewhere."""
    endpoint = DisaggregatedEndpoint("h", 9000) if meets else None
    config = ModelRuntimeConfig(disaggregated_endpoint=endpoint, runtime_data={STOPS_PREFILLS: True})
    return dict.fromkeys((1, 2, 3), config)


async def leave_after(it: PrefillWorld, how: str, seconds: float, request: Context[Any]) -> None:
    """Send a request, and leave after a while. A stop or kill before there is an answer raises Cancelled."""
    with anyio.move_on_after(seconds if how == "cancel" else 3600):
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.sleep(seconds)
                getattr(request, how)()

            if how != "cancel":
                tasks.start_soon(end)
            with suppress(Cancelled):
                await (await it.graph.generate(request)).collect()


def expect(it: PrefillWorld, *, sent: int, stopped: int, decodes: int) -> None:
    assert len(it.prefills) == sent
    assert [prefill.is_stopped for prefill in it.prefills].count(True) == stopped
    assert not any(prefill.is_killed for prefill in it.prefills)
    assert len(it.decodes) == decodes
    it.assert_idle()


@ENDINGS
@KINDS
async def test_what_was_not_sent_is_not_sent(how: str, meets: bool, open_streams: OpenStreams) -> None:
    """Whatever the worker promises, and in a second attempt too."""
    for configs in (everywhere() if meets else {}, promising(meets)):
        async with prefill_world("round_robin", configs=configs) as it:
            request: Context[Any] = Context(prompt(tracker=track_request(lambda: 0)))
            await (await it.graph.generate(request.child(request.payload))).collect()
            expect(it, sent=1, stopped=0, decodes=1)
            it.put_in_front(SlowToSend)
            began_s = anyio.current_time()
            await leave_after(it, how, 1, request)
            await anyio.sleep(5)
            assert anyio.current_time() - began_s < 9
            expect(it, sent=1, stopped=0, decodes=1)
            with anyio.fail_after(1):
                (await request.payload.tracker.set_phase(RequestPhase.AGGREGATED)).release()


@pytest.mark.parametrize("verb", ["stop", "kill"])
@KINDS
async def test_a_client_that_left_gets_cancelled_though_its_prefill_was_refused(verb: str, meets: bool) -> None:
    async with prefill_world(configs=everywhere() if meets else {}) as it:
        it.put_in_front(SlowToSend)
        request = Context(prompt())
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.sleep(1)
                getattr(request, verb)()

            tasks.start_soon(end)
            with pytest.raises(Cancelled):
                await it.graph.generate(request)


@ENDINGS
async def test_a_worker_that_promises_to_stop_prefills_is_sent_a_stop(how: str, open_streams: OpenStreams) -> None:
    """And never a kill, which would cut the connection; decode, which has nothing to take, gets no request."""
    async with prefill_world(script=[Wait(60), prefilled()], configs=promising(False)) as it:
        began_s = anyio.current_time()
        await leave_after(it, how, 1, Context(prompt()))
        assert anyio.current_time() - began_s == 1
        await anyio.sleep(1)
        expect(it, sent=1, stopped=1, decodes=0)


@ENDINGS
async def test_a_prompt_that_is_computed_is_handed_over_all_the_same(how: str) -> None:
    """Its blocks may be on their way."""
    async with prefill_world(script=[prefilled(), Wait(3)], configs=promising(False)) as it:
        await leave_after(it, how, 1, Context(prompt()))
        await anyio.sleep(9)
        expect(it, sent=1, stopped=0, decodes=1)
        assert it.decodes[0].is_stopped


class Recorded(Operator[Any, Any, Any, Any]):
    """Passes everything on; notes of each request whether the prefill it follows was stopped by then."""

    def __init__(self) -> None:
        self.too_late: list[bool] = []
        self.prefills: Any = ()

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        self.too_late.append(any(prefill.is_stopped for prefill in self.prefills() if prefill.id == request.id))
        return await next.generate(request)


@ENDINGS
@KINDS
@pytest.mark.parametrize("mode", ["kv", "round_robin"])
async def test_at_no_turn_does_decode_wait_for_blocks_that_will_not_come(how: str, meets: bool, mode: Mode) -> None:
    """A prefill that was sent is stopped before decode gets the request, or it is not and decode gets it."""
    recorded, script, withdrawn = Recorded(), [Wait(1), prefilled()], 0
    async with prefill_world(mode, script, configs=promising(meets), below=lambda decode: recorded >> decode) as it:
        recorded.prefills = lambda: it.prefills

        async def send(request: Context[Any]) -> None:
            with suppress(Cancelled):
                async with await it.graph.generate(request) as stream:
                    assert not any([item.is_error async for item in stream])

        for turns in range(20):
            request = Context(prompt())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, request)
                for _ in range(turns):
                    await checkpoint()
                tasks.cancel_scope.cancel() if how == "cancel" else getattr(request, how)()
            await anyio.sleep(9)
            mine = [prefill.is_stopped for prefill in it.prefills if prefill.id == request.id]
            was_asked = any(decode.id == request.id for decode in it.decodes)
            assert was_asked or all(mine)
            withdrawn += bool(mine) and not was_asked
            it.assert_idle()
    assert not any(recorded.too_late)
    assert withdrawn or meets  # whether a stop comes between its being sent and decode depends on the loop


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_while_decode_runs_its_prefill_is_left_alone(verb: str) -> None:
    """Decode may be fetching blocks; once it is over, it does not."""
    script = [Wait(60), prefilled()]
    async with prefill_world(script=script, configs=promising(True), decode=[*tokens(1), Stall()]) as it:
        request = Context(prompt())
        async with await it.graph.generate(request) as stream:
            await stream.__anext__()
            getattr(request, verb)()
            assert not it.prefills[0].is_stopped
            assert [item async for item in stream] == []
        assert it.prefills[0].is_stopped
        await anyio.sleep(1)
        expect(it, sent=1, stopped=1, decodes=1)


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a stream is dropped on purpose
async def test_a_stream_that_is_not_read_on_withdraws_the_prefill(read: int, how: str) -> None:
    script = [Wait(60), prefilled()]
    async with prefill_world(script=script, configs=promising(True), decode=[*tokens(1), Stall()]) as it:
        stream = await it.graph.generate(Context(prompt()))
        for _ in range(read):
            await stream.__anext__()
        if how == "closed":
            await stream.aclose()
        del stream
        await anyio.sleep(1)
        expect(it, sent=1, stopped=1, decodes=1)


async def test_decode_that_ends_by_itself_leaves_its_prefill_to_end() -> None:
    async with prefill_world(script=[Wait(5), prefilled()], configs=promising(True)) as it:
        assert len(await it.collect()) == 3
        await anyio.sleep(9)
        expect(it, sent=1, stopped=0, decodes=1)


async def test_decode_that_fails_withdraws_its_prefill() -> None:
    broken = [*tokens(1), Annotated.from_error(Disconnected("lost"))]
    async with prefill_world(script=[Wait(60), prefilled()], configs=promising(True), decode=broken) as it:
        assert (await it.collect())[-1].is_error
        await anyio.sleep(1)
        expect(it, sent=1, stopped=1, decodes=1)


async def test_a_prefill_that_is_stopped_when_its_turn_comes_is_not_sent() -> None:
    """The KV router may place it in the very moment it is stopped; decode of such a request is sent."""
    engine = ScriptedEngine([prefilled()])
    pool = static_workers({5: engine})
    kv = kv_router(pool, KvRouterConfig(use_kv_events=False), block_size_tokens=4, worker_type="prefill")
    tracker = track_request(lambda: 0)
    for phase, sent in ((RequestPhase.PREFILL, 0), (RequestPhase.DECODE, 1)):
        with await tracker.set_phase(phase):
            request = Context(prompt(tracker=tracker))
            request.stop()
            with suppress(Cancelled):
                await (await (KvPushRouter(kv) >> PushRouter(pool)).generate(request)).collect()
            assert len(engine.requests) == sent
            assert len(kv.loads) == 0
