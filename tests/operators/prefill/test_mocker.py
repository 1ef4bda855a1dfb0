"""Mock prefill and decode workers behind a PrefillRouter: blocks change hands, and all come free."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random
from typing import Any, Literal

import anyio
import pytest
from attrs import define, evolve

from engines import DisaggregationMode, as_engine
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange
from operators import KvPrefill, KvPushRouter, PrefillRouter, PushPrefill, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.prefill import ConditionalDisaggregation
from pipeline import AsyncEngine, Cancelled, Context
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import PreprocessedRequest, StopConditions
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler

from .worlds import present_workers

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
PROMPT = list(range(10))


@define
class Disaggregated:
    """Two prefill workers, two decode workers, and the graph before them."""

    graph: AsyncEngine[Any, Any]
    router: PrefillRouter
    workers: dict[int, Any]
    exchange: TransferExchange

    async def collect(self, **fields: Any) -> list[int]:
        payload = PreprocessedRequest(list(PROMPT), stop_conditions=StopConditions(max_tokens=6), **fields)
        items = await (await self.graph.generate(Context(payload))).collect()
        return [token for item in items if item.data is not None for token in item.data.token_ids]

    def blocks_held(self) -> int:
        return sum(rank.scheduler.pool.active for worker in self.workers.values() for rank in worker.engine.ranks)


@asynccontextmanager
async def disaggregated(
    *, meets: bool = True, kv: bool = True, conditional: bool = False
) -> AsyncIterator[Disaggregated]:
    exchange = TransferExchange()
    halves: dict[int, Literal["prefill", "decode"]] = {1: "prefill", 2: "prefill", 11: "decode", 12: "decode"}
    async with AsyncExitStack() as stack:
        workers: dict[int, Any] = {}
        for worker_id, half in halves.items():
            engine = MockEngine(evolve(ARGS, worker_type=half), exchange=exchange)
            workers[worker_id] = await stack.enter_async_context(as_engine(engine, mode=DisaggregationMode(half)))
        prefill = static_workers({i: workers[i] for i in (1, 2)}, name="prefill")
        decode = static_workers({i: workers[i] for i in (11, 12)}, name="decode")
        config = KvRouterConfig(use_kv_events=False, conditional_disagg_enabled=conditional)
        decides = kv_router(decode, config, block_size_tokens=4, rng=Random(1), worker_type="decode")
        config_of_prefill = evolve(config, router_track_active_blocks=False)
        chooses = kv_router(prefill, config_of_prefill, block_size_tokens=4, rng=Random(2), worker_type="prefill")
        side: Any = PushPrefill(PushRouter(prefill))
        if kv:
            stage = KvPushRouter(chooses)
            side = KvPrefill(stage, stage >> PushRouter(prefill))
        endpoint = DisaggregatedEndpoint("127.0.0.1", 9000) if meets else None
        runtime_configs = {i: ModelRuntimeConfig(disaggregated_endpoint=endpoint) for i in (1, 2)}
        scheduler = await stack.enter_async_context(AnyIOScheduler())
        router = PrefillRouter(
            side,
            present_workers(1, 2, configs=runtime_configs).views,
            scheduler=scheduler,
            conditional=ConditionalDisaggregation(config, decides) if conditional else None,
            rng=Random(3),
        )
        await stack.enter_async_context(router)
        both = Disaggregated(router >> KvPushRouter(decides) >> PushRouter(decode), router, workers, exchange)
        yield both
        await anyio.sleep(60)
        assert (router.prefills, exchange.waiting, exchange.sessions, both.blocks_held()) == (0, 0, 0, 0)
        assert (len(chooses.loads), len(decides.loads)) == (0, 0)


@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("meets", [False, True])
async def test_an_answer_in_two_halves_is_the_one_of_a_single_worker(meets: bool, kv: bool) -> None:
    async with as_engine(MockEngine(ARGS)) as alone:
        payload = PreprocessedRequest(list(PROMPT), stop_conditions=StopConditions(max_tokens=6))
        items = await (await alone.generate(Context(payload))).collect()
    expected = [token for item in items if item.data is not None for token in item.data.token_ids]
    async with disaggregated(meets=meets, kv=kv) as it:
        tracker = track_request(lambda: 0)
        assert await it.collect(tracker=tracker) == expected
        assert len(expected) == 6
        info = tracker.worker_info()
        assert info is not None
        assert info.decode_worker_id in (11, 12)
        assert info.prefill_worker_id in (1, 2)


@pytest.mark.parametrize("verb", ["stop", "kill"])
@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("meets", [False, True])
async def test_a_client_that_goes_at_any_moment_costs_no_block(meets: bool, after_s: float, verb: str) -> None:
    async with disaggregated(meets=meets) as it, anyio.create_task_group() as tasks:
        request = Context(PreprocessedRequest(list(PROMPT), stop_conditions=StopConditions(max_tokens=60)))

        async def gone() -> None:
            await anyio.sleep(after_s)
            getattr(request, verb)()

        tasks.start_soon(gone)
        with suppress(Cancelled):
            await (await it.graph.generate(request)).collect()


async def test_many_at_once_all_come_through() -> None:
    async with disaggregated() as it:
        answers: list[int] = []

        async def one() -> None:
            answers.append(len(await it.collect()))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(one)
        assert answers == [6] * 20


async def test_a_decode_worker_prefills_what_the_router_sends_it_so() -> None:
    async with disaggregated(conditional=True) as it:
        payload = PreprocessedRequest(list(PROMPT), stop_conditions=StopConditions(max_tokens=6))
        events, answers = [], []
        for _ in range(2):
            items = await (await it.graph.generate(Context(payload))).collect()
            events.append([item.event for item in items if item.event is not None])
            answers.append([token for item in items if item.data is not None for token in item.data.token_ids])
        assert events == [[], ["x-bypass-remote-prefill"]]  # the second time it is cached where it decoded
        assert answers[0] == answers[1]
        assert len(answers[0]) == 6
