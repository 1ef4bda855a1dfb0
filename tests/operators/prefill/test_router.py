"""PrefillRouter: which worker gets what and when, in every mode."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators import KvPushRouter, PrefillRouter, PushPrefill, PushRouter
from operators.kv import (
    KvRouterConfig,
    kv_router,
)
from operators.prefill import PrefillNotActivated
from operators.prefill.pool import PrefillWorker
from pipeline import (
    Annotated,
    Context,
    InvalidArgument,
    Unavailable,
    identity,
)
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import (
    BootstrapInfo,
    CompletionUsage,
    LLMEngineOutput,
    PromptTokensDetails,
    RequestPhase,
    RouterConfigOverride,
    RoutingHints,
    StopConditions,
    TraceLink,
)
from pipeline.rx import AnyIOScheduler
from pipeline.testing import Probe, ScriptedEngine, Stall, Wait

from .worlds import (
    MODES,
    PARAMS,
    Mode,
    everywhere,
    meeting_at,
    prefill_world,
    prefilled,
    present_workers,
    prompt,
    tokens,
)

# -- activation


async def test_without_prefill_workers_the_request_goes_as_it_came() -> None:
    request = prompt()
    async with prefill_world(present=()) as it:
        await it.collect(request, id="r")
        (sent,) = it.decodes
        assert (sent.payload, sent.id) == (prompt(), "r")
        assert sent.payload is request
        assert it.prefills == []


async def test_with_enforced_prefill_the_request_gets_an_error_instead() -> None:
    async with prefill_world(present=(), enforce_disagg=True) as it:
        with pytest.raises(PrefillNotActivated, match="Prefill router not yet activated"):
            await it.collect()
        assert not it.router.can_serve_requests
        it.health.set(1, 2, 3)
        assert it.router.can_serve_requests
        await it.collect()
        assert (len(it.prefills), len(it.decodes)) == (1, 1)


async def test_workers_that_leave_and_return_switch_it_off_and_on() -> None:
    async with prefill_world("round_robin") as it:
        for ids, prefills in [((1, 2), 1), ((), 1), ((), 1), ((3,), 2), ((3, 1), 3)]:
            it.health.set(*ids)
            await it.collect()
            assert len(it.prefills) == prefills
        it.health.views.on_completed()
        await it.collect()
        assert len(it.prefills) == 3


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("deactivated", [False, True])
@pytest.mark.parametrize("enforced", [False, True])
async def test_only_a_router_that_enforces_prefill_cannot_serve_without_it(
    activated: bool, deactivated: bool, enforced: bool
) -> None:
    async with prefill_world(present=(1,) if activated else (), enforce_disagg=enforced) as it:
        for _ in range(2 if deactivated else 0):
            it.router.deactivate()
        assert it.router.can_serve_requests == (not enforced or (activated and not deactivated))
        it.router.reactivate()
        assert it.router.can_serve_requests == (not enforced or activated)


@pytest.mark.parametrize("enforced", [False, True])
async def test_a_disabled_router_never_prefills(enforced: bool) -> None:
    async with prefill_world(present=(), enforce_disagg=enforced) as it:
        assert it.router.can_serve_requests is not enforced
        for change in (it.router.deactivate, it.router.deactivate, it.router.reactivate):
            change()
            assert it.router.can_serve_requests is not enforced
    async with AnyIOScheduler() as scheduler:
        below: Any = ScriptedEngine([1])
        never = PrefillRouter(None, present_workers(1).views, scheduler=scheduler)
        never.reactivate()
        assert await (await (never >> below).generate(Context(prompt()))).collect() == [1]


async def test_by_hand_too() -> None:
    async with prefill_world() as it:
        it.router.deactivate()
        await it.collect()
        assert it.prefills == []
        it.router.reactivate()
        await it.collect()
        assert len(it.prefills) == 1


async def test_the_pool_is_made_with_the_first_worker_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    engines, calls = {1: ScriptedEngine([prefilled()])}, []

    def make() -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not yet")
        return PushPrefill(PushRouter(static_workers(engines)))

    health = present_workers()
    async with AnyIOScheduler() as scheduler, PrefillRouter(make, health.views, scheduler=scheduler) as router:
        graph = router >> ScriptedEngine(tokens(1))
        assert (calls, router.branches()) == ([], {})
        health.set(1)
        await (await graph.generate(Context(prompt()))).collect()
        assert (len(calls), engines[1].requests) == (1, [])
        assert "could not be made" in caplog.text
        for ids in ((1, 2), (1,), (1, 2)):
            health.set(*ids)
        await (await graph.generate(Context(prompt()))).collect()
        assert (len(calls), len(engines[1].requests)) == (2, 1)
        assert list(router.branches()) == ["prefill"]


async def test_news_that_fail_switch_it_off() -> None:
    async with prefill_world() as it:
        it.health.views.on_error(RuntimeError("lost"))
        await it.collect()
        assert it.prefills == []


# -- a known meeting point


@pytest.mark.parametrize("mode", MODES)
async def test_decode_begins_before_prefill_is_done(mode: Mode) -> None:
    configs = everywhere()
    async with prefill_world(mode, [Wait(5), prefilled()], configs=configs) as it:
        assert len(await it.collect()) == 3
        ((prefill,), (decode,)) = (it.prefills, it.decodes)
        info, hints = prefill.payload.bootstrap_info, prefill.payload.routing
        assert (info.bootstrap_host, info.bootstrap_port) == ("h", 9000)
        assert prefill.payload.stop_conditions.max_tokens == 1
        assert it.decode.items_before == [0]
        assert decode.payload.bootstrap_info == info
        assert decode.payload.stop_conditions.max_tokens == 5
        assert decode.payload.routing == RoutingHints(prefill_worker_id=hints.prefill_worker_id)
        assert it.engines[hints.prefill_worker_id].requests == [prefill]
        assert it.router.prefills == 1
        await anyio.sleep(6)
        it.assert_idle()


async def test_each_request_meets_in_a_room_of_its_own_that_contains_the_rank() -> None:
    configs = {i: meeting_at(data_parallel_size=4) for i in (1, 2, 3)}
    async with prefill_world("round_robin", configs=configs) as it:
        for rank in (0, 3, 2, 3):
            await it.collect(prompt(routing=RoutingHints(prefill_worker_id=1, prefill_dp_rank=rank)))
            assert it.decodes[-1].payload.bootstrap_info.bootstrap_room % 4 == rank
        rooms = {request.payload.bootstrap_info.bootstrap_room for request in it.decodes}
        assert len(rooms) == len({request.payload.bootstrap_info.handoff_id for request in it.decodes}) == 4


async def test_decode_waits_until_the_prefill_worker_is_recorded() -> None:
    tracker = track_request(lambda: 0)
    async with prefill_world(script=[Wait(1), prefilled()], configs=everywhere()) as it:
        held = await tracker.set_phase(RequestPhase.AGGREGATED)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.collect, prompt(tracker=tracker))
            await anyio.sleep(1)
            assert (it.prefills, it.decodes) == ([], [])
            held.release()
        info = tracker.worker_info()
        assert info is not None
        assert info.prefill_worker_id == it.decodes[0].payload.routing.prefill_worker_id
        assert (tracker.phase, info.decode_worker_id) == (RequestPhase.DECODE, None)
        await anyio.sleep(2)
        assert tracker.prefill_complete is not None


async def test_the_prefill_has_its_own_control_and_the_same_id_and_metadata() -> None:
    request = Context(prompt(), id="r", metadata={"k": "v"})
    script = [Wait(5), prefilled()]
    async with prefill_world(script=script, configs=everywhere(), decode=[Stall()]) as it:
        async with await it.graph.generate(request) as stream:
            request.kill()
            assert [item async for item in stream] == []
            (prefill,) = it.prefills
            assert (prefill.id, prefill.metadata) == ("r", {"k": "v"})
            assert not prefill.is_stopped
        await anyio.sleep(6)
        assert sum(engine.delivered for engine in it.engines.values()) == 1
        it.assert_idle()


# -- no meeting point


@pytest.mark.parametrize("mode", MODES)
async def test_without_a_meeting_point_decode_waits_for_the_result(mode: Mode) -> None:
    link, details = TraceLink("a" * 32, "b" * 16), PromptTokensDetails(3)
    usage = CompletionUsage(8, 1, 9, details)
    script = [
        prefilled(worker_trace_link=link),
        Wait(2),
        Annotated(LLMEngineOutput([], completion_usage=usage)),
    ]
    configs = {i: meeting_at(None) for i in (1, 2, 3)}
    async with prefill_world(mode, script, configs=configs) as it:
        began_s = anyio.current_time()
        await it.collect()
        assert anyio.current_time() - began_s >= 2
        ((prefill,), (decode,)) = (it.prefills, it.decodes)
        payload = decode.payload
        assert payload.prefill_result.disaggregated_params == PARAMS
        assert (payload.prefill_result.prompt_tokens_details, payload.migration_link) == (details, link)
        assert payload.bootstrap_info is None
        assert payload.routing.prefill_worker_id == prefill.payload.routing.prefill_worker_id
        assert it.decode.items_before == [2]
        it.assert_idle()


async def test_the_turn_moves_on_once_for_each_request_and_not_for_a_query() -> None:
    async with prefill_world("round_robin") as it:
        for worker_id in (1, 2, 3, 1):
            query = Context(prompt())
            assert it.router.query_prefill_worker(query) == PrefillWorker(worker_id)
            await it.collect()
            assert it.decodes[-1].payload.routing.prefill_worker_id == worker_id
        assert it.router.query_prefill_worker(Context(prompt()), takes_turn=True) == PrefillWorker(2)
        await it.collect()
        assert it.decodes[-1].payload.routing.prefill_worker_id == 3
        await it.collect(prompt(routing=RoutingHints(prefill_worker_id=3)))
        await it.collect()
        assert it.decodes[-1].payload.routing.prefill_worker_id == 1


async def test_a_query_raises_what_the_request_would_meet() -> None:
    async with prefill_world(present=()) as it:
        with pytest.raises(PrefillNotActivated):
            it.router.query_prefill_worker(Context(prompt()))
    async with prefill_world("direct") as it:
        with pytest.raises(Unavailable, match="cannot be said"):
            it.router.query_prefill_worker(Context(prompt()))
        named = prompt(routing=RoutingHints(prefill_worker_id=2))
        assert it.router.query_prefill_worker(Context(named)) == PrefillWorker(2)
    async with prefill_world("kv", workers=(), present=(1,)) as it:
        with pytest.raises(Unavailable):
            it.router.query_prefill_worker(Context(prompt()))


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_the_request_names_prefills(mode: Mode) -> None:
    async with prefill_world(mode) as it:
        for worker_id in (3, 3, 1):
            await it.collect(prompt(routing=RoutingHints(prefill_worker_id=worker_id, decode_worker_id=9)))
            assert it.engines[worker_id].requests[-1] is not None
            assert it.decodes[-1].payload.routing == RoutingHints(prefill_worker_id=worker_id, decode_worker_id=9)
        assert [len(engine.requests) for engine in it.engines.values()] == [1, 0, 2]


async def test_direct_mode_needs_a_name() -> None:
    async with prefill_world("direct") as it:
        with pytest.raises(InvalidArgument, match=r"prefill_worker_id.*x-dynamo-prefill-instance-id") as caught:
            await it.collect(prompt(routing=RoutingHints(backend_instance_id=1)))
        assert caught.value.field == "routing.prefill_worker_id"
        assert (it.prefills, it.decodes) == ([], [])
        await it.collect(prompt(routing=RoutingHints(prefill_worker_id=2)))
        assert len(it.engines[2].requests) == 1


async def test_decode_begins_with_the_output_that_has_a_meeting_point() -> None:
    """The worker that was reserved is the one decode gets, whatever the output names."""
    bootstrap = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 12345, "bootstrap_room": 987654321}
    params = {**bootstrap, "worker_id": {"prefill_worker_id": 2}}
    async with prefill_world("round_robin", [prefilled(params), Wait(5), prefilled()]) as it:
        began_s = anyio.current_time()
        await it.collect()
        assert anyio.current_time() == began_s
        payload = it.decodes[0].payload
        assert payload.bootstrap_info == BootstrapInfo("10.0.0.5", 12345, 987654321)
        assert (payload.prefill_result, payload.routing.prefill_worker_id) == (None, 1)
        assert it.router.prefills == 1
        await anyio.sleep(6)
        it.assert_idle()


async def test_the_request_that_came_in_stays_as_it_was() -> None:
    request = prompt(routing=RoutingHints(dp_rank=1), router_config_override=RouterConfigOverride(1.0))
    before = prompt(routing=RoutingHints(dp_rank=1), router_config_override=RouterConfigOverride(1.0))
    async with prefill_world("round_robin") as it:
        await it.collect(request)
    assert request == before


async def test_no_limit_stays_none_for_decode() -> None:
    async with prefill_world() as it:
        await it.collect(prompt(stop_conditions=StopConditions()))
        assert it.prefills[0].payload.stop_conditions.max_tokens == 1
        assert it.decodes[0].payload.stop_conditions.max_tokens is None


async def test_events_before_the_prefills_answer_are_passed_over() -> None:
    async with prefill_world() as it:
        (answer, *_) = await it.collect(prompt(annotations=["router_decision"]))
        assert answer.data is not None
        assert it.decodes[0].payload.prefill_result is not None


async def test_a_query_of_instances_names_both_workers() -> None:
    pool = static_workers({5: ScriptedEngine([])})
    kv = kv_router(pool, KvRouterConfig(use_kv_events=False), block_size_tokens=4, worker_type="decode")
    cases: list[Any] = [{}, everywhere()]
    for configs in cases:
        async with prefill_world(workers=(2,), configs=configs) as it:
            graph = it.router >> KvPushRouter(kv) >> PushRouter(pool)
            query = prompt(annotations=["query_instance_id:"], tracker=track_request(lambda: 0))
            (item,) = await (await graph.generate(Context(query))).collect()
            assert item.data is not None
            workers = item.data.disaggregated_params["worker_id"]
            assert (workers["prefill_worker_id"], workers["decode_worker_id"]) == (2, 5)
            assert it.prefills == []


# -- how it looks


async def test_the_prefill_pool_is_drawn_at_its_side() -> None:
    async with prefill_world("round_robin") as it:
        graph = it.router >> identity() >> it.decode
        text = graph.draw()
        assert "prefill" in text
        assert "prefill/2" in text
        assert text.splitlines()[0].startswith("PrefillRouter(PushPrefill")


async def test_a_plain_pool_may_have_other_stages_above_its_router() -> None:
    engines = {i: ScriptedEngine([prefilled()]) for i in (1, 2)}
    workers = static_workers(engines)
    push, probe = PushRouter(workers), Probe()
    side = PushPrefill(push, probe >> push)
    async with (
        AnyIOScheduler() as scheduler,
        PrefillRouter(side, present_workers(1).views, scheduler=scheduler) as router,
    ):
        for _ in range(2):
            await (await (router >> ScriptedEngine(tokens(1))).generate(Context(prompt()))).collect()
    assert (probe.requests, [len(engine.requests) for engine in engines.values()]) == (2, [1, 1])


async def test_a_copy_under_another_name_shares_its_state() -> None:
    async with prefill_world(enforce_disagg=True) as it:
        other = it.router.named("second")
        it.router.deactivate()
        assert not other.can_serve_requests
        await checkpoint()
