"""Tokens that an engine offers: each goes one way, in order, and all but ordinary ones behind the first are yielded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest
from attrs import evolve
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engines import GenerateContext
from engines.adapter import RequestAdapter
from engines.mocker import MockEngine, MockEngineArgs
from engines.ready_tokens import ReadyTokens
from engines.standalone import as_engine
from engines.worker.probe import IdleProbe, TrafficObserver
from operators import Detokenize, Model
from pipeline import Annotated, Context, Gate, ResponseStream
from pipeline.protocols import (
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from pipeline.telemetry import Metrics
from pipeline.testing import OpenStreams
from tests.engines.worlds import EndsOnKill
from tests.pipeline.network.tcp.worlds import OPTIONS, pair
from tests.pipeline.network.worlds import WHERE, WorldKind, two_runtimes

KIND: Any = Annotated[LLMEngineOutput]
REQUEST = PreprocessedRequest([1, 2, 3], stop_conditions=StopConditions(max_tokens=100))


class Scheduler:
    """An engine whose tokens the test makes, at a time when nothing else runs."""

    def __init__(self) -> None:
        self.ready: ReadyTokens[int, int] = ReadyTokens()
        self.offers: list[tuple[int, bool]] = []
        self.engine = EndsOnKill(self.generate)

    async def make(self, *token_ids: int, end: FinishReason | None = None) -> None:
        """Make these tokens in one step, and let all tasks run."""
        for token_id in token_ids:
            before = self.ready.taken
            self.ready.put(0, [token_id], offers=end is None)
            self.offers.append((token_id, self.ready.taken > before))
        if end is not None:
            self.ready.put(0, [], end)
        await anyio.wait_all_tasks_blocked()

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        ready = self.ready
        ready.take_lone = context.offer_token
        forget = context.control.on_stop(ready.news.wake)
        try:
            while True:
                while ready.waiting and not context.is_stopped:
                    bundle = ready.take()
                    yield LLMEngineOutput(bundle.tokens, finish_reason=bundle.end)
                    if bundle.end is not None:
                        return
                if context.is_stopped:
                    yield LLMEngineOutput.cancelled()
                    return
                await ready.news.wait()
        finally:
            forget()


class Reader:
    """Reads a stream that is fed to it, and notes what comes with its way."""

    def __init__(self, stream: ResponseStream[Any]) -> None:
        self.stream, self.gate = stream, Gate()
        self.seen: list[str] = []
        self.fails: Exception | None = None
        self.pause: anyio.Event | None = None

    def take(self, token_id: int, index: int | None) -> bool:
        if self.fails is not None:
            raise self.fails
        assert index is None
        if token_id >= 900:
            return False
        self.seen.append(f"fed {token_id}")
        return True

    async def read(self) -> None:
        async with self.stream:
            async for item in self.stream:
                output = item.data
                if item.is_error:
                    self.seen.append(f"failed: {item.extract_error()}")
                elif output.finish_reason is None:
                    self.seen.append(f"read {output.token_ids}")
                else:
                    self.seen.append(f"ended {output.token_ids} {output.finish_reason}")
                if self.pause is not None:
                    await self.pause.wait()


@asynccontextmanager
async def reading(
    request: PreprocessedRequest = REQUEST, context: Context[Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Scheduler, Reader]]:
    """Give an engine and a reader of its answer that waits for the first chunk."""
    scheduler, sent = Scheduler(), Context(request) if context is None else context
    reader = Reader(await RequestAdapter(scheduler.engine, **options).generate(sent))
    assert reader.stream.feed(reader.take, reader.gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.read)
        await anyio.wait_all_tasks_blocked()
        yield scheduler, reader
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert scheduler.engine.open == 0


async def test_lone_tokens_behind_the_first_are_taken_and_all_others_read_in_order(open_streams: OpenStreams) -> None:
    async with reading() as (scheduler, reader):
        for made in ([1], [2], [3], [900], [901, 902], [4]):
            await scheduler.make(*made)
        await scheduler.make(5, end=FinishReason.STOP)
        assert reader.seen == [
            "read [1]", "fed 2", "fed 3", "read [900]", "read [901, 902]", "fed 4", "ended [5] stop",
        ]  # fmt: skip


async def test_of_tokens_of_one_step_those_that_nothing_waits_before_are_taken(open_streams: OpenStreams) -> None:
    async with reading() as (scheduler, reader):
        await scheduler.make(1)
        await scheduler.make(2, 3, 900, 4, 5)
        await scheduler.make(6)
        assert reader.seen == ["read [1]", "fed 2", "fed 3", "read [900, 4, 5]", "fed 6"]


async def test_nothing_is_taken_while_the_gate_is_shut_or_the_reader_is_busy(open_streams: OpenStreams) -> None:
    async with reading() as (scheduler, reader):
        reader.gate.is_open = False
        await scheduler.make(1)
        await scheduler.make(2)
        reader.gate.is_open, reader.pause = True, anyio.Event()
        await scheduler.make(900)
        await scheduler.make(3)
        await scheduler.make(4)
        reader.pause.set()
        await anyio.wait_all_tasks_blocked()
        await scheduler.make(5)
        assert reader.seen == ["read [1]", "read [2]", "read [900]", "read [3, 4]", "fed 5"]


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_is_taken_after_a_stop_or_a_kill(how: str, open_streams: OpenStreams) -> None:
    context = Context(REQUEST)
    async with reading(context=context) as (scheduler, reader):
        await scheduler.make(1)
        await scheduler.make(2)
        getattr(context, how)()
        await scheduler.make(3)
        assert scheduler.offers[-1] == (3, False)
        assert reader.seen == ["read [1]", "fed 2"] + ["ended [] cancelled"] * (how == "stop")


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (evolve(REQUEST, sampling_options=SamplingOptions(n=2)), {}),
        (REQUEST, {"details": True}),
    ],
    ids=["two choices", "details"],
)
async def test_where_each_chunk_is_looked_at_none_is_taken(
    request_: PreprocessedRequest, options: dict[str, Any], open_streams: OpenStreams
) -> None:
    async with reading(request_, **options) as (scheduler, reader):
        for token_id in (1, 2, 3):
            await scheduler.make(token_id)
        assert reader.seen == ["read [1]", "read [2]", "read [3]"]


async def test_a_failure_of_what_takes_a_token_ends_the_stream_and_not_the_engine(open_streams: OpenStreams) -> None:
    async with reading() as (scheduler, reader):
        await scheduler.make(1)
        reader.fails = ValueError("no room")
        await scheduler.make(2)
        assert scheduler.offers[-1] == (2, False)
        assert reader.seen == ["read [1]", "failed: no room"]


async def test_without_a_reader_that_is_fed_nothing_is_taken(open_streams: OpenStreams) -> None:
    scheduler = Scheduler()
    reader = Reader(await RequestAdapter(scheduler.engine).generate(Context(REQUEST)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.read)
        await anyio.wait_all_tasks_blocked()
        for token_id in (1, 2):
            await scheduler.make(token_id)
        await scheduler.make(end=FinishReason.STOP)
    assert reader.seen == ["read [1]", "read [2]", "ended [] stop"]
    assert not any(taken for _, taken in scheduler.offers)


# -- between processes


async def test_offered_tokens_leave_a_worker_within_the_window_of_their_reader(open_streams: OpenStreams) -> None:
    scheduler, count = Scheduler(), 40
    async with pair(evolve(OPTIONS, window_items=8)) as world:
        serving, remote = await world.serve(RequestAdapter(scheduler.engine), KIND)
        async with await remote.generate(Context(REQUEST)) as stream:
            await anyio.wait_all_tasks_blocked()
            for token_id in range(count):
                await scheduler.make(token_id)
            taken = sum(taken for _, taken in scheduler.offers)
            assert taken == 7, "the first was yielded, and eight are the window"
            await scheduler.make(end=FinishReason.STOP)
            items = [item.data async for item in stream]
        assert [token_id for item in items for token_id in item.token_ids] == list(range(count))
        assert serving.running == 0


async def test_offered_tokens_are_fed_at_the_other_side(open_streams: OpenStreams) -> None:
    scheduler = Scheduler()
    async with pair() as world, anyio.create_task_group() as tasks:
        _, remote = await world.serve(RequestAdapter(scheduler.engine), KIND)
        reader = Reader(await remote.generate(Context(REQUEST)))
        assert reader.stream.feed(reader.take, reader.gate)
        tasks.start_soon(reader.read)
        await anyio.wait_all_tasks_blocked()
        for token_id in range(6):
            await scheduler.make(token_id)
            await anyio.sleep(0.1)
        await scheduler.make(end=FinishReason.STOP)
        await anyio.sleep(0.1)
        assert reader.seen == [*(f"fed {token_id}" for token_id in range(6)), "ended [] stop"]
        assert scheduler.offers == [(0, False), *((token_id, True) for token_id in range(1, 6))]


async def test_a_caller_that_reads_no_tokens_gets_whole_items(open_streams: OpenStreams) -> None:
    scheduler = Scheduler()
    async with pair() as world:
        _, remote = await world.serve(RequestAdapter(scheduler.engine), Any)
        async with await remote.generate(Context(REQUEST)) as stream:
            await anyio.wait_all_tasks_blocked()
            for token_id in range(3):
                await scheduler.make(token_id)
            await scheduler.make(end=FinishReason.STOP)
            items = [item async for item in stream]
    assert [item["data"]["token_ids"] for item in items] == [[0], [1], [2], []]


async def test_what_a_graph_adds_to_tokens_reaches_the_caller_of_its_worker(open_streams: OpenStreams) -> None:
    scheduler = Scheduler()
    async with pair() as world:
        served = Detokenize(Model.byte_level("m")) >> RequestAdapter(scheduler.engine)
        _, remote = await world.serve(served, KIND)
        async with await remote.generate(Context(REQUEST)) as stream:
            await anyio.wait_all_tasks_blocked()
            for token_id in b"abc":
                await scheduler.make(token_id)
            await scheduler.make(end=FinishReason.STOP)
            items = [item.data async for item in stream]
    assert "".join(item.text or "" for item in items) == "abc"


# -- what looks at streams on their way


class Noted:
    """In the place of a probe: whether items came since the last look."""

    def __init__(self) -> None:
        self.is_flowing = False
        self.observed = 0

    def observe(self) -> None:
        self.observed += 1


async def test_a_probe_observes_tokens_that_are_taken(open_streams: OpenStreams) -> None:
    scheduler, probe = Scheduler(), Noted()
    observed: Any = TrafficObserver(RequestAdapter(scheduler.engine), cast(IdleProbe, probe))
    reader = Reader(await observed.generate(Context(REQUEST)))
    assert reader.stream.feed(reader.take, reader.gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.read)
        await anyio.wait_all_tasks_blocked()
        await scheduler.make(1)
        assert (probe.observed, probe.is_flowing) == (1, False)
        await scheduler.make(2)
        assert (reader.seen[-1], probe.observed, probe.is_flowing) == ("fed 2", 1, True)
        probe.is_flowing = False
        await scheduler.make(900)
        assert (reader.seen[-1], probe.is_flowing) == ("read [900]", True)
        await scheduler.make(end=FinishReason.STOP)
    assert probe.observed == 2


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("world", ["in process", "tcp"])
async def test_tokens_that_are_taken_are_counted_for_their_instance(
    world: WorldKind, feeds: bool, open_streams: OpenStreams
) -> None:
    scheduler, recorded = Scheduler(), InMemoryMetricReader()
    meter = MeterProvider([recorded], shutdown_on_exit=False).get_meter("test")
    async with (
        two_runtimes(world, metrics=Metrics(meter, family="component")) as (worker, caller),
        anyio.create_task_group() as tasks,
    ):
        await worker.serve(WHERE, RequestAdapter(scheduler.engine), instance_id=1)
        workers = caller.workers(WHERE, KIND)
        await workers.wait_for_instances()
        reader = Reader(await workers.engine(1).generate(Context(REQUEST)))
        if feeds:
            assert reader.stream.feed(reader.take, reader.gate)
        tasks.start_soon(reader.read)
        await anyio.sleep(0.1)
        for token_id in (1, 2, 3, 900, 4):
            await scheduler.make(token_id)
            await anyio.sleep(0.1)
        await scheduler.make(end=FinishReason.STOP)
    assert any(taken for _, taken in scheduler.offers) is (feeds or world == "tcp")
    data = recorded.get_metrics_data()
    assert data is not None
    points = {metric.name: metric.data.data_points[0] for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    counted: Any = points["dynamo_component_response_bytes_total"]
    assert counted.value == 4 * 5


# -- the mock engine


@pytest.mark.parametrize(
    ("changed", "is_fed"),
    [
        ({}, True),
        ({"sampling_options": SamplingOptions(n=2)}, False),
        ({"output_options": OutputOptions(logprobs=1)}, False),
    ],
    ids=["tokens", "two choices", "log probabilities"],
)
async def test_the_mock_engine_gives_the_same_answer_fed_and_read(
    changed: dict[str, Any], is_fed: bool, open_streams: OpenStreams
) -> None:
    request = evolve(REQUEST, stop_conditions=StopConditions(max_tokens=20), **changed)
    found: list[tuple[list[int], Any]] = []
    fed: list[int] = []
    for feeds in (False, True):
        tokens: list[int] = []
        usage: Any = None

        def take(token_id: int, index: int | None, tokens: list[int] = tokens) -> bool:
            fed.append(token_id)
            tokens.append(token_id)
            return True

        engine = as_engine(MockEngine(MockEngineArgs()))
        async with engine, await engine.generate(Context(request)) as stream:
            if feeds:
                stream.feed(take, Gate())
            async for item in stream:
                output = item.ok().data
                assert output is not None
                tokens += output.token_ids
                usage = output.completion_usage or usage
        found.append((tokens, usage))
    assert found[0] == found[1]
    assert found[0][1].completion_tokens == len(found[0][0])
    assert len(fed) == (18 if is_fed else 0), "all but the first and the last"
