"""RouterService: a KvRouter that answers over the network."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv import KvRouterConfig, kv_router
from operators.kv.errors import DuplicateRequest
from operators.kv.queue import DepthTier, PolicyClass, PolicyProfile
from operators.kv.request import RouteRequest
from operators.kv.reservation import Reservation
from operators.kv.service import (
    BackpressureResponse,
    FreeMarked,
    LoadsRequest,
    LoadsResponse,
    MarkFree,
    MarkPrefill,
    NewRequest,
    NewResponse,
    PrefillMarked,
    QueueRejectedResponse,
    QueueRejection,
    RouterRequest,
    RouterResponse,
    RouterService,
)
from operators.kv.types import WorkerRank
from pipeline import Annotated, Cancelled, Context, InvalidArgument, Unavailable
from pipeline.network import Runtime, static_workers
from pipeline.protocols import (
    BlockExtraInfo,
    MmObject,
    PreprocessedRequest,
    RequestPhase,
    RoutingConstraints,
    RoutingHints,
)
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import ScriptedEngine
from tests.operators.kv.worlds import published

BLOCK = 4
ONE_AT_A_TIME = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))


def service(*worker_ids: int, **settings: Any) -> RouterService:
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in worker_ids})
    settings.setdefault("config", KvRouterConfig(use_kv_events=False))
    return RouterService(kv_router(pool, block_size_tokens=BLOCK, rng=Random(1), **settings))


def new(count: int = 8, *, first: int = 0, **fields: Any) -> NewRequest:
    return NewRequest(tokens=list(range(first, first + count)), **fields)


async def send(router: RouterService, payload: Any, request_id: str = "r", **settings: Any) -> RouterResponse:
    async with await router.generate(Context(payload, id=request_id, **settings)) as stream:
        (item,) = [item async for item in stream]
    assert item.data is not None
    return item.data


async def test_new_books_under_the_id_of_the_request() -> None:
    router = service(7)
    assert await send(router, new(), "a") == NewResponse(7, 0, 0)
    assert await send(router, new(), "b") == NewResponse(7, 0, 2)
    booking = router.router.loads.sequences.get("a")
    assert booking is not None
    assert booking.rank == WorkerRank(7)
    with pytest.raises(DuplicateRequest):
        await send(router, new(), "a")


async def test_a_plain_object_is_a_request_too() -> None:
    router = service(7)
    assert await send(router, {"method": "new", "tokens": [1, 2, 3, 4]}) == NewResponse(7)
    assert await send(router, {"method": "mark_free"}) == FreeMarked(True)
    assert len(router.router.loads) == 0
    for wrong in ({"method": "old"}, None, b"{}", RouterRequest()):
        with pytest.raises(InvalidArgument):
            await send(router, wrong)


async def test_the_fields_of_new_reach_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    router, seen = service(7), list[RouteRequest]()
    find = router.router.reserve

    async def recorded(request: RouteRequest, **settings: Any) -> Reservation:
        seen.append(request)
        return await find(request, **settings)

    monkeypatch.setattr(router.router, "reserve", recorded)
    media = [BlockExtraInfo([MmObject(7, [])]), None]
    payload = new(block_mm_infos=media, lora_name="a", cache_namespace="t", priority_jump=2.5, strict_priority=3)
    await send(router, payload, metadata={"policy-class": "batch"})
    (request,) = seen
    assert (request.priority_jump_s, request.strict_priority, request.policy_class) == (2.5, 3, "batch")
    hints = RoutingHints(lora_name="a", cache_namespace="t")
    plain = Context(PreprocessedRequest(model="m", token_ids=list(range(8)), routing=hints))
    expected = router.router.route_request(plain, RequestPhase.AGGREGATED)
    assert request.blocks.local_hashes != expected.blocks.local_hashes
    assert request.blocks.local_hashes[1] == expected.blocks.local_hashes[1]


async def test_taints_narrow_the_choice() -> None:
    health = published({1: ModelRuntimeConfig(taints={"a"}), 2: ModelRuntimeConfig(taints={"b"})})
    router = service(1, 2, health=health)
    assert await send(router, new(routing_constraints=RoutingConstraints({"b"}))) == NewResponse(2)
    with pytest.raises(Unavailable):
        await send(router, new(routing_constraints=RoutingConstraints({"c"})), "other")


async def test_marks_without_an_id_are_for_the_request_itself() -> None:
    router = service(7)
    for request_id, named in (("a", None), ("b", "  "), ("c", "")):
        await send(router, new(first=100 * ord(request_id)), request_id)
        assert prefill_tokens(router) > 0
        assert await send(router, MarkPrefill(named), request_id) == PrefillMarked(True)
        assert prefill_tokens(router) == 0
        assert await send(router, MarkFree(named), request_id) == FreeMarked(True)
        assert len(router.router.loads) == 0


def prefill_tokens(router: RouterService) -> int:
    return router.router.loads.sequences.project((), [WorkerRank(7)], 0.0).prefill_tokens[0]


async def test_marks_may_name_the_request_and_work_when_their_own_is_stopped() -> None:
    router = service(7)
    await send(router, new(), "a")
    for payload, answer in ((MarkPrefill("a"), PrefillMarked(True)), (MarkFree("a"), FreeMarked(True))):
        request = Context[RouterRequest](payload, id="other")
        request.control.stop()
        async with await router.generate(request) as stream:
            assert [item.data async for item in stream] == [answer]
    assert len(router.router.loads) == 0


async def test_marking_twice_is_once_and_an_unknown_request_is_free() -> None:
    router = service(7)
    await send(router, new(), "a")
    assert [await send(router, MarkPrefill("a")) for _ in range(2)] == [PrefillMarked(True)] * 2
    assert [await send(router, MarkFree("a")) for _ in range(2)] == [FreeMarked(True)] * 2
    assert await send(router, MarkPrefill("a")) == PrefillMarked(False)
    assert await send(router, MarkPrefill("unheard-of")) == PrefillMarked(False)
    assert await send(router, MarkFree("unheard-of")) == FreeMarked(True)


async def test_a_booking_made_elsewhere_is_not_touched() -> None:
    router = service(7)
    request = Context(PreprocessedRequest(model="m", token_ids=list(range(8))))
    placement = await router.router.reserve(
        router.router.route_request(request, RequestPhase.AGGREGATED), request_id="theirs"
    )
    assert await send(router, MarkPrefill("theirs")) == PrefillMarked(False)
    assert await send(router, MarkFree("theirs")) == FreeMarked(False)
    assert placement.is_live


async def test_a_booking_that_is_never_freed_expires_and_is_forgotten() -> None:
    router = service(7, expiry_s=10.0)
    for number in range(100):
        await send(router, new(), str(number))
    assert len(router._reservations) == 100
    await anyio.sleep(40)
    await send(router, new(), "late")
    assert list(router.router.loads.sequences._bookings) == ["late"]
    assert await send(router, MarkPrefill("0")) == PrefillMarked(False)
    await send(router, new(), "later")
    assert list(router._reservations) == ["late", "later"]


async def test_potential_loads_are_those_with_the_prompt_and_book_nothing() -> None:
    router = service(1, 2)
    await send(router, new(routing_constraints=RoutingConstraints()), "a")
    answer = await send(router, LoadsRequest(tokens=list(range(12))))
    assert isinstance(answer, LoadsResponse)
    assert sorted((load.potential_prefill_tokens, load.active_requests) for load in answer.loads) == [(12, 0), (12, 1)]
    assert (answer.pending_count, answer.pending_isl_tokens, len(router.router.loads)) == (0, 0, 1)
    with pytest.raises(Unavailable):
        await send(service(), LoadsRequest(tokens=[1]))


async def settled() -> None:
    for _ in range(8):
        await checkpoint()


async def test_a_request_waits_its_turn_and_a_mark_lets_it_go() -> None:
    router = service(7, profile=ONE_AT_A_TIME)
    answers = dict[str, RouterResponse]()

    async def waits(request_id: str, count: int) -> None:
        answers[request_id] = await send(router, NewRequest(tokens=list(range(100, 100 + count))), request_id)

    await send(router, new(), "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits, "b", 12)
        await settled()
        tasks.start_soon(waits, "c", 20)
        await settled()
        loads = await send(router, LoadsRequest(tokens=[1]))
        assert isinstance(loads, LoadsResponse)
        assert (loads.pending_count, loads.pending_isl_tokens, list(answers)) == (2, 32, [])
        await send(router, MarkPrefill("a"))
        await settled()
        assert list(answers) == ["b"]
        await send(router, MarkFree("b"))
    assert answers == {"b": NewResponse(7), "c": NewResponse(7)}


async def test_a_full_queue_is_an_answer() -> None:
    limited = PolicyClass("batch", prefill_busy_threshold=0, request_queue_limit_per_worker=0)
    router = service(7, profile=PolicyProfile.single(limited))
    await send(router, new(), "a")
    rejection = QueueRejection("batch", "requests", 0, 0)
    assert await send(router, new(), "b") == QueueRejectedResponse(rejection)


async def test_a_queue_that_is_too_deep_is_backpressure() -> None:
    router = service(7, profile=ONE_AT_A_TIME, tiers=[DepthTier(0, 5)])
    await send(router, new(), "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send, router, new(), "b")
        await settled()
        assert await send(router, new(), "c") == BackpressureResponse(8, 5)
        tasks.cancel_scope.cancel()
    assert len(router.router.queue) == 0


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_request_that_is_given_up_books_nothing(how: str) -> None:
    router = service(7, profile=ONE_AT_A_TIME)
    early = Context[RouterRequest](new(), id="early")
    getattr(early.control, how)()
    with pytest.raises(Cancelled):
        await router.generate(early)
    await send(router, new(), "a")
    waiting, failed = Context[RouterRequest](new(), id="b"), list[Exception]()

    async def waits() -> None:
        try:
            await router.generate(waiting)
        except Cancelled as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits)
        await settled()
        getattr(waiting.control, how)()
    assert (len(failed), len(router.router.loads), len(router.router.queue)) == (1, 1, 0)


async def closed(router: RouterService, request: Context[RouterRequest]) -> None:
    await (await router.generate(request)).aclose()


async def killed(router: RouterService, request: Context[RouterRequest]) -> None:
    async with await router.generate(request) as stream:
        request.control.kill()
        assert [item async for item in stream] == []


@pytest.mark.parametrize("end", [closed, killed])
async def test_a_booking_whose_answer_is_not_read_ends_at_once(end: Callable[..., Any]) -> None:
    router = service(7)
    await end(router, Context[RouterRequest](new(), id="a"))
    assert len(router.router.loads) == 0


async def test_a_stop_after_the_choice_still_answers_with_it() -> None:
    router = service(7)
    request = Context[RouterRequest](new(), id="a")
    async with await router.generate(request) as stream:
        request.control.stop()
        assert [item.data async for item in stream] == [NewResponse(7)]
    assert len(router.router.loads) == 1


async def test_it_is_served_and_called_over_the_runtime() -> None:
    async with Runtime.in_process(rng=Random(1)) as runtime:
        router = service(7)
        await runtime.serve("ns/router/generate", router)
        workers = runtime.workers("ns/router/generate", Annotated[RouterResponse])
        (instance_id,) = await workers.wait_for_instances()

        async def call(payload: RouterRequest, request_id: str) -> RouterResponse | None:
            async with await workers.engine(instance_id).generate(Context(payload, id=request_id)) as stream:
                (item,) = [item async for item in stream]
                return item.data

        assert await call(new(), "a") == NewResponse(7)
        assert await call(MarkPrefill(), "a") == PrefillMarked(True)
        assert len(router.router.loads) == 1
        assert await call(MarkFree("a"), "b") == FreeMarked(True)
        assert len(router.router.loads) == 0
        with pytest.raises(InvalidArgument):
            await call(NewRequest(tokens=[]), "c")


@pytest.mark.parametrize("payload", [new(), LoadsRequest(tokens=[1, 2]), MarkPrefill("a"), MarkFree("a")])
async def test_the_engine_contract_holds(payload: RouterRequest, check_engine: Any) -> None:
    config = KvRouterConfig(overlap_score_credit=0.0)  # so that each answer is like the first
    await check_engine(
        lambda: service(7, config=config),
        request=payload,
        bad_request={"method": "old"},
        open_count=lambda router: len(router.router.queue),
    )
