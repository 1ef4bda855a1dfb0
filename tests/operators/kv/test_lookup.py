"""PrefixLookup in a pool of which some workers publish KV events and others do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.kv import EventLog, KvRouter
from operators.kv.types import WorkerRank
from pipeline.llm import block_hashes, sequence_hashes
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import KvEvent, KvStored, RecoveryReply, RouterEvent, StoredBlock
from pipeline.rx import Subject

from .worlds import BLOCK, GivenHealth, prompt, published, reserved, router_of

WITH, WITHOUT = ModelRuntimeConfig(), ModelRuntimeConfig(kv_event_publishing_enabled=False)
A, B = WorkerRank(1), WorkerRank(2)


def stored(worker_id: int, count: int, event_id: int = 1) -> RouterEvent:
    """The worker holds the first so many tokens of every `prompt`."""
    local = block_hashes(list(range(count)), BLOCK)
    blocks = [StoredBlock(name, own) for name, own in zip(sequence_hashes(local), local, strict=True)]
    return RouterEvent(worker_id, KvEvent(event_id, KvStored(None, blocks)))


async def settled() -> None:
    for _ in range(5):
        await checkpoint()


@asynccontextmanager
async def running(health: GivenHealth, **config: Any) -> AsyncIterator[tuple[KvRouter, Subject[RouterEvent]]]:
    """A router that follows the events of the pool."""
    events = Subject[RouterEvent]()
    async with router_of(*health.view.ids, config={"use_kv_events": True, **config}, health=health) as router:
        router.follow(events)
        await settled()
        yield router, events


async def send(router: KvRouter, worker_id: int, tokens: int = 16) -> None:
    """Route a prompt to this worker, and end its answer."""
    (await reserved(router, prompt(tokens, worker_id=worker_id))).release()


def blocks_on(router: KvRouter, *ranks: WorkerRank, tokens: int = 16) -> list[float]:
    return [router.overlap_blocks(prompt(tokens).blocks, rank) for rank in ranks]


def kinds(router: KvRouter) -> dict[int, str]:
    return {rank.worker_id: kind for rank, kind, _ in router.lookup.held_blocks()}


async def test_what_is_routed_counts_for_workers_without_events_only() -> None:
    async with running(published({1: WITH, 2: WITHOUT})) as (router, _):
        await send(router, 1)
        await send(router, 2)
        assert blocks_on(router, A, B) == [0, 4]
        assert kinds(router) == {1: "events", 2: "approximate"}


async def test_events_count_for_the_others() -> None:
    async with running(published({1: WITH, 2: WITHOUT})) as (router, events):
        events.on_next(stored(1, 8))
        events.on_next(stored(2, 8))  # its card promises none: nothing could tell whether one was lost
        await settled()
        assert blocks_on(router, A, B) == [2, 0]
        await send(router, 2, 12)
        assert list(router.lookup.held_blocks()) == [(A, "events", 2), (B, "approximate", 3)]
        assert router.advise(prompt(16)).rank == B


async def test_what_was_routed_is_forgotten_after_its_time() -> None:
    async with running(published({1: WITHOUT}), router_ttl_secs=30.0) as (router, _):
        await send(router, 1)
        await anyio.sleep(29)
        assert blocks_on(router, A) == [4]
        await anyio.sleep(2)
        assert blocks_on(router, A) == [0]
        assert list(router.lookup.held_blocks()) == [(A, "approximate", 0)]


async def test_the_two_times_to_live_are_apart() -> None:
    health = published({1: WITH, 2: WITHOUT})
    async with running(health, router_ttl_secs=30.0, router_predicted_ttl_secs=5.0) as (router, _):
        await send(router, 1)
        await send(router, 2)
        assert blocks_on(router, A, B) == [4, 4]
        await anyio.sleep(6)
        assert blocks_on(router, A, B) == [0, 4]


async def test_a_worker_that_comes_back_has_nothing() -> None:
    health = published({1: WITHOUT})
    async with running(health) as (router, _):
        await send(router, 1)
        assert blocks_on(router, A) == [4]
        health.set()
        health.set(1)
        assert blocks_on(router, A) == [0]


@pytest.mark.parametrize(("before", "after"), [(WITH, WITHOUT), (WITHOUT, WITH)])
async def test_a_worker_whose_card_changes_starts_over(before: ModelRuntimeConfig, after: ModelRuntimeConfig) -> None:
    health = published({1: before})
    async with running(health) as (router, events):
        events.on_next(stored(1, 8))
        await settled()
        await send(router, 1)
        assert blocks_on(router, A) == [2 if before is WITH else 4]
        health.publish({1: after})
        await settled()
        assert blocks_on(router, A) == [0]
        events.on_next(stored(1, 12, 2))
        await settled()
        assert blocks_on(router, A) == [3 if after is WITH else 0]
        assert kinds(router) == {1: "events" if after is WITH else "approximate"}


async def test_without_events_at_all_every_worker_is_approximate() -> None:
    async with running(published({1: WITH, 2: WITHOUT}), use_kv_events=False) as (router, _):
        await send(router, 1)
        assert list(router.lookup.held_blocks()) == [(A, "approximate", 4), (B, "approximate", 0)]


async def test_without_an_index_nothing_is_held() -> None:
    async with running(published({1: WITHOUT}), overlap_score_credit=0) as (router, _):
        await send(router, 1)
        assert list(router.lookup.held_blocks()) == []
        assert blocks_on(router, A) == [0]


async def test_an_event_that_came_between_a_workers_answer_and_the_following_is_not_lost() -> None:
    log = EventLog(WorkerRank(2))

    async def recover(rank: WorkerRank, start: int | None) -> RecoveryReply | None:
        return RecoveryReply.of(log.recover(start)) if rank == log.rank else None

    router, events = router_of(2, config={"use_kv_events": True}, recover=recover), Subject[RouterEvent]()
    async with router:
        await settled()
        log.record(stored(2, 8).event.data)  # the worker has answered before that it has nothing
        with router.follow(events):
            await settled()
            assert router.overlap_blocks(prompt().blocks, WorkerRank(2)) == 2
            events.on_next(log.record(stored(2, 12, event_id=2).event.data))
            await settled()
            assert router.overlap_blocks(prompt(16).blocks, WorkerRank(2)) == 3
