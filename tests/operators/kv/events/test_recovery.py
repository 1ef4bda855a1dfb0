"""Requests for the events a router missed: to which worker they go, and what follows if it does not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from operators.kv import EventLog, KvIndex, KvRecovery, WorkerRank, recovery_workers
from operators.kv.events import EventFeed
from pipeline import AsyncEngine, Disconnected, StreamClosed, Unavailable, Unknown, function_engine
from pipeline.errors import StreamIncomplete
from pipeline.network import EndpointId, EndpointWorkers, Runtime
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import (
    KvStored,
    RecoveredTree,
    RecoveryReply,
    RecoveryRequest,
    StoredBlock,
    recovery_endpoint,
)
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall
from tests.operators.kv.worlds import GivenHealth, published

WHERE = "ns/backend/generate"
RANK = WorkerRank(7, 3)
TREE = RecoveredTree([], 5)
REPLY = RecoveryReply.of(TREE, 71)


@asynccontextmanager
async def asking(
    engine: AsyncEngine[Any, Any], health: GivenHealth | None = None
) -> AsyncIterator[tuple[KvRecovery, Runtime]]:
    """The engine answers for the rank."""
    async with Runtime.in_process() as runtime:
        await runtime.serve(f"ns/backend/{recovery_endpoint(RANK.dp_rank)}", engine, instance_id=RANK.worker_id)
        with KvRecovery(recovery_workers(runtime, WHERE), health) as recovery:
            yield recovery, runtime


async def test_a_worker_is_queried_at_its_ranks_endpoint_in_its_component() -> None:
    engine = ScriptedEngine([REPLY])
    async with asking(engine) as (recovery, _):
        assert await recovery(RANK, None) == REPLY
        assert await recovery(RANK, 12) == REPLY
    assert [context.payload for context in engine.requests] == [RecoveryRequest(3), RecoveryRequest(3, 12)]
    assert engine.open == 0


async def test_a_worker_that_is_not_known_yet_is_unavailable() -> None:
    async with asking(ScriptedEngine([REPLY])) as (recovery, _):
        for rank in (WorkerRank(8, 3), WorkerRank(7, 0)):
            with pytest.raises(Unavailable):
                await recovery(rank, None)


async def test_a_worker_that_keeps_nothing_by_its_card_is_not_queried() -> None:
    engine = ScriptedEngine([REPLY])
    health = published({7: ModelRuntimeConfig(enable_local_indexer=False), 8: ModelRuntimeConfig()})
    async with asking(engine, health) as (recovery, _):
        assert await recovery(RANK, None) is None
        with pytest.raises(Unavailable, match="at dyn"):
            await recovery(WorkerRank(8, 3), None)
        with pytest.raises(Unavailable, match="has not published"):
            await recovery(WorkerRank(9, 3), None)
    assert engine.requests == []


async def test_a_card_that_comes_later_counts() -> None:
    health = published({})
    async with Runtime.in_process() as runtime:
        await runtime.serve(f"ns/backend/{recovery_endpoint(3)}", ScriptedEngine([REPLY]), instance_id=7)
        with KvRecovery(recovery_workers(runtime, WHERE), health) as recovery:
            with pytest.raises(Unavailable):
                await recovery(RANK, None)
            health.publish({7: ModelRuntimeConfig()})
            assert await recovery(RANK, None) == REPLY


@pytest.mark.parametrize(
    ("script", "raised"),
    [([], StreamIncomplete), ([Fail(OSError("no disk"))], Unknown), ([Fail(Disconnected("gone"))], Disconnected)],
)
async def test_an_answer_that_fails_is_raised(script: list[Any], raised: type[Exception]) -> None:
    engine = ScriptedEngine(script)
    async with asking(engine) as (recovery, _):
        with pytest.raises(raised):
            await recovery(RANK, None)
    assert engine.open == 0


async def test_a_worker_that_dies_while_it_answers_is_lost() -> None:
    async with asking(ScriptedEngine([Stall()])) as (recovery, runtime), anyio.create_task_group() as tasks:

        async def die() -> None:
            await anyio.sleep(1)
            for served in list(runtime.served.values()):
                served.abort()

        tasks.start_soon(die)
        with pytest.raises(Disconnected):
            await recovery(RANK, None)


async def test_a_question_given_up_is_over_at_the_worker_too(open_streams: OpenStreams) -> None:
    engine = ScriptedEngine([Stall()])
    async with asking(engine) as (recovery, _):
        with anyio.move_on_after(1):
            await recovery(RANK, None)
        assert engine.started == 1
        assert engine.open == 0


async def test_each_rank_has_one_view_and_close_ends_all() -> None:
    made: list[EndpointWorkers[Any, RecoveryReply]] = []
    async with Runtime.in_process() as runtime:
        workers_of = recovery_workers(runtime, EndpointId.parse(WHERE))

        def counted(dp_rank: int) -> EndpointWorkers[Any, RecoveryReply]:
            made.append(workers_of(dp_rank))
            return made[-1]

        with KvRecovery(counted, published({7: ModelRuntimeConfig()})) as recovery:
            for dp_rank in (0, 1, 0):
                with pytest.raises(Unavailable):
                    await recovery(WorkerRank(7, dp_rank), None)
            assert [str(workers) for workers in made] == [
                f"dyn://ns.backend.worker_kv_indexer_query_dp{dp_rank}" for dp_rank in (0, 1)
            ]
        assert [workers.absence() for workers in made] == ["closed", "closed"]
        recovery.close()
        with pytest.raises(StreamClosed):
            await recovery(RANK, None)


async def test_a_feed_queries_over_the_runtime_until_it_is_answered() -> None:
    log = EventLog(RANK)
    log.record(KvStored(None, [StoredBlock(1, 1)]))

    @function_engine
    async def answer(request: RecoveryRequest) -> AsyncIterator[RecoveryReply]:
        yield RecoveryReply.of(log.recover(request.start_event_id, request.end_event_id))

    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        with KvRecovery(recovery_workers(runtime, WHERE)) as recovery:
            feed = EventFeed(KvIndex(), recovery)
            feed.add_worker(RANK.worker_id, [RANK.dp_rank])
            tasks.start_soon(feed.run)
            await anyio.sleep(1)
            assert feed.under_repair == [RANK]
            await runtime.serve(f"ns/backend/{recovery_endpoint(3)}", answer, instance_id=7)
            await anyio.sleep(2)
            assert feed.under_repair == []
            assert feed.index.find_matches([1]) == {RANK: 1}
            tasks.cancel_scope.cancel()
