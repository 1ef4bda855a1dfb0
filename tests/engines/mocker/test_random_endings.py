"""Many mock requests that end in every way, on a cache too small for them: nothing is lost and nothing stays.

The heavy run is behind the marker `slow`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from attrs import define, field

from engines import KvEventPublisher, as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Context
from pipeline.protocols import FinishReason, PreprocessedRequest, StopConditions
from pipeline.protocols.kv import KvRemoved, KvStored, RouterEvent

ARGS = MockEngineArgs(num_gpu_blocks=160, block_size=8, max_num_batched_tokens=256, max_num_seqs=64)
CONVERSATIONS = 40
AT_ONCE = 48


@define
class Model:
    """The cache as a subscriber reconstructs it from events alone."""

    blocks: set[int] = field(factory=set)
    next_id: int = 1

    def apply(self, event: RouterEvent) -> None:
        change, event_id = event.event.data, event.event.event_id
        assert event_id == self.next_id
        self.next_id += 1
        if isinstance(change, KvStored):
            assert change.parent_hash is None or change.parent_hash in self.blocks
            fresh = {block.block_hash for block in change.blocks}
            assert not fresh & self.blocks, "a block is stored once"
            self.blocks |= fresh
        else:
            assert isinstance(change, KvRemoved)
            assert self.blocks.issuperset(change.block_hashes), "only what is there is removed"
            self.blocks.difference_update(change.block_hashes)


@define
class Tally:
    """Counts of the ways in which requests ended."""

    ends: dict[str, int] = field(factory=dict)

    def count(self, how: str) -> None:
        self.ends[how] = self.ends.get(how, 0) + 1


async def play(served: Any, rng: Random, tally: Tally) -> None:
    """Run one request to a random end."""
    shared = [rng.randrange(CONVERSATIONS)] * rng.choice((0, 8, 24, 64))
    prompt = [*shared, *(rng.randrange(2000) for _ in range(rng.randrange(1, 24)))]
    wanted = rng.randrange(0, 12) if rng.random() < 0.9 else rng.randrange(12, 60)
    context = Context(PreprocessedRequest(prompt, stop_conditions=StopConditions(max_tokens=wanted)))
    how = rng.choices(("end", "stop", "kill", "close"), (6, 2, 1, 1))[0]
    at = rng.randrange(0, max(1, wanted))
    received, reason = 0, None
    async with await served.generate(context) as stream:
        while True:
            if how != "end" and received >= at:
                if how == "close":
                    break
                getattr(context.control, how)()
            try:
                chunk = (await anext(stream)).ok().data
            except StopAsyncIteration:
                break
            assert reason is None, "nothing follows the terminal chunk"
            received, reason = received + len(chunk.token_ids), chunk.finish_reason
    assert received <= wanted
    if how == "end":
        assert (received, reason) == (wanted, FinishReason.LENGTH)
    elif how == "stop":
        assert reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    elif how == "kill":
        assert reason is None or (reason is FinishReason.LENGTH and not wanted)
    tally.count(how)


async def play_many(count: int, seed: int) -> None:
    engine, model, tally = MockEngine(ARGS), Model(), Tally()
    async with as_engine(engine) as served:
        (source,) = await engine.kv_event_sources()
        source.on_ready(KvEventPublisher(1, 0, model.apply))
        scheduler = engine.ranks[0].scheduler
        rngs = (Random(seed + number) for number in range(count))
        checks = iter(range(count))

        async def player() -> None:
            for rng in rngs:
                await play(served, rng, tally)
                if next(checks) % 500 == 0:
                    scheduler.pool.check()
                    assert model.blocks == scheduler.pool.names()

        async with anyio.create_task_group() as players:
            for _ in range(AT_ONCE):
                players.start_soon(player)
        assert sum(tally.ends.values()) == count
        assert all(tally.ends.values())
        assert scheduler.preemptions > 0
        scheduler.pool.check()
        assert scheduler.pool.active == 0
        assert scheduler.is_idle
        assert engine.ranks[0].live == 0
        assert model.blocks == scheduler.pool.names()


async def test_requests_that_end_in_every_way_leave_the_cache_its_events_describe() -> None:
    await play_many(1_500, seed=1)


@pytest.mark.slow
async def test_a_hundred_thousand_random_endings_leave_nothing() -> None:
    await play_many(100_000, seed=10_000)
