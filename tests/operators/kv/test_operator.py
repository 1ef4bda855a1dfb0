"""KvPushRouter: the three ways a request goes, what is forwarded, and the account that is kept of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import anyio
import pytest
from attrs import evolve

from operators import PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.kv.decision import Decision
from operators.kv.errors import DuplicateRequest
from operators.kv.operator import ROUTER_DECISION, KvPushRouter
from operators.kv.reservation import LoadBook, Reservation, output_weight
from operators.pool.assigned import DirectRouter
from operators.pool.push_router import RouterMode
from pipeline import (
    Annotated,
    AsyncEngine,
    BackendError,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    Unavailable,
    identity,
)
from pipeline.network import Workers, static_workers
from pipeline.protocols import (
    LLMEngineOutput,
    PreprocessedRequest,
    RequestPhase,
    RequestTracker,
    RoutingData,
    RoutingHints,
)
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.testing import Fail, ScriptedEngine, Stall, check_operator
from pipeline.wire import to_plain
from tests.operators.kv.worlds import published

BLOCK = 4


def tokens(*counts: int) -> list[Annotated[LLMEngineOutput]]:
    """An item of so many tokens for each count."""
    return [Annotated(LLMEngineOutput(list(range(count)))) for count in counts]


class Graph:
    """A KvPushRouter over scripted workers, one for each id."""

    def __init__(self, script: Sequence[Any] = (), worker_ids: Sequence[int] = (1, 2, 3), **settings: Any) -> None:
        self.engines = {worker_id: ScriptedEngine(list(script) or tokens(1)) for worker_id in worker_ids}
        self.workers: Workers[Any, Any] = static_workers(self.engines)
        self.config = KvRouterConfig(**{"use_kv_events": False, **settings})
        self.router = kv_router(self.workers, self.config, block_size_tokens=BLOCK, rng=Random(1))
        self.stage = KvPushRouter(self.router)
        self.engine: AsyncEngine[Any, Any] = self.stage >> PushRouter(self.workers)

    @property
    def booked(self) -> int:
        return len(self.router.loads)

    @property
    def received(self) -> dict[int, list[Context[PreprocessedRequest]]]:
        return {worker_id: engine.requests for worker_id, engine in self.engines.items() if engine.requests}

    async def send(self, request: PreprocessedRequest, **context: Any) -> list[Any]:
        return await (await self.engine.generate(Context(request, **context))).collect()


def prompt(count: int = 8, **fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(list(range(count)), **fields)


def tracker(phase: RequestPhase = RequestPhase.AGGREGATED) -> RequestTracker:
    made = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
    made.phase = phase
    return made


def named(**hints: Any) -> PreprocessedRequest:
    return prompt(routing=RoutingHints(**hints))


# -- which worker


async def test_the_worker_that_was_given_the_prompt_before_gets_it_again() -> None:
    graph = Graph()
    for _ in range(4):
        await graph.send(prompt(64))
    assert [len(requests) for requests in graph.received.values()] == [4]


@pytest.mark.parametrize("text", ["query_instance_id:", "query_instance_id:decode"])
async def test_a_query_books_sends_and_records_nothing(text: str) -> None:
    graph = Graph()
    (item,) = await graph.send(prompt(annotations=[text], tracker=tracker()))
    named_workers = item.data.disaggregated_params
    assert named_workers["token_ids"] == list(range(8))
    assert (
        named_workers["worker_id"]["decode_worker_id"] == named_workers["worker_id"]["prefill_worker_id"] in (1, 2, 3)
    )
    assert to_plain(item.data.routing_data) == named_workers
    assert (item.event, graph.received, graph.booked) == (None, {}, 0)
    blocks = graph.router.route_request(Context(prompt()), RequestPhase.AGGREGATED).blocks
    assert graph.router.lookup.find(blocks, 0.0).device == {}


async def test_the_annotation_without_a_colon_is_not_a_query() -> None:
    graph = Graph()
    await graph.send(prompt(annotations=["query_instance_id"]))
    assert len(graph.received) == 1


async def test_a_query_without_a_tracker_names_no_worker() -> None:
    (item,) = await Graph().send(prompt(annotations=["query_instance_id:"]))
    assert item.data.disaggregated_params == {"worker_id": None, "token_ids": list(range(8))}
    assert item.data.routing_data == RoutingData(token_ids=list(range(8)))


async def test_a_query_about_a_named_worker_answers_with_that_one() -> None:
    received = evolve(named(backend_instance_id=2), annotations=["query_instance_id:"], tracker=tracker())
    (item,) = await Graph().send(received)
    assert item.data.disaggregated_params["worker_id"]["decode_worker_id"] == 2


@pytest.mark.parametrize(
    ("phase", "hints", "expected"),
    [
        (RequestPhase.PREFILL, {"prefill_worker_id": 3, "backend_instance_id": 2}, 3),
        (RequestPhase.PREFILL, {"backend_instance_id": 2}, 2),
        (RequestPhase.DECODE, {"decode_worker_id": 3, "backend_instance_id": 2}, 3),
        (RequestPhase.DECODE, {"backend_instance_id": 2}, 2),
        (RequestPhase.AGGREGATED, {"decode_worker_id": 3, "backend_instance_id": 2}, 2),
    ],
)
async def test_the_phase_decides_which_named_worker_counts(
    phase: RequestPhase, hints: dict[str, int], expected: int
) -> None:
    graph = Graph()
    await graph.send(evolve(named(**hints), tracker=tracker(phase)))
    assert list(graph.received) == [expected]


async def test_the_selected_rank_is_in_the_request_that_is_sent() -> None:
    graph, request = Graph(), Context(prompt(routing=RoutingHints(priority=5)))
    await (await graph.engine.generate(request)).collect()
    ((sent,),) = graph.received.values()
    assert (sent.id, sent.control) == (request.id, request.control)
    assert sent.payload == evolve(request.payload, routing=RoutingHints(priority=5, dp_rank=0))
    assert request.payload.routing == RoutingHints(priority=5)


async def test_a_prefill_carries_its_rank_under_both_names() -> None:
    graph = Graph()
    await graph.send(prompt(tracker=tracker(RequestPhase.PREFILL)))
    ((sent,),) = graph.received.values()
    assert sent.payload.routing is not None
    assert (sent.payload.routing.prefill_dp_rank, sent.payload.routing.dp_rank) == (0, 0)


async def test_a_named_worker_that_is_not_allowed_or_not_there_is_an_error() -> None:
    graph = Graph()
    with pytest.raises(InvalidArgument, match="not among the allowed"):
        await graph.send(named(backend_instance_id=1, allowed_worker_ids={2}))
    with pytest.raises(Unavailable, match="worker 9"):
        await graph.send(named(backend_instance_id=9))
    with pytest.raises(Unavailable, match="has ranks 0 to 0, not 1"):
        await graph.send(named(backend_instance_id=1, dp_rank=1))
    assert (graph.received, graph.booked) == ({}, 0)


@pytest.mark.parametrize("mode", ["direct", "round_robin"])
async def test_the_choice_reaches_the_pools_router_through_other_stages_in_every_mode(mode: RouterMode) -> None:
    graph = Graph()
    engine = graph.stage >> identity() >> PushRouter(graph.workers, mode)
    for _ in range(3):
        await (await engine.generate(Context(named(backend_instance_id=3)))).collect()
    assert graph.received.keys() == {3}


# -- the account


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_request_is_booked_until_its_stream_ends(count: int) -> None:
    graph = Graph([*tokens(*[1] * count)] or [Annotated(LLMEngineOutput([]))])
    async with await graph.engine.generate(Context(prompt())) as stream:
        assert graph.booked == 1
        async for _ in stream:
            assert graph.booked == 1
        assert graph.booked == 0


async def test_a_failed_push_leaves_no_booking() -> None:
    graph = Graph()
    for engine in graph.engines.values():
        engine._fails = CannotConnect("not now")
    with pytest.raises(CannotConnect, match="not now"):
        await graph.send(prompt())
    assert graph.booked == 0


async def test_the_prompt_counts_as_computed_at_the_first_token() -> None:
    graph = Graph(tokens(0, 1, 1), worker_ids=[1])
    ranks = graph.router.loads.sequences.ranks()
    seen = []
    async with await graph.engine.generate(Context(prompt(tracker=(times := tracker())))) as stream:
        async for _ in stream:
            seen.append(graph.router.loads.sequences.project((), ranks, 0.0).prefill_tokens[0])
            await anyio.sleep(1)
    assert seen == [8, 0, 0]
    assert times.ttft_ms == 1000


@pytest.mark.parametrize(("first", "second", "left"), [(8, 10, 2), (8, 8, 0), (0, 8, 8)])
async def test_what_is_cached_is_no_prompt_work(first: int, second: int, left: int) -> None:
    graph = Graph(worker_ids=[1])
    if first:
        await graph.send(prompt(first))
    async with await graph.engine.generate(Context(prompt(second))):
        loads = graph.router.loads.sequences.project((), graph.router.loads.sequences.ranks(), 0.0)
        assert (list(loads.prefill_tokens), list(loads.requests)) == ([left], [1])


@pytest.mark.parametrize(("tracks", "expected"), [(True, [1, 4, 4]), (False, [1, 1, 1])])
async def test_all_blocks_an_item_fills_are_added(tracks: bool, expected: list[int]) -> None:
    """One item may fill several."""
    graph = Graph(tokens(0, 9, 1), worker_ids=[1], router_track_output_blocks=tracks)
    ranks = graph.router.loads.sequences.ranks()
    seen = []
    async with await graph.engine.generate(Context(prompt(4))) as stream:
        async for _ in stream:
            seen.append(graph.router.loads.sequences.project((), ranks, 0.0).decode_blocks[0])
    assert seen == expected


async def test_blocks_weigh_less_the_nearer_the_expected_end() -> None:
    graph = Graph(tokens(8), worker_ids=[1], router_track_output_blocks=True)
    received = prompt(4, routing=RoutingHints(expected_output_tokens=16))
    async with await graph.engine.generate(Context(received)) as stream:
        await stream.__anext__()
        (blocks,) = graph.router.loads.sequences.project((), graph.router.loads.sequences.ranks(), 0.0).decode_blocks
    assert blocks == 2  # three of half a block each, rounded half up
    assert [output_weight(n, 10) for n in (0, 5, 10, 20)] == [1.0, 0.5, 0.0, 0.0]
    assert (output_weight(5, None), output_weight(5, 0)) == (None, 0.0)


@pytest.mark.parametrize(
    "item",
    [
        Annotated[LLMEngineOutput].from_error(Disconnected("lost")),
        Annotated(LLMEngineOutput.error("broken")),
        Annotated(LLMEngineOutput.cancelled()),
    ],
    ids=["error item", "finish error", "finish cancelled"],
)
async def test_a_failure_is_shown_when_the_request_is_off_the_account(item: Annotated[LLMEngineOutput]) -> None:
    graph = Graph([*tokens(1), item], worker_ids=[1])
    async with await graph.engine.generate(Context(prompt(), id="r")) as stream:
        await stream.__anext__()
        assert graph.booked == 1
        assert await stream.__anext__() is item
        assert graph.booked == 0
        async with await graph.engine.generate(Context(prompt(), id="r")):
            assert graph.booked == 1


async def test_an_orderly_last_item_does_not_release() -> None:
    graph = Graph([Annotated(LLMEngineOutput.length())])
    async with await graph.engine.generate(Context(prompt())) as stream:
        await stream.__anext__()
        assert graph.booked == 1


async def test_a_raise_reaches_the_reader_when_the_request_is_off_the_account() -> None:
    graph = Graph([*tokens(1), Fail(BackendError("broken"))])
    async with await graph.engine.generate(Context(prompt())) as stream:
        with pytest.raises(BackendError):
            async for _ in stream:
                pass
        assert graph.booked == 0


@pytest.mark.parametrize("step", ["finish_prefill", "grow", "release"])
async def test_an_account_that_cannot_be_kept_does_not_disturb_the_answer(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step is tried once, whether or not it fails."""
    graph, tried = Graph(tokens(0, 1, 1), router_track_output_blocks=True), []

    def fails(*_: Any) -> None:
        tried.append(step)
        raise ValueError("broken account")

    monkeypatch.setattr(LoadBook, step, fails)
    assert [len(item.data.token_ids) for item in await graph.send(prompt())] == [0, 1, 1]
    assert (tried, "broken account" in caplog.text) == ([step], True)


