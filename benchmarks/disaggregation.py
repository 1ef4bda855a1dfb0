"""What Migration and PrefillRouter add to an item and to a request, and what the whole graph costs.

A graph and the same one with the stage take turns in one run, so that their ratio is the cost of the stage. Prefill
workers answer at once: what is timed is the way to them and back, not their work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random

from operators import Detokenize, KvPrefill, KvPushRouter, Migration, Model, PrefillRouter, PushPrefill, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.pool import PoolCards, PoolView
from operators.prefill import PrefillPool
from pipeline import Annotated, AsyncEngine, Context, ResponseStream
from pipeline.network import Members, static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler, BehaviorSubject

from .graph import (
    BLOCK_TOKENS,
    WORKERS,
    AnyGraph,
    answer_items,
    answer_requests,
    idle_stream_kib,
    kv_routed,
    request,
)
from .measure import Result, best_of_each

LIMIT = 3
"""Workers more that Migration may send a request to."""
REQUESTS = 500
TURNS = 15
"""How often each graph is measured: a short run finds a quiet moment sooner than a long one."""
PREFILL_IDS = range(100, 100 + WORKERS)

Output = Annotated[LLMEngineOutput]


class _Prefiller(AsyncEngine[PreprocessedRequest, Output]):
    """Has every prompt computed already."""

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Output]:
        async def done() -> AsyncGenerator[Output, None]:
            yield Annotated(LLMEngineOutput([97], disaggregated_params={"handle": "bench"}))

        return ResponseStream(done(), request)


@asynccontextmanager
async def _prefill_router(
    pool: PrefillPool | None, scheduler: AnyIOScheduler, *, meets: bool = False
) -> AsyncIterator[PrefillRouter]:
    """With `meets` its workers publish the endpoint where they wait for decode, so that decode begins at once."""
    endpoint = DisaggregatedEndpoint("127.0.0.1", 9000) if meets else None
    by_worker = {worker_id: ModelRuntimeConfig(disaggregated_endpoint=endpoint) for worker_id in PREFILL_IDS}
    members = Members.of(dict.fromkeys(PREFILL_IDS, 0))
    views = BehaviorSubject(PoolView(cards=PoolCards(by_worker)).with_members(members))
    async with PrefillRouter(pool, views, scheduler=scheduler, rng=Random(2)) as router:
        yield router


@asynccontextmanager
async def _pool(kind: str) -> AsyncIterator[PrefillPool | None]:
    """No pool, one behind a PushRouter, or one behind a KV router."""
    workers = static_workers(dict.fromkeys(PREFILL_IDS, _Prefiller()), name="prefill")
    push = PushRouter(workers)
    if kind != "kv":
        yield PushPrefill(push) if kind == "push" else None
        return
    config = KvRouterConfig(use_kv_events=False, router_track_active_blocks=False)
    with kv_router(workers, config, block_size_tokens=BLOCK_TOKENS, rng=Random(3), worker_type="prefill") as kv:
        stage = KvPushRouter(kv)
        yield KvPrefill(stage, stage >> push)


async def _per_item(graphs: Sequence[AnyGraph]) -> list[float]:
    return [took * 1e6 for took in await best_of_each([partial(answer_items, graph) for graph in graphs], TURNS)]


async def _per_request(graphs: Sequence[AnyGraph]) -> list[float]:
    """What goes on behind an answer falls into the next one's time."""
    payload = request(1)
    runs = [partial(answer_requests, graph, payload, REQUESTS) for graph in graphs]
    return [took * 1e6 for took in await best_of_each(runs, TURNS)]


async def _migration() -> list[Result]:
    """Nothing breaks, so one worker answers all of it."""
    async with kv_routed(by_events=True) as routed:
        below = Detokenize(Model.byte_level("echo")) >> routed
        graphs: list[AnyGraph] = [below, Migration(0) >> below, Migration(LIMIT) >> below]
        item, item_off, item_on = await _per_item(graphs)
        request, request_off, request_on = await _per_request(graphs)
    return [
        Result("item through the graph with Migration(0)", item_off, "µs", item),
        Result(f"item through the graph with Migration({LIMIT}), nothing breaks", item_on, "µs", item),
        Result("request through the graph with Migration(0)", request_off, "µs", request),
        Result(f"request through the graph with Migration({LIMIT}), nothing breaks", request_on, "µs", request),
    ]


async def _prefill(name: str, kind: str, *, meets: bool = False) -> list[Result]:
    async with (
        kv_routed(by_events=True) as routed,
        _pool(kind) as pool,
        AnyIOScheduler() as scheduler,
        _prefill_router(pool, scheduler, meets=meets) as stage,
    ):
        text = Detokenize(Model.byte_level("echo"))
        graphs: list[AnyGraph] = [text >> routed, text >> stage >> routed]
        item, item_with = await _per_item(graphs)
        request, request_with = await _per_request(graphs)
    return [
        Result(f"item through the graph with PrefillRouter, {name}", item_with, "µs", item),
        Result(f"request through the graph with PrefillRouter, {name}", request_with, "µs", request),
    ]


async def _whole() -> list[Result]:
    async with (
        kv_routed(by_events=True) as routed,
        AnyIOScheduler() as scheduler,
        _prefill_router(None, scheduler) as stage,
    ):
        below = stage >> routed
        text = Detokenize(Model.byte_level("echo")) >> routed
        tokens: AnyGraph = Migration(LIMIT) >> below
        whole: AnyGraph = Migration(LIMIT) >> Detokenize(Model.byte_level("echo")) >> below
        plain_item, token_item, item = await _per_item([text, tokens, whole])
        plain_request, took = await _per_request([text, whole])
        kept_kib = await idle_stream_kib(whole)
    return [
        Result("item through the whole graph, of tokens", token_item, "µs", None, "≤ 3 µs"),
        Result("item through the whole graph, detokenized", item, "µs", plain_item, "≤ 3 µs"),
        Result("request through the whole graph", took, "µs", plain_request, "≤ 150 µs"),
        Result("open idle stream of the whole graph", kept_kib, "KiB", None, "≤ 10 KB"),
    ]


async def measure() -> list[Result]:
    return [
        *await _migration(),
        *await _prefill("no workers", "none"),
        *await _prefill("push pool, completed", "push"),
        *await _prefill("push pool, bootstrap", "push", meets=True),
        *await _prefill("KV pool, completed", "kv"),
        *await _prefill("KV pool, bootstrap", "kv", meets=True),
        *await _whole(),
    ]
