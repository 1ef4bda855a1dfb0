"""EventFeed: what a real subscriber receives of a mock engine's caches."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from attrs import evolve

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from engines.mocker.scheduling import BlockPool, Sequence
from engines.mocker.zmq_events import EventFeed
from pipeline import Context, InvalidArgument, Unavailable
from pipeline.llm import block_hashes, sequence_hashes
from pipeline.protocols import PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.kv import KvCleared
from pipeline.wire import from_msgpack

if TYPE_CHECKING:
    import zmq
else:
    zmq = pytest.importorskip("zmq")

RANKS = 2


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row, below those that the kernel gives to connections.

    Test processes that run beside each other take them from ranges of their own.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    width = 12_000 // processes
    first = 20_000 + number % processes * width  # one that replaces another has a higher number
    for base in range(Random().randrange(first, first + width // 2), first + width - count, count):
        with ExitStack() as taken:
            try:
                for port in range(base, base + count):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError("no port is free")


def small(**more: Any) -> MockEngineArgs:
    """Return arguments for a cache so small that it evicts all the time; events on free ports, replays two above."""
    ports = free_ports(2 * RANKS)
    args = MockEngineArgs(
        num_gpu_blocks=16,
        block_size=4,
        dp_size=RANKS,
        max_num_batched_tokens=64,
        zmq_kv_events_port=ports,
        zmq_replay_port=ports + RANKS,
    )
    return evolve(args, **more)


class Model:
    """A rank's cache as a subscriber that reads its batches in order reconstructs it."""

    def __init__(self, block_size: int, dp_rank: int) -> None:
        self.blocks: set[int] = set()
        self.next_sequence = 0
        self._size, self._rank = block_size, dp_rank

    def apply(self, frames: list[bytes]) -> None:
        assert int.from_bytes(frames[-2], "big") == self.next_sequence
        self.next_sequence += 1
        timestamp, events, dp_rank = from_msgpack(frames[-1], list[Any])
        assert isinstance(timestamp, float)
        assert dp_rank == self._rank
        assert events
        for event in events:
            if event["type"] == "BlockStored":
                self._store(event)
            else:
                assert event["type"] == "BlockRemoved"
                assert self.blocks.issuperset(event["block_hashes"])
                self.blocks.difference_update(event["block_hashes"])

    def _store(self, event: dict[str, Any]) -> None:
        names, parent = event["block_hashes"], event["parent_block_hash"]
        assert event["block_size"] == self._size
        assert parent is None or parent in self.blocks
        assert not self.blocks.intersection(names)
        assert names == sequence_hashes(block_hashes(event["token_ids"], self._size), parent)
        self.blocks.update(names)


async def run_request(served: Any, prompt: list[int], max_tokens: int, rank: int) -> None:
    stop, routing = StopConditions(max_tokens=max_tokens), RoutingHints(dp_rank=rank)
    await (await served.generate(Context(PreprocessedRequest(prompt, stop_conditions=stop, routing=routing)))).collect()


def replayed(context: zmq.Context[Any], port: int) -> list[list[bytes]]:
    """Return all batches of the replay buffer."""
    with context.socket(zmq.DEALER) as reader:
        reader.connect(f"tcp://127.0.0.1:{port}")
        reader.send_multipart([b"", bytes(8)])
        messages = [reader.recv_multipart()]
        while messages[-1][-2] != b"\xff" * 8:
            messages.append(reader.recv_multipart())
        return messages[:-1]


async def test_received_and_replayed_events_together_describe_the_cache(context: zmq.Context[Any]) -> None:
    """The workload has several ranks, shared prefixes, evictions and preemptions."""
    engine = MockEngine(small())
    ports = engine.args.zmq_kv_events_port or 0
    rng = Random(3)

    async def play(served: Any, rank: int) -> None:
        for _ in range(6):
            prompt = [rng.randrange(3)] * rng.randrange(1, 20) + [rng.randrange(3) for _ in range(rng.randrange(6))]
            await run_request(served, [7, *prompt], rng.randrange(1, 20), rank)

    async with as_engine(engine) as served:
        for rank in range(RANKS):
            with context.socket(zmq.SUB) as reader:
                reader.subscribe(b"")
                reader.connect(f"tcp://127.0.0.1:{ports + rank}")
                prompt = 100
                while not reader.poll(20):  # a subscription takes a moment, and the publisher does not learn of it
                    prompt += 1
                    assert prompt < 350, "no subscription came about"
                    await run_request(served, [prompt] * 5, 1, rank)
                async with anyio.create_task_group() as players:
                    for _ in range(5):
                        players.start_soon(play, served, rank)
                pool, model = engine.ranks[rank].scheduler.pool, Model(4, rank)
                assert engine.ranks[rank].scheduler.preemptions
                everything = replayed(context, ports + RANKS + rank)
                received = [reader.recv_multipart()]
                while received[-1][-2:] != everything[-1][-2:]:
                    received.append(reader.recv_multipart())
                missed = int.from_bytes(received[0][-2], "big")
                for frames in [*everything[:missed], *received]:
                    model.apply(frames)
                assert model.blocks == pool.names()
                assert model.blocks


