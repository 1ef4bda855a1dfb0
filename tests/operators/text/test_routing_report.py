"""A request that wants its workers or its timing finds them on the first and the last item; no other pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from attrs import evolve

from operators import Detokenize, KvPushRouter, Migration, Model, Preprocess, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.text.routing_report import filled
from pipeline import Annotated, AnyContext, Context, Disconnected, InvalidArgument, ResponseStream, link
from pipeline.llm import tracker_of
from pipeline.network import static_workers
from pipeline.protocols import BackendOutput, FinishReason, LLMEngineOutput, RequestPhase, RequestTracker, RoutingData
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.protocols.timing import TimingInfo, WorkerIdInfo
from pipeline.testing import Fail, ScriptedEngine, Wait, check_operator
from pipeline.wire import from_plain

NOW_MS = 1_700_000_000_000
BOTH = {"extra_fields": ["timing", "worker_id"]}
MODEL = Model.byte_level("m")


def chat(**fields: Any) -> ChatCompletionRequest:
    plain = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return from_plain(plain, ChatCompletionRequest)


def token(**fields: Any) -> Annotated[Any]:
    return Annotated(BackendOutput([1], ["x"], "x", **fields))


def last(**fields: Any) -> Annotated[Any]:
    return token(finish_reason=FinishReason.LENGTH, **fields)


ITEMS: list[Any] = [Wait(2), token(), Wait(1), token(), Wait(1), last()]


def tracked(**options: Any) -> Preprocess:
    return Preprocess(MODEL, **{"wall_ms": lambda: NOW_MS, **options})


class Worker(ScriptedEngine):
    """One that a router has recorded, with what else it records."""

    def __init__(self, script: Any, also: Callable[[RequestTracker], object] = lambda _: None) -> None:
        super().__init__(script)
        self._also = also

    async def generate(self, request: AnyContext) -> ResponseStream[Any]:
        request.payload.tracker.record_worker(7, 1, "decode")
        self._also(request.payload.tracker)
        return await super().generate(request)


async def answer(request: Any, below: Any, **options: Any) -> list[Any]:
    """The items that carry data."""
    stream = await link(tracked(**options), below).generate(Context(request))
    return [item for item in await stream.collect() if item.data is not None]


def routing_data_of(items: list[Any]) -> list[RoutingData | None]:
    return [item.data.routing_data for item in items]


WORKERS = WorkerIdInfo(7, 1, 7, 1)


# -- the tracker


async def test_without_a_wall_clock_nothing_is_tracked() -> None:
    below, request = ScriptedEngine(ITEMS), Context(chat(nvext=BOTH))
    items = await (await link(Preprocess(MODEL), below).generate(request)).collect()
    assert items == [step for step in ITEMS if not isinstance(step, Wait)]
    assert below.requests[0].payload.tracker is None
    assert tracker_of(request) is None


async def test_a_request_has_one_tracker_for_all_its_workers() -> None:
    below, request = ScriptedEngine(ITEMS), Context(chat())
    await (await link(tracked(), below).generate(request)).collect()
    tracker = tracker_of(request)
    assert tracker is not None
    assert tracker is below.requests[0].payload.tracker
    assert (tracker.received_ms, tracker.isl_tokens, tracker.cached_tokens) == (NOW_MS, 5, None)


async def test_the_request_is_received_before_anything_is_done_with_it() -> None:
    clock: Iterator[int] = iter([NOW_MS])
    with pytest.raises(InvalidArgument):
        await answer(chat(temperature=9), ScriptedEngine([]), wall_ms=lambda: next(clock))
    assert list(clock) == []


async def test_tokenizing_is_timed_by_the_finer_clock() -> None:
    seen: list[float | None] = []
    for prompt in ("four", [1, 2]):
        clock = iter([1.0, 1.5])
        below = ScriptedEngine(ITEMS)
        await answer(CompletionRequest(model="m", prompt=prompt), below, perf_s=lambda clock=clock: next(clock))
        seen.append(below.requests[0].payload.tracker.tokenize_latency_s)
    assert seen == [0.5, None]


# -- requests that want it


@pytest.mark.parametrize(
    "nvext", [None, {}, {"extra_fields": ["engine_data", "token_ids"]}, {"annotations": ["query_instance_id"]}]
)
async def test_a_request_without_nvext_has_the_next_stages_own_stream(nvext: Any) -> None:
    taken: list[ResponseStream[Any]] = []

    class Spy(ScriptedEngine):
        async def generate(self, request: AnyContext) -> ResponseStream[Any]:
            taken.append(await super().generate(request))
            return taken[0]

    async with await link(tracked(), Spy([])).generate(Context(chat(nvext=nvext))) as stream:
        assert stream is taken[0]


@pytest.mark.parametrize(
    ("nvext", "workers", "times"),
    [
        (BOTH, True, True),
        ({"extra_fields": ["timing"]}, False, True),
        ({"extra_fields": ["worker_id"]}, True, False),
        ({"annotations": ["query_instance_id:"]}, True, False),
    ],
)
async def test_each_request_gets_the_extra_fields_it_wants(nvext: Any, workers: bool, times: bool) -> None:
    first, middle, end = routing_data_of(await answer(chat(nvext=nvext), Worker(ITEMS)))
    assert first == (RoutingData(worker_id=WORKERS) if workers else None)
    assert middle is None
    timing = TimingInfo(NOW_MS, ttft_ms=2000.0, total_time_ms=4000.0)
    assert end == RoutingData(timing if times else None, WORKERS if workers else None)


async def test_where_no_worker_is_known_there_is_timing_only() -> None:
    first, _, end = routing_data_of(await answer(chat(nvext=BOTH), ScriptedEngine(ITEMS)))
    assert first is None
    assert end == RoutingData(TimingInfo(NOW_MS, ttft_ms=2000.0, total_time_ms=4000.0))


async def test_an_answer_of_one_item_has_all_in_it() -> None:
    (only,) = routing_data_of(await answer(chat(nvext=BOTH), Worker([Wait(3), last()])))
    assert only == RoutingData(TimingInfo(NOW_MS, ttft_ms=3000.0, total_time_ms=3000.0), WORKERS)


async def test_an_answer_without_tokens_has_no_first_one() -> None:
    empty = Annotated(BackendOutput([], [], finish_reason=FinishReason.STOP))
    (only,) = routing_data_of(await answer(chat(nvext=BOTH), Worker([Wait(3), empty])))
    assert only == RoutingData(TimingInfo(NOW_MS, total_time_ms=3000.0), WORKERS)


async def test_an_answer_that_just_ends_has_no_timing() -> None:
    assert routing_data_of(await answer(chat(nvext=BOTH), Worker([token(), token()]))) == [
        RoutingData(worker_id=WORKERS),
        None,
    ]


async def test_events_pass_untouched_and_are_no_first_item() -> None:
    note: Annotated[Any] = Annotated(BackendOutput([1, 2], ["a", "b"]), None, "note", ["1"])
    stream = await link(tracked(), Worker([note, *ITEMS])).generate(
        Context(chat(nvext={**BOTH, "annotations": ["request_id"]}))
    )
    items: list[Any] = await stream.collect()
    announced, same, first = items[:3]
    assert announced.event == "request_id"
    assert same is note
    assert first.data.routing_data == RoutingData(worker_id=WORKERS)


# -- the time of an answer


@pytest.mark.parametrize("early", [0, 1])
async def test_the_time_is_that_of_the_request_and_comes_with_its_last_choice(early: int) -> None:
    late = 1 - early
    choices = [token(index=early), Wait(1), last(index=early), Wait(2), token(index=late), last(index=late)]
    found = routing_data_of(await answer(chat(nvext=BOTH, n=2), Worker(choices)))
    assert found[:-1] == [RoutingData(worker_id=WORKERS), None, None]
    assert found[-1] == RoutingData(TimingInfo(NOW_MS, ttft_ms=0.0, total_time_ms=3000.0), WORKERS)


async def test_an_end_noted_before_the_last_item_is_moved_there() -> None:
    """Routers note it at every block of output."""

    seen: list[RequestTracker] = []

    def notes(tracker: RequestTracker) -> None:
        tracker.record_osl(1)
        tracker.record_finish()
        seen.append(tracker)

    end = routing_data_of(await answer(chat(nvext=BOTH), Worker(ITEMS, notes)))[-1]
    assert end is not None
    assert end.timing is not None
    assert (end.timing.total_time_ms, seen[0].osl_tokens) == (4000.0, 3)


async def test_a_decode_below_no_kv_router_has_its_transfer_estimated() -> None:
    def prefilled(tracker: RequestTracker) -> None:
        tracker.record_first_token()
        tracker.record_prefill_complete()
        tracker.phase = RequestPhase.DECODE

    end = routing_data_of(await answer(chat(nvext=BOTH), Worker(ITEMS, prefilled)))[-1]
    assert end is not None
    timing = TimingInfo(NOW_MS, ttft_ms=0.0, total_time_ms=4000.0, kv_transfer_estimated_latency_ms=2000.0)
    assert end.timing == timing


async def test_the_answer_is_whole_though_several_workers_gave_it() -> None:
    first = [Annotated(LLMEngineOutput([n])) for n in b"abc"]
    rest = [Annotated(LLMEngineOutput([100])), Annotated(LLMEngineOutput([101], finish_reason=FinishReason.LENGTH))]
    engines = {
        i: ScriptedEngine(lambda p: rest if len(p.token_ids) > 5 else [*first, Fail(Disconnected("gone"))])
        for i in (1, 2)
    }
    push = PushRouter(static_workers(engines), cooldown_s=0)
    request = Context(chat(nvext=BOTH))
    graph = tracked() >> Migration(1) >> Detokenize(MODEL) >> push
    items = await (await graph.generate(request)).collect()
    assert "".join(item.data.text or "" for item in items if item.data) == "abcde"
    tracker = tracker_of(request)
    assert tracker is not None
    assert tracker.osl_tokens == 5


# -- what an item holds already


async def test_fields_of_an_item_stay_and_its_gaps_are_filled() -> None:
    own = RoutingData(TimingInfo(5, ttft_ms=1.0), WorkerIdInfo(decode_worker_id=9), [1])
    items = [token(routing_data=own), token(routing_data=own), last(routing_data=own)]
    first, middle, end = routing_data_of(await answer(chat(nvext=BOTH), Worker([Wait(2), *items])))
    workers = WorkerIdInfo(7, 1, 9, None)
    assert first == evolve(own, worker_id=workers)
    assert middle is own
    assert end == RoutingData(TimingInfo(5, ttft_ms=1.0, total_time_ms=2000.0), workers, [1])
    assert own == RoutingData(TimingInfo(5, ttft_ms=1.0), WorkerIdInfo(decode_worker_id=9), [1])


@pytest.mark.parametrize(
    ("own", "whole"),
    [
        (WorkerIdInfo(), WorkerIdInfo(1, 2, 3, 4)),
        (WorkerIdInfo(1, None, 3, None), WorkerIdInfo(1, 2, 3, 4)),
        (WorkerIdInfo(1, 0, 3, 0), WorkerIdInfo(1, 0, 3, 0)),
        (WorkerIdInfo(8, None, 9, None), WorkerIdInfo(8, None, 9, None)),
        (WorkerIdInfo(None, None, 9, 9), WorkerIdInfo(1, 2, 9, 9)),
    ],
)
def test_a_rank_is_never_put_to_another_worker(own: WorkerIdInfo, whole: WorkerIdInfo) -> None:
    assert filled(RoutingData(worker_id=own), RoutingData(worker_id=WorkerIdInfo(1, 2, 3, 4))).worker_id == whole


# -- below a KV router


class Kv:
    """Workers 1 and 2 behind a KV router, blocks of 4 tokens; both generate two letters a second."""

    def __init__(self) -> None:
        letters = [Annotated(LLMEngineOutput(list(pair))) for pair in (b"ab", b"cd", b"ef")]
        script = [Wait(2), letters[0], Wait(1), letters[1], Wait(1), letters[2], Wait(1), self.end()]
        workers = static_workers({i: ScriptedEngine(script) for i in (1, 2)})
        self.router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, rng=Random(1))
        self.graph = tracked() >> Detokenize(MODEL) >> KvPushRouter(self.router) >> PushRouter(workers)

    def end(self) -> Annotated[Any]:
        return Annotated(LLMEngineOutput([], finish_reason=FinishReason.LENGTH))

    async def send(self, **nvext: Any) -> list[Any]:
        items = await (await self.graph.generate(Context(chat(nvext=nvext)))).collect()
        return routing_data_of([item for item in items if item.data is not None])


async def test_a_kv_router_fills_in_whatever_there_is() -> None:
    kv = Kv()
    first, *between, end = await kv.send(**BOTH)
    worker_id = first.worker_id.decode_worker_id
    assert worker_id in (1, 2)
    assert first == RoutingData(worker_id=WorkerIdInfo(worker_id, 0, worker_id, 0))
    assert between == [None, None]
    assert end.worker_id == first.worker_id
    assert end.timing == TimingInfo(NOW_MS, 0.0, 2000.0, 2000.0, 5000.0, 0.0, 0)


async def test_a_query_is_answered_with_workers_and_tokens() -> None:
    (only,) = await Kv().send(annotations=["query_instance_id:"], extra_fields=["timing"])
    assert only.worker_id.decode_worker_id in (1, 2)
    assert (only.token_ids, only.timing) == (list(b"hello"), None)


# -- the contract


@pytest.mark.parametrize("nvext", [None, BOTH, {**BOTH, "annotations": ["formatted_prompt"]}])
async def test_the_operator_contract_holds(nvext: Any) -> None:
    items = [token() for _ in range(40)]
    await check_operator(tracked, request=chat(nvext=nvext), items=items, bad_request=chat(temperature=9))
