"""EngineFollower: complete and in order, by replay; over real sockets of this machine, on both loops."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from pipeline import InvalidArgument
from pipeline.llm.kv_events import EngineChange, EngineFollower, ReplayLimits
from pipeline.protocols.kv import KvCleared, KvRemoved, KvStored
from pipeline.wire import to_msgpack

pytest.importorskip("zmq")

from .kv_source import BLOCK_TOKENS, FakeKvSource, removed, stored

WAIT_S = 10.0
"""How long what must come is waited for; nothing takes that long."""
LIMITS = ReplayLimits(timeout_s=2, attempts=2, delay_s=0.02, pause_s=0.1)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """In real time: sockets know no other."""
    backend: str = request.param
    return backend


@pytest.fixture
def source() -> Iterator[FakeKvSource]:
    with FakeKvSource.opened() as opened:
        yield opened


class Followed:
    """A follower and what it delivered, as the first block of each change."""

    def __init__(self, source: FakeKvSource, **settings: Any) -> None:
        self.changes: list[EngineChange] = []
        given: dict[str, Any] = {"replay_endpoint": source.replay_endpoint, "replay_limits": LIMITS} | settings
        self.follower = EngineFollower(source.endpoint, self.changes.append, block_size_tokens=BLOCK_TOKENS, **given)

    @property
    def blocks(self) -> list[int | str]:
        """The names stored, in order; and `cleared` or `-name`."""
        found: list[int | str] = []
        for change in self.changes:
            if isinstance(change.change, KvStored):
                found += [block.block_hash for block in change.change.blocks]
            elif isinstance(change.change, KvRemoved):
                found += [f"-{name}" for name in change.change.block_hashes]
            else:
                found.append("cleared")
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(WAIT_S * 200)):
            if condition():
                return
            await anyio.sleep(0.005)
        raise AssertionError(f"it never came; there are {self.blocks}")

    async def until_blocks(self, *blocks: int | str) -> None:
        await self.until(lambda: self.blocks == list(blocks))


@asynccontextmanager
async def following(source: FakeKvSource, **settings: Any) -> AsyncIterator[Followed]:
    """A follower that runs and has subscribed, and whose first replay has what was published before."""
    followed = Followed(source, **settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(followed.follower.run)
        await followed.until(lambda: followed.follower.is_connected and source.has_subscriber)
        if followed.follower.replay_endpoint is not None:
            await followed.until(lambda: source.answered > 0)
        yield followed
        tasks.cancel_scope.cancel()


async def test_what_was_published_before_it_joined_is_replayed(source: FakeKvSource) -> None:
    for name in range(100, 400, 4):
        source.publish(stored(name, name - 4 if name > 100 else None))
    async with following(source) as followed:
        await followed.until(lambda: followed.blocks == list(range(100, 400, 4)))
        assert (followed.follower.lost_batches, followed.follower.replayed_batches) == (0, 75)
        source.publish(stored(400, 396), removed(100))
        await followed.until_blocks(*range(100, 404, 4), "-100")
    assert followed.follower.replayed_batches == 75


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not socket.has_ipv6 or not has_ipv6(), reason="this machine has no IPv6")
async def test_an_engine_is_followed_over_ipv6() -> None:
    with FakeKvSource.opened(host="[::1]") as source:
        source.publish(stored(100))
        async with following(source) as followed:
            source.publish(stored(104, 100))
            await followed.until_blocks(100, 104)
            assert followed.follower.replayed_batches == 1


async def test_a_replay_of_an_older_engine_has_no_topic(source: FakeKvSource) -> None:
    source.has_topic_in_replay = False
    source.publish(stored(100))
    async with following(source) as followed:
        await followed.until_blocks(100)


async def test_what_is_lost_on_the_way_is_replayed_in_order(source: FakeKvSource) -> None:
    async with following(source) as followed:
        source.publish(stored(100))
        await followed.until_blocks(100)
        source.publish(stored(104, 100), sent=False)
        source.publish(stored(108, 104), sent=False)
        source.publish(stored(112, 108))
        await followed.until_blocks(100, 104, 108, 112)
    assert (followed.follower.lost_batches, followed.follower.restarts) == (0, 0)
    assert source.requests == [0, 0]


async def test_what_is_lost_before_a_pause_is_found_after_it(source: FakeKvSource) -> None:
    async with following(source, replay_limits=evolve(LIMITS, idle_s=0.1)) as followed:
        source.publish(stored(100))
        source.publish(stored(104), sent=False)
        await followed.until_blocks(100, 104)
    assert followed.follower.lost_batches == 0


@pytest.mark.parametrize(("field", "value"), [("attempts", 0), ("idle_s", 0.0)])
def test_a_limit_of_replays_that_is_none_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as raised:
        ReplayLimits(**{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field


async def test_what_the_engine_no_longer_keeps_is_lost_from_sequence_zero() -> None:
    with FakeKvSource.opened(kept_batches=3) as source:
        for name in range(100, 128, 4):
            source.publish(stored(name))
        async with following(source) as followed:
            await followed.until_blocks(116, 120, 124)
    assert followed.follower.lost_batches == 4


async def test_a_replay_with_a_hole_is_requested_again_from_there(source: FakeKvSource) -> None:
    for name in range(100, 120, 4):
        source.publish(stored(name))
    source.not_replayed = {2, 3}
    async with following(source) as followed:
        await followed.until_blocks(*range(100, 120, 4))
    assert (followed.follower.lost_batches, source.requests) == (0, [0, 1])


async def test_a_replay_that_is_cut_is_requested_again_from_there(source: FakeKvSource) -> None:
    for name in range(100, 120, 4):
        source.publish(stored(name))
    source.cut_replay_after = 2
    async with following(source, replay_limits=evolve(LIMITS, timeout_s=1)) as followed:
        await followed.until_blocks(*range(100, 120, 4))
    assert (followed.follower.lost_batches, source.requests) == (0, [0, 1])


async def test_without_an_answer_it_goes_on_and_what_is_missing_is_lost(
    source: FakeKvSource, caplog: pytest.LogCaptureFixture
) -> None:
    limits = evolve(LIMITS, timeout_s=0.2, pause_s=2)
    source.is_silent = True
    source.publish(stored(100))
    async with following(source, replay_limits=limits) as followed:
        source.publish(stored(200))
        await followed.until_blocks(200)
        assert (followed.follower.lost_batches, followed.follower.failed_replays) == (1, 1)
        source.publish(stored(204), sent=False)
        source.publish(stored(208))
        await followed.until_blocks(200, 208)
        assert followed.follower.lost_batches == 2
        source.is_silent = False
        await anyio.sleep(limits.pause_s)
        source.publish(stored(212), sent=False)
        source.publish(stored(216))
        await followed.until_blocks(200, 208, 212, 216)
    assert followed.follower.lost_batches == 2
    assert "does not replay" in caplog.text


async def test_a_batch_that_comes_twice_counts_once(source: FakeKvSource) -> None:
    async with following(source) as followed:
        for _ in range(3):
            source.publish(stored(100))
        await followed.until_blocks(100, 100, 100)
        for sequence in (0, 2, 1):
            source.send(sequence)
        source.publish(removed(100), removed(100))
        source.publish(removed(100))
        await followed.until_blocks(100, 100, 100, "-100")
    assert (followed.follower.repeated, followed.follower.restarts) == (3, 0)


async def test_a_batch_that_comes_late_is_not_taken_any_more(source: FakeKvSource) -> None:
    async with following(source, replay_endpoint=None) as followed:
        source.publish(stored(100))
        source.publish(removed(100), sent=False)
        source.publish(stored(104))
        await followed.until_blocks(100, 104)
        source.send(1)
        source.publish(stored(108))
        await followed.until_blocks(100, 104, 108)
    assert (followed.follower.repeated, followed.follower.lost_batches, followed.follower.restarts) == (1, 1, 0)


async def test_a_garbled_message_is_replayed(source: FakeKvSource) -> None:
    async with following(source) as followed:
        source.publish(stored(100))
        await followed.until_blocks(100)
        source.publish(stored(104), sent=False)
        source.send(1, b"\xc1garbled")
        source.send_frames(b"", b"short", b"")
        source.send_frames(b"one frame")
        source.publish(stored(108))
        await followed.until_blocks(100, 104, 108)
    assert (followed.follower.malformed, followed.follower.lost_batches) == (3, 0)


async def test_a_batch_that_is_garbled_in_the_replay_too_is_given_up(source: FakeKvSource) -> None:
    source.publish(stored(100))
    source.publish(payload=b"\xc1garbled")
    source.publish(stored(104))
    async with following(source) as followed:
        await followed.until_blocks(100, 104)
        source.publish(stored(108))
        await followed.until_blocks(100, 104, 108)
    assert (followed.follower.malformed, followed.follower.lost_batches, source.requests) == (1, 1, [0])


async def test_an_engine_that_restarted_has_nothing_of_what_it_had(source: FakeKvSource) -> None:
    for name in (100, 104, 108):
        source.publish(stored(name))
    async with following(source) as followed:
        await followed.until_blocks(100, 104, 108)
        source.restart()
        await followed.until_blocks(100, 104, 108, "cleared")
        await followed.until(lambda: source.has_subscriber)
        source.publish(stored(500))
        await followed.until_blocks(100, 104, 108, "cleared", 500)
    assert (followed.follower.restarts, followed.follower.lost_batches) == (1, 0)


async def test_a_block_of_a_restarted_engine_is_counted_anew(source: FakeKvSource) -> None:
    async with following(source) as followed:
        source.publish(stored(100))
        await followed.until_blocks(100)
        source.restart()
        await followed.until(lambda: followed.follower.restarts == 1 and source.has_subscriber)
        source.publish(stored(100), removed(100))
        await followed.until_blocks(100, "cleared", 100, "-100")


async def test_topics_are_taken_by_their_beginning(source: FakeKvSource) -> None:
    async with following(source, topic=b"kv", replay_endpoint=None) as followed:
        for sequence, topic in enumerate([b"other", b"kv-events", b"KV", b"kv"]):
            payload = to_msgpack([0.0, [stored(4 * sequence)], 0])
            source.send_frames(topic, sequence.to_bytes(8, "big"), payload)
        await followed.until_blocks(4, 12)


async def test_other_tasks_have_their_turn_in_a_burst(source: FakeKvSource) -> None:
    async with following(source) as followed:
        burst(source, 2000)
        turns = 0
        while len(followed.blocks) < 2000:
            turns += 1
            await checkpoint()
        assert turns > 30


def burst(source: FakeKvSource, batches: int) -> None:
    """Publish at once, and wait until all of it has arrived."""
    for name in range(batches):
        source.publish(removed(name))
    time.sleep(0.5)


async def test_a_restarted_engine_that_has_published_as_much_is_noticed_by_its_replay(source: FakeKvSource) -> None:
    for name in (100, 104):
        source.publish(stored(name))
    async with following(source) as followed:
        await followed.until_blocks(100, 104)
        source.restart()
        for name in (500, 504, 508):
            source.publish(stored(name))
        await followed.until_blocks(100, 104, "cleared", 500, 504, 508)
    assert (followed.follower.restarts, followed.follower.lost_batches) == (1, 0)


async def test_without_a_replay_an_engine_that_does_not_go_on_after_a_lost_connection_has_restarted(
    source: FakeKvSource,
) -> None:
    async with following(source, replay_endpoint=None) as followed:
        source.publish(stored(100))
        await followed.until_blocks(100)
        source.restart()
        for name in (500, 504, 508):
            source.publish(stored(name), sent=False)
        follower = followed.follower  # which need not be seen unconnected: both changes may come at once
        await followed.until(lambda: follower._may_have_restarted and follower.is_connected and source.has_subscriber)
        source.publish(stored(512))
        await followed.until_blocks(100, "cleared", 512)
    assert (followed.follower.restarts, followed.follower.lost_batches) == (1, 3)


async def test_an_engine_that_is_not_there_yet_is_followed_once_it_is(source: FakeKvSource) -> None:
    source.close()
    followed = Followed(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(followed.follower.run)
        await anyio.sleep(0.05)
        assert not followed.follower.is_connected
        source.restart()
        source.publish(stored(100))
        await followed.until_blocks(100)
        tasks.cancel_scope.cancel()
    assert not followed.follower.is_connected


async def test_what_the_receiver_of_changes_raises_ends_it(source: FakeKvSource) -> None:
    def refuse(change: EngineChange) -> None:
        raise ValueError(change)

    source.publish(stored(100))
    follower = EngineFollower(
        source.endpoint, refuse, block_size_tokens=BLOCK_TOKENS, replay_endpoint=source.replay_endpoint
    )
    with anyio.fail_after(WAIT_S), pytest.raises(ValueError, match="EngineChange"):
        await follower.run()


async def test_a_wrong_endpoint_is_named(source: FakeKvSource) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await Followed(source, replay_endpoint="nowhere").follower.run()
    assert raised.value.field == "replay_endpoint"


async def test_a_rank_that_cleared_its_cache_is_cleared(source: FakeKvSource) -> None:
    source.publish(stored(100), {"type": "AllBlocksCleared"}, stored(104))
    async with following(source) as followed:
        await followed.until(lambda: len(followed.changes) == 3)
    assert followed.changes[1] == EngineChange(0, KvCleared())
