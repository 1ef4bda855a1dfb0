"""KvPushRouter with sessions: where the first request of a session goes, the others go."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import anyio
import pytest

from operators import PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.kv.operator import KvPushRouter
from operators.kv.sessions import SESSION_HEADER
from operators.kv.types import WorkerRank
from pipeline import Annotated, Cancelled, CannotConnect, Context, InvalidArgument, ResponseStream
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RequestTracker, RoutingHints
from pipeline.testing import ScriptedEngine, Stall

ANSWER = [Annotated(LLMEngineOutput([1]))]


class Slow(ScriptedEngine):
    """Takes a second to accept a request; `broken` refuses them."""

    broken = False

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        await anyio.sleep(1)
        if self.broken:
            raise CannotConnect("gone")
        return await super().generate(request)


class Graph:
    def __init__(self, script: Sequence[Any] = ANSWER, ttl_s: float | None = 10.0) -> None:
        self.engines = {worker_id: Slow(script) for worker_id in (1, 2, 3, 4)}
        workers = static_workers(self.engines)
        # Without credit for what is cached nothing but the session keeps requests together.
        config = KvRouterConfig(overlap_score_credit=0.0)
        self.router = kv_router(workers, config, block_size_tokens=4, rng=Random(1), session_ttl_s=ttl_s)
        self.engine = KvPushRouter(self.router) >> PushRouter(workers, cooldown_s=0)

    @property
    def counts(self) -> list[int]:
        return sorted((len(engine.requests) for engine in self.engines.values() if engine.requests), reverse=True)

    @property
    def bound(self) -> WorkerRank | None:
        assert self.router.sessions is not None
        return self.router.sessions.peek("s")

    async def send(self, **routing: Any) -> list[Any]:
        return await (await self.open(**routing)).collect()

    async def open(self, **routing: Any) -> ResponseStream[Any]:
        return await self.engine.generate(asking(**routing))


def asking(header: str = "X-Dynamo-Session-ID", **routing: Any) -> Context[PreprocessedRequest]:
    hints = RoutingHints(**routing) if routing else None
    return Context(PreprocessedRequest([1, 2, 3, 4], routing=hints), metadata={header: "s"})


async def test_requests_of_a_session_go_where_its_first_went() -> None:
    graph = Graph()
    async with anyio.create_task_group() as tasks:
        for _ in range(12):
            tasks.start_soon(graph.send)
    await (await graph.engine.generate(asking("x-dynamo-session-id"))).collect()
    assert graph.counts == [13]


async def test_without_a_time_to_live_the_header_means_nothing() -> None:
    graph = Graph(ttl_s=None)
    async with anyio.create_task_group() as tasks:
        for _ in range(12):
            tasks.start_soon(graph.send)
    assert len(graph.counts) > 1


async def test_an_idle_session_is_forgotten_and_a_running_one_is_not() -> None:
    graph = Graph([*ANSWER, Stall()])
    async with await graph.open():
        await anyio.sleep(100)
        assert graph.bound is not None
    await anyio.sleep(9)
    assert graph.bound is not None
    await anyio.sleep(2)
    assert graph.bound is None


async def test_a_worker_that_fails_the_session_is_replaced_once() -> None:
    graph = Graph()
    await graph.send()
    before = graph.bound
    assert before is not None
    graph.engines[before.worker_id].broken = True
    while graph.bound in (before, None):  # the retry may meet the same worker by chance
        try:
            await graph.send()
        except CannotConnect:
            assert graph.bound is None
    assert len(graph.router.loads) == 0


async def test_a_request_that_names_the_failed_worker_is_not_sent_elsewhere() -> None:
    graph = Graph()
    await graph.send()
    before = graph.bound
    assert before is not None
    graph.engines[before.worker_id].broken = True
    with pytest.raises(CannotConnect):
        await graph.send(backend_instance_id=before.worker_id)
    assert (graph.bound, graph.counts) == (None, [1])


async def test_a_cancelled_request_leaves_the_session_bound() -> None:
    graph = Graph()
    await graph.send()
    before = graph.bound
    with anyio.move_on_after(0.5):
        await graph.send()
    assert graph.bound == before is not None
    assert len(graph.router.loads) == 0


async def test_a_request_may_not_name_another_worker_than_its_session() -> None:
    graph = Graph()
    await graph.send(backend_instance_id=2)
    with pytest.raises(InvalidArgument, match="bound to worker 2"):
        await graph.send(backend_instance_id=3)
    await graph.send(backend_instance_id=2)
    assert (graph.bound, graph.counts) == (WorkerRank(2), [2])
    await anyio.sleep(11)
    assert graph.bound is None  # the refused one holds nothing


async def test_a_query_reads_the_session_and_reserves_nothing() -> None:
    graph = Graph()

    async def query() -> Any:
        tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
        payload = PreprocessedRequest([1, 2, 3, 4], annotations=["query_instance_id:"], tracker=tracker)
        stream = await graph.engine.generate(Context(payload, metadata={"x-dynamo-session-id": "s"}))
        (item,) = await stream.collect()
        assert item.data is not None
        return item.data.disaggregated_params["worker_id"]["decode_worker_id"]

    await query()
    assert graph.bound is None
    await graph.send(backend_instance_id=3)
    assert [await query() for _ in range(5)] == [3] * 5


async def test_a_request_that_may_not_go_to_its_sessions_worker_goes_elsewhere_and_binds_anew() -> None:
    """It named no worker itself."""
    graph = Graph()
    await graph.send(backend_instance_id=2)
    await graph.send(allowed_worker_ids={3})
    assert (graph.bound, graph.counts, len(graph.router.loads)) == (WorkerRank(3), [1, 1], 0)


async def test_a_query_of_a_session_whose_worker_cannot_take_it_is_answered_without_it() -> None:
    graph = Graph()
    await graph.send(backend_instance_id=2)
    tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))
    payload = PreprocessedRequest(
        [1, 2, 3, 4],
        annotations=["query_instance_id:"],
        tracker=tracker,
        routing=RoutingHints(allowed_worker_ids={3}),
    )
    (item,) = await (await graph.engine.generate(Context(payload, metadata={SESSION_HEADER: "s"}))).collect()
    assert item.data is not None
    assert item.data.disaggregated_params["worker_id"]["decode_worker_id"] == 3
    assert graph.bound == WorkerRank(2)


async def test_one_that_waits_for_the_first_may_be_stopped() -> None:
    graph, second = Graph(), asking()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(graph.send)
        await anyio.sleep(0.1)
        tasks.start_soon(stop_soon, second)
        with pytest.raises(Cancelled, match=f"Request {second.id} was cancelled"):
            await graph.engine.generate(second)
        assert anyio.current_time() < 0.5 + graph.router.loads.clock()
    assert graph.counts == [1]


async def stop_soon(request: Context[Any]) -> None:
    await anyio.sleep(0.1)
    request.stop()


async def test_when_the_first_fails_the_next_is_first() -> None:
    graph = Graph()
    with anyio.move_on_after(0.5):
        await graph.send()
    await graph.send()
    assert graph.bound is not None
    await anyio.sleep(11)
    assert graph.bound is None


async def test_a_session_too_long_is_an_error() -> None:
    request = Context(PreprocessedRequest([1]), metadata={"X-Dynamo-Session-ID": "s" * 257})
    with pytest.raises(InvalidArgument, match="256 bytes"):
        await Graph().engine.generate(request)
