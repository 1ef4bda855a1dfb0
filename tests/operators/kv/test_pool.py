"""RouterPool: when a router's workers are known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from operators.kv.pool import RouterPool
from operators.pool import InstanceHealth, PoolCards
from pipeline import Unavailable
from pipeline.network import EndpointWorkers, Runtime
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import BehaviorSubject
from pipeline.testing import ScriptedEngine

WHERE = "ns/comp/ep"
CARD = ModelRuntimeConfig()


class Site:
    """A router's pool, the workers in it, and their cards as the test publishes them."""

    def __init__(self, runtime: Runtime, cards: PoolCards) -> None:
        self.runtime = runtime
        self.workers: EndpointWorkers[object, object] = runtime.workers(WHERE)
        self.cards: BehaviorSubject[PoolCards] = BehaviorSubject(cards)
        self.pool = RouterPool(self.workers, InstanceHealth(self.workers, cards=self.cards))
        self.are_ready = 0
        """How many waits have ended."""

    async def serve(self, worker_id: int) -> None:
        """Have the instance of this worker found."""
        await self.runtime.serve(WHERE, ScriptedEngine([]), instance_id=worker_id)

    def publish(self, *worker_ids: int) -> None:
        """Make these the workers whose cards are known."""
        self.cards.on_next(PoolCards(dict.fromkeys(worker_ids, CARD)))

    async def wait(self, workers: int) -> None:
        """Wait for so many workers, and count it."""
        await self.pool.ready(workers)
        self.are_ready += 1


@asynccontextmanager
async def site(cards: PoolCards | None = None) -> AsyncIterator[Site]:
    """A pool of no workers yet; by default one with cards, none of which is known."""
    async with Runtime.in_process() as runtime:
        yield Site(runtime, PoolCards({}) if cards is None else cards)


async def test_a_pool_is_ready_once_it_knows_so_many_workers_and_their_cards() -> None:
    async with site() as there, anyio.create_task_group() as tasks:
        tasks.start_soon(there.wait, 2)
        tasks.start_soon(there.wait, 1)
        await there.serve(1)
        await there.serve(2)
        await anyio.sleep(1)
        assert there.are_ready == 0
        there.publish(2, 3)
        await anyio.sleep(1)
        assert there.are_ready == 1
        there.publish(1, 2)
        await anyio.sleep(1)
        assert there.are_ready == 2
        await there.pool.ready(2)


async def test_a_card_that_comes_before_its_worker_waits_for_it() -> None:
    async with site() as there, anyio.create_task_group() as tasks:
        there.publish(1)
        tasks.start_soon(there.wait, 1)
        await anyio.sleep(1)
        assert there.are_ready == 0
        await there.serve(1)
        await anyio.sleep(1)
        assert there.are_ready == 1


async def test_a_pool_without_cards_is_ready_with_its_workers() -> None:
    async with site(PoolCards()) as there:
        await there.serve(1)
        await there.pool.ready(1)


async def test_a_pool_that_needs_no_worker_is_ready_at_once() -> None:
    async with site() as there:
        await there.pool.ready(0)


async def test_a_worker_that_leaves_before_its_card_comes_does_not_count() -> None:
    async with site() as there, anyio.create_task_group() as tasks:
        tasks.start_soon(there.wait, 1)
        served = await there.runtime.serve(WHERE, ScriptedEngine([]), instance_id=1)
        await anyio.sleep(1)
        await served.close()
        there.publish(1)
        await anyio.sleep(1)
        assert there.are_ready == 0
        await there.serve(1)
        await anyio.sleep(1)
        assert there.are_ready == 1


@pytest.mark.parametrize("has_worker", [True, False])
@pytest.mark.parametrize("ended", ["router", "runtime"])
async def test_who_waits_for_a_pool_that_ends_is_refused(ended: str, has_worker: bool) -> None:
    errors: list[str] = []

    async def wait(pool: RouterPool) -> None:
        with pytest.raises(Unavailable, match="closed before it had 1") as raised:
            await pool.ready(1)
        errors.append(str(raised.value))

    async with anyio.create_task_group() as tasks:
        async with site() as there:
            if has_worker:
                await there.serve(1)
            tasks.start_soon(wait, there.pool)
            await anyio.sleep(1)
            if ended == "router":
                there.pool.close()
                await anyio.sleep(1)
                assert len(errors) == 1
        await anyio.sleep(1)
        assert len(errors) == 1
        await wait(there.pool)


async def test_a_closed_pool_that_sees_a_change_refuses_still() -> None:
    async with site() as there:
        there.pool.close()
        await there.serve(1)
        there.pool.current()
        with pytest.raises(Unavailable):
            await there.pool.ready(1)