async def test_a_batch_is_what_one_pass_changed(context: zmq.Context[Any]) -> None:
    engine = MockEngine(small(num_gpu_blocks=64), clock=lambda: 77.5)
    async with as_engine(engine) as served:
        await run_request(served, list(range(9)), 4, 0)
        batches = [
            from_msgpack(frames[-1], list[Any]) for frames in replayed(context, engine.args.zmq_replay_port or 0)
        ]
    assert [batch[0] for batch in batches] == [77.5, 77.5]
    prompt, output = (batch[1] for batch in batches)
    assert [event["token_ids"] for event in prompt] == [list(range(8))]
    assert output[0]["token_ids"][0] == 8
    assert output[0]["parent_block_hash"] == prompt[0]["block_hashes"][-1]


@pytest.mark.parametrize("silent", [{"worker_type": "decode"}, {"enable_prefix_caching": False}])
async def test_a_worker_without_a_cache_to_share_opens_no_port(silent: dict[str, Any]) -> None:
    args = small(**silent)
    engine = MockEngine(args)
    async with as_engine(MockEngine(args)), as_engine(engine):
        assert all(rank.feed is None for rank in engine.ranks)


async def test_the_end_of_the_engine_frees_its_ports() -> None:
    before, args = set(threading.enumerate()), small()
    for _ in range(2):
        async with as_engine(MockEngine(args)) as served:
            await run_request(served, [1] * 9, 1, 0)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("taken", range(2 * RANKS))
async def test_a_start_that_finds_a_port_taken_leaves_none_open(taken: int) -> None:
    before, args = set(threading.enumerate()), small()
    with socket.socket() as other:
        other.bind(("127.0.0.1", (args.zmq_kv_events_port or 0) + taken))
        other.listen()
        with pytest.raises(Unavailable, match=str((args.zmq_kv_events_port or 0) + taken)):
            await MockEngine(args).start(1)
        assert set(threading.enumerate()) <= before
    async with as_engine(MockEngine(args)):
        pass


async def test_a_start_that_is_cancelled_leaves_no_port_open() -> None:
    args = small()
    with anyio.move_on_after(1):
        await MockEngine(evolve(args, startup_time=60.0)).start(1)
    async with as_engine(MockEngine(args)):
        pass


async def test_passes_after_the_end_publish_nothing() -> None:
    """The loop ends after the sockets are closed, and may change the cache until then."""
    engine = MockEngine(small())
    await engine.start(1)
    await engine.cleanup()
    rank = engine.ranks[0]
    rank.scheduler.submit(Sequence([1] * 9, 1, block_size=4))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rank.run)
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert rank.scheduler.pool.names()


def test_each_event_has_the_tokens_of_its_own_blocks_and_no_others() -> None:
    """The second of four blocks is cached already: two events, of the first block and of the last two."""
    pool, received = BlockPool(8), list[tuple[Any, list[int]]]()
    pool.on_event_with_tokens = lambda change, tokens: received.append((change, list(tokens)))
    pool.store(pool.take(1) or [], [20], [2], tokens=[3, 4])
    pool.store(pool.take(4) or [], [10, 20, 30, 40], [1, 2, 3, 4], tokens=[1, 2, 3, 4, 5, 6, 7, 8])
    assert [tokens for _, tokens in received] == [[3, 4], [1, 2], [5, 6, 7, 8]]
    pool.clear()
    assert received[-1] == (KvCleared(), [])


def test_without_a_port_no_event_tokens_are_made() -> None:
    pool = BlockPool(4)
    assert EventFeed.bound(pool, MockEngineArgs(), 0, lambda: 0.0) is None
    assert pool.on_event_with_tokens is None


async def test_without_pyzmq_the_start_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(InvalidArgument, match="zmq"):
        await MockEngine(small()).start(1)
