"""The standard graph on the embedded runtime: a request, an item, an idle stream, a stop.

With the KV router in it, as `--router kv` puts it there, over static workers: one of them holds the prompt, by its
events or because it was sent there.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, cast

import anyio

from engines import EchoEngine, as_engine
from operators import Detokenize, KvPushRouter, Model, PushRouter
from operators.kv import KvRouterConfig, PromptBlocks, RouterMetrics, kv_router
from pipeline import Annotated, AsyncEngine, Context, Segment
from pipeline.network import Runtime, static_workers
from pipeline.protocols import BackendOutput, LLMEngineOutput, PreprocessedRequest, StopConditions

from .kv_index import Stored
from .measure import Result, best_of

BLOCK_TOKENS = 16
PROMPT_TOKENS = 64 * BLOCK_TOKENS
WORKERS = 4
"""Those a KV router chooses from."""
ITEMS = 20_000
REQUESTS = 2_000
STREAMS = 2_000
STOPS = 200

Graph = Segment[PreprocessedRequest, Annotated[BackendOutput]]
Routed = Segment[PreprocessedRequest, Annotated[LLMEngineOutput]]
AnyGraph = AsyncEngine[PreprocessedRequest, Any]


@asynccontextmanager
async def graph_on_runtime(delay_s: float = 0.0) -> AsyncIterator[Graph]:
    """Detokenize and PushRouter over one echo engine served on the in-process runtime."""
    model = Model.byte_level("echo")
    async with as_engine(EchoEngine(delay_s)) as engine, Runtime.in_process() as runtime:
        await runtime.serve("bench/echo/generate", engine)
        workers = runtime.workers("bench/echo/generate")
        await workers.wait_for_instances()
        yield Detokenize(model) >> PushRouter(workers)


@asynccontextmanager
async def kv_graph(*, by_events: bool) -> AsyncIterator[Graph]:
    """Detokenize, KvPushRouter and PushRouter over echo engines."""
    async with kv_routed(by_events=by_events) as routed:
        yield Detokenize(Model.byte_level("echo")) >> routed


@asynccontextmanager
async def kv_routed(*, by_events: bool) -> AsyncIterator[Routed]:
    """KvPushRouter and PushRouter over echo engines. Metrics are counted and not exported."""
    async with as_engine(EchoEngine()) as engine:
        workers = static_workers(dict.fromkeys(range(WORKERS), engine))
        push = PushRouter(workers)
        with kv_router(
            workers,
            KvRouterConfig(use_kv_events=by_events),
            block_size_tokens=BLOCK_TOKENS,
            health=push.health,
            rng=Random(1),
        ) as kv:
            if kv.lookup.feed is not None:
                kv.lookup.feed.index.apply(_prompt_stored().as_event())
            stage = KvPushRouter(kv, metrics=RouterMetrics(perf_s=perf_counter))
            yield stage >> push


def _prompt_stored() -> Stored:
    blocks = PromptBlocks(request(1).token_ids, BLOCK_TOKENS)
    return Stored(0, 1, None, list(zip(blocks.sequence_hashes, blocks.local_hashes, strict=True)))


def request(max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> PreprocessedRequest:
    """A prompt of letters, answered with exactly `max_tokens` tokens."""
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return PreprocessedRequest(
        model="echo", token_ids=[97 + i % 26 for i in range(prompt_tokens)], stop_conditions=stop
    )


async def _item_floor() -> float:
    """What the echo engine alone would cost, written as a plain generator of the same items."""

    async def items(count: int) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        for i in range(count):
            yield Annotated(LLMEngineOutput([97 + i % 26]))

    async def run() -> int:
        async for _ in items(ITEMS):
            pass
        return ITEMS

    return await best_of(run)


async def answer_items(graph: AnyGraph) -> int:
    """One long answer, read to its end."""
    count = 0
    async with await graph.generate(Context(request(ITEMS))) as stream:
        async for _ in stream:
            count += 1
    return count


async def answer_requests(graph: AnyGraph, payload: PreprocessedRequest, count: int = REQUESTS) -> int:
    """Many answers, one after the other."""
    for _ in range(count):
        async with await graph.generate(Context(payload)) as stream:
            async for _ in stream:
                pass
    return count


async def _per_item(graph: AnyGraph) -> float:
    return await best_of(partial(answer_items, graph))


async def _per_request(graph: AnyGraph) -> float:
    """Its prompt is there before."""
    return await best_of(partial(answer_requests, graph, request(1)))


async def idle_stream_kib(graph: AnyGraph) -> float:
    """Memory of one stream that has given its first item and waits; its prompt and the reader's task not counted."""
    payloads = [request(10, prompt_tokens=16) for _ in range(STREAMS)]
    streams = []
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for payload in payloads:
        stream = await graph.generate(Context(payload))
        await anext(stream)
        streams.append(stream)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for stream in streams:
        await stream.aclose()
    return (after - before) / STREAMS / 1024


async def _stop_to_end_us() -> float:
    """From `stop` to the end of a stream whose engine waits, median."""
    took: list[float] = []

    async with graph_on_runtime(delay_s=60.0) as graph:

        async def read(context: Context[PreprocessedRequest]) -> None:
            async with await graph.generate(context) as stream:
                async for _ in stream:
                    pass
            took.append(perf_counter())

        for _ in range(STOPS):
            context, stopped = Context(request(10)), 0.0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, context)
                await anyio.wait_all_tasks_blocked()
                context.stop()
                stopped = perf_counter()
            took[-1] -= stopped
    return median(took) * 1e6


async def measure() -> list[Result]:
    floor = await _item_floor() * 1e6
    async with as_engine(EchoEngine()) as engine:
        echo = await _per_item(engine) * 1e6
    async with graph_on_runtime() as graph:
        routed = await _per_item(cast("AnyGraph", graph[PushRouter])) * 1e6
        per_item = await _per_item(graph) * 1e6
        per_request = await _per_request(graph) * 1e6
        idle_kib = await idle_stream_kib(graph)
    async with kv_graph(by_events=True) as graph:
        by_events = await _per_request(graph) * 1e6
    async with kv_graph(by_events=False) as graph:
        by_routing = await _per_request(graph) * 1e6
        kv_item = await _per_item(graph) * 1e6
        kv_idle_kib = await idle_stream_kib(graph)
    return [
        Result("item of the echo engine", echo, "µs", floor),
        Result("item through PushRouter and the request plane", routed - echo, "µs"),
        Result("item through Detokenize", per_item - routed, "µs"),
        Result("item through the standard graph, echo engine included", per_item, "µs", floor, "≤ 3 µs"),
        Result("request of 1 item, 64-block prompt", per_request, "µs", None, "≤ 150 µs"),
        Result("the same through the KV router, by events", by_events, "µs", None, "≤ 150 µs"),
        Result("the same through the KV router, approximate", by_routing, "µs", None, "≤ 150 µs"),
        Result("item through the graph with the KV router", kv_item, "µs", floor, "≤ 3 µs"),
        Result("open idle stream", idle_kib, "KiB", None, "≤ 10 KB"),
        Result("open idle stream with the KV router", kv_idle_kib, "KiB", None, "≤ 10 KB"),
        Result("from stop to end, engine waiting (median)", await _stop_to_end_us(), "µs"),
    ]