async def test_a_rank_other_than_the_first_is_sent_too() -> None:
    engine = ScriptedEngine(tokens(1))
    workers: Workers[Any, Any] = static_workers({1: engine})
    health = published({1: ModelRuntimeConfig(data_parallel_start_rank=3)})
    router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=BLOCK, health=health)
    graph = KvPushRouter(router) >> PushRouter(workers)
    for hints in (None, RoutingHints(backend_instance_id=1), RoutingHints(backend_instance_id=1, dp_rank=3)):
        times = tracker()
        await (await graph.generate(Context(prompt(routing=hints, tracker=times)))).collect()
        sent = engine.requests[-1].payload.routing
        assert (sent.dp_rank, times.decode_worker.dp_rank) == (3, 3)


WAYS_OUT = ["end", "close", "stop", "kill", "drop unread", "error item", "raise", "dispatch fails", "worker leaves"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # dropped on purpose
@pytest.mark.parametrize("way", WAYS_OUT)
async def test_a_reservation_is_released_once_on_every_way_out(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {
        "error item": Annotated[LLMEngineOutput].from_error(Disconnected("lost")),
        "raise": Fail(BackendError("no")),
    }
    waits = way in ("stop", "kill", "worker leaves")
    graph = Graph([*tokens(1), *([Stall()] if waits else []), *([ends[way]] if way in ends else []), *tokens(1)])
    released, release = [], LoadBook.release

    def counted(book: LoadBook, reservation: Reservation) -> bool:
        released.append(reservation.request_id)
        return release(book, reservation)

    monkeypatch.setattr(LoadBook, "release", counted)
    request = Context(prompt(), id="r")
    if way == "dispatch fails":
        for engine in graph.engines.values():
            engine._fails = CannotConnect("not now")
        with pytest.raises(CannotConnect):
            await graph.engine.generate(request)
    else:
        stream = await graph.engine.generate(request)
        if way == "drop unread":
            del stream
            gc.collect(0)
            await anyio.wait_all_tasks_blocked()
        else:
            with suppress(BackendError):
                async with stream:
                    await stream.__anext__()
                    if way == "worker leaves":
                        graph.router.loads.set_workers([1, 2, 3], {})
                    if waits:
                        request.kill() if way == "kill" else request.stop()
                    if way != "close":
                        async for _ in stream:
                            pass
    assert (released, graph.booked) == (["r"], 0)


async def test_an_id_that_is_booked_is_an_error_and_keeps_its_booking() -> None:
    graph = Graph([Stall()])
    async with await graph.engine.generate(Context(prompt(), id="r")):
        with pytest.raises(DuplicateRequest):
            await graph.engine.generate(Context(prompt(), id="r"))
        assert graph.booked == 1


async def test_a_stop_frees_the_request_when_its_stream_has_ended() -> None:
    """The tokens that the worker had made are delivered."""
    graph, request = Graph([*tokens(1), Stall()]), Context(prompt())
    async with await graph.engine.generate(request) as stream:
        await stream.__anext__()
        request.stop()
        assert [item async for item in stream] == []
        assert graph.booked == 0


# -- what is published


async def test_the_tracker_records_the_choice() -> None:
    graph, times = Graph(), tracker()
    await graph.send(prompt(8))
    await graph.send(prompt(16, tracker=times))
    assert (times.kv_hit_rate, times.isl_tokens, times.cached_tokens, times.osl_tokens) == (0.5, 16, 8, 1)
    (worker_id,) = graph.received
    info = times.worker_info()
    assert info is not None
    assert (info.prefill_worker_id, info.decode_worker_id, info.decode_dp_rank) == (worker_id, worker_id, 0)
    assert times.router_queue_depth == 0


async def test_a_choice_is_logged_in_the_shape_that_tools_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "operators.kv.operator")
    graph = Graph(worker_ids=[7])
    for received in (prompt(8), prompt(18), named(backend_instance_id=7), prompt(annotations=["query_instance_id:"])):
        await graph.send(received)
    assert caplog.messages == [
        "[ROUTING] Best: worker_7 dp_rank=0 with 0/2 blocks overlap",
        "[ROUTING] Best: worker_7 dp_rank=0 with 2/5 blocks overlap",
    ]


async def test_the_reasons_come_first_if_requested() -> None:
    graph = Graph()
    event, answer = await graph.send(prompt(annotations=[ROUTER_DECISION]))
    assert (event.event, answer.data.token_ids) == (ROUTER_DECISION, [0])
    reasons = json.loads(event.comment[0])
    ((worker_id, _),) = graph.received.items()
    assert reasons["worker_id"] == worker_id
    assert [one["rank"] for one in reasons["candidates"]] == [[1, 0], [2, 0], [3, 0]]
    assert {one["cost"] for one in reasons["candidates"]} == {reasons["cost"]} == {4.0}


async def test_reasons_that_are_not_finite_are_omitted_and_the_request_goes_on() -> None:
    graph = Graph(prefill_load_scale=1.7e308)
    event, answer = await graph.send(prompt(annotations=[ROUTER_DECISION]))
    reasons = json.loads(event.comment[0])
    assert ("cost" in reasons, reasons["margin"], reasons["prompt_blocks"]) == (False, 0.0, 2)
    assert [sorted(one)[-1] for one in reasons["candidates"]] == ["rank"] * 3
    assert (answer.data.token_ids, graph.booked) == ([0], 0)


async def test_reasons_that_cannot_be_written_leave_no_booking(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()

    def broken(_: Decision) -> Any:
        raise ValueError("no reasons")

    monkeypatch.setattr(Decision, "report", broken)
    with pytest.raises(ValueError, match="no reasons"):
        await graph.send(prompt(annotations=[ROUTER_DECISION]))
    assert (graph.received, graph.booked) == ({}, 0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # dropped on purpose
async def test_of_a_dropped_stream_the_tracker_records_what_had_come() -> None:
    graph, times = Graph(tokens(1, 1, 1)), tracker()
    stream = await graph.engine.generate(Context(prompt(tracker=times)))
    for _ in range(2):
        await stream.__anext__()
    del stream
    gc.collect(0)
    await anyio.wait_all_tasks_blocked()
    assert (graph.booked, times.osl_tokens, times.total_time_ms) == (0, 2, 0.0)


# -- contracts


async def test_the_operator_contract() -> None:
    def made() -> KvPushRouter:
        workers: Workers[Any, Any] = static_workers({1: ScriptedEngine([]), 2: ScriptedEngine([])})
        return KvPushRouter(kv_router(workers, block_size_tokens=BLOCK, rng=Random(1)))

    await check_operator(made, request=prompt(), items=tokens(*[1] * 40), bad_request=named(backend_instance_id=9))


async def test_the_operator_contract_in_sessions() -> None:
    def made() -> KvPushRouter:
        workers: Workers[Any, Any] = static_workers({1: ScriptedEngine([])})
        return KvPushRouter(kv_router(workers, block_size_tokens=BLOCK, session_ttl_s=60))

    await check_operator(made, request=prompt(), items=tokens(*[1] * 40), bad_request=named(backend_instance_id=9))


# -- DirectRouter


@pytest.mark.parametrize("hints", [{"decode_worker_id": 2, "backend_instance_id": 1}, {"backend_instance_id": 2}])
async def test_direct_sends_to_the_named_worker_unchanged(hints: dict[str, int]) -> None:
    graph, request = Graph(), named(**hints)
    await (await (DirectRouter() >> PushRouter(graph.workers)).generate(Context(request))).collect()
    ((worker_id, (sent,)),) = graph.received.items()
    assert worker_id == 2
    assert sent.payload is request


@pytest.mark.parametrize("request_", [prompt(), named(prefill_worker_id=1)])
async def test_direct_routing_needs_a_named_worker(request_: PreprocessedRequest) -> None:
    graph = Graph()
    with pytest.raises(
        InvalidArgument, match=r"^Worker ID required \(--direct-route\).*decode_worker_id.*backend_inst"
    ):
        await (DirectRouter() >> PushRouter(graph.workers)).generate(Context(request_))
