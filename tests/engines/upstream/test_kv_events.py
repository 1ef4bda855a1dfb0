"""The KV events of a server, over real sockets of this machine, as those of the worker in front of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from engines import ShutdownTimes, Worker, WorkerConfig
from engines.publishing import KvEventPublisher
from engines.upstream import EventSource, KvEventFeeds, KvEventFollower, ServerFacts, VllmPrefill, VllmUpstream
from operators.kv import EventLog, WorkerRank
from pipeline import Context
from pipeline.network import Event, Runtime, Scope
from pipeline.protocols import PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.kv import KV_EVENTS_TOPIC, KvCleared, KvEventData, KvRemoved, KvStored, RouterEvent, StorageTier
from pipeline.testing import virtual_time
from pipeline.wire import to_msgpack
from tests.engines.upstream.vllm_worlds import FakeVllm, fake_vllm
from tests.engines.upstream.worlds import URL, outputs
from tests.engines.worker.worlds import collect
from tests.pipeline.llm.kv_events.kv_source import BLOCK_TOKENS, FakeKvSource, change, removed, stored

TIMES = ShutdownTimes(grace_s=0.0, timeout_s=5.0)
WAIT_S = 10.0
"""How long what must come is waited for; nothing takes that long."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """In real time, as sockets know no other, where a test has a source."""
    needs_sockets = "source" in request.fixturenames
    return request.param if needs_sockets else virtual_time(request.param)


@pytest.fixture
def source() -> Iterator[FakeKvSource]:
    with FakeKvSource.opened() as opened:
        yield opened


class Published:
    """What reached the routers' topic."""

    def __init__(self, runtime: Runtime) -> None:
        self.events: list[RouterEvent] = []
        subscription = runtime.events.subscribe(Scope("dynamo", "backend"), KV_EVENTS_TOPIC, RouterEvent)
        subscription.subscribe(self._add)

    def _add(self, event: Event[RouterEvent]) -> None:
        self.events.append(event.payload)

    @property
    def changes(self) -> list[tuple[int, KvEventData, StorageTier]]:
        return [(event.event.dp_rank, event.event.data, event.storage_tier) for event in self.events]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(WAIT_S * 200)):
            if condition():
                return
            await anyio.sleep(0.005)
        raise AssertionError(f"it never came; there are {self.events}")


@asynccontextmanager
async def served(*sources: FakeKvSource, **settings: Any) -> AsyncIterator[tuple[FakeVllm, Worker, Published]]:
    """A worker in front of a simulated server whose ranks publish at these sources."""
    pages = {
        str(rank): {"endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "topic": "", "buffer_steps": 9}
        for rank, one in enumerate(sources)
    }
    async with anyio.create_task_group() as tasks:
        server = FakeVllm(tasks, event_sources=pages, ranks=len(sources), block_size_tokens=BLOCK_TOKENS, token_s=0.0)
        async with Runtime.in_process() as runtime:
            published = Published(runtime)
            engine = VllmUpstream(URL, transport=server.transport, health_every_s=0.05)
            how: dict[str, Any] = {"environment": {}, "times": TIMES} | settings
            async with Worker(engine, runtime=runtime, worker_id=7, **how) as worker:
                yield server, worker, published
        tasks.cancel_scope.cancel()


async def test_what_a_server_cached_before_its_worker_began_reaches_the_routers(source: FakeKvSource) -> None:
    source.publish(stored(100), stored(104, 100))
    async with served(source) as (_, _, published):
        await published.until(lambda: bool(published.events))
        (event,) = published.events
        assert (event.worker_id, event.event.event_id) == (7, 1)
        assert isinstance(event.event.data, KvStored)
        assert [block.block_hash for block in event.event.data.blocks] == [100, 104]
        source.publish(removed(104))
        source.publish(stored(104, 100, medium="cpu"))
        source.publish(removed(104, medium="STORAGE"))
        await published.until(lambda: len(published.events) == 4)
    assert published.changes[1:] == [
        (0, KvRemoved([104]), "device"),
        (0, change(104, 100), "host_pinned"),
        (0, KvRemoved([104]), "disk"),
    ]


async def test_each_rank_has_its_own_source(source: FakeKvSource) -> None:
    with FakeKvSource.opened(dp_rank=1) as other:
        source.publish(stored(100))
        other.publish(stored(200))
        async with served(source, other) as (_, _, published):
            await published.until(lambda: len(published.events) == 2)
    assert sorted(published.changes, key=lambda one: one[0]) == [(0, change(100), "device"), (1, change(200), "device")]


async def test_a_log_has_what_was_replayed(source: FakeKvSource) -> None:
    source.publish(stored(100))
    logs: list[EventLog] = []

    def make(worker_id: int, dp_rank: int) -> EventLog:
        logs.append(EventLog(WorkerRank(worker_id, dp_rank)))
        return logs[-1]

    async with served(source, kv_event_log=make) as (_, _, published):
        await published.until(lambda: bool(published.events))
    assert logs[0].newest == 1


async def test_a_publisher_that_began_anew_has_nothing_of_what_it_had(source: FakeKvSource) -> None:
    source.publish(stored(100))
    async with served(source) as (_, worker, published):
        await published.until(lambda: bool(published.events))
        source.restart()
        source.publish(stored(200))
        await published.until(lambda: len(published.events) == 3)
        assert worker.failure is None
    assert [data for _, data, _ in published.changes] == [change(100), KvCleared(), change(200)]


async def test_events_that_mean_nothing_do_not_end_the_worker(source: FakeKvSource) -> None:
    async with served(source) as (_, worker, published):
        source.send_frames(b"", b"", b"")
        source.publish(payload=b"\xc1")
        source.publish({"type": "BlockStored"}, {"type": "Unheard"}, 5)
        source.publish(stored(100, group_idx=1, kv_cache_spec_kind="mamba"))
        source.publish(stored(100, block_hashes=[100, 104]))
        source.publish(stored(100, locality="REMOTE"), stored(100, ownership="kvcr"), stored(100, session_id="s"))
        await published.until(lambda: bool(published.events))
        assert worker.failure is None
        engine = worker.engine
        assert isinstance(engine, VllmUpstream)
        assert engine.kv_feeds is not None
        assert engine.kv_feeds.followers[0].filtered == {
            "undecodable": 3,
            "non_main_attention_kind": 1,
            "fewer_blocks_than_hashes": 1,
            "non_local_locality": 1,
            "unsupported_ownership": 1,
        }
        text = worker.native_metrics()
    assert published.changes == [(0, change(100), "device")]
    for expected in (
        r'refused_total{dp_rank="0",reason="non_main_attention_kind",.*worker_id="7".*} 1',
        r'refused_total{dp_rank="0",reason="malformed",.*} [12]',
        r'connected{dp_rank="0",.*} 1',
        r'lost_batches_total{dp_rank="0",.*} 1',
    ):
        assert re.search(rf"^penstock_kv_events_{expected}$", text, re.MULTILINE), text


async def test_byte_hashes_and_signed_hashes_are_those_of_the_same_bits(source: FakeKvSource) -> None:
    digest = bytes(range(32))
    source.publish(stored(100, block_hashes=[digest]), stored(104, block_hashes=[-2], parent_block_hash=digest))
    async with served(source) as (_, _, published):
        await published.until(lambda: bool(published.events))
    (event,) = published.events
    assert isinstance(event.event.data, KvStored)
    assert [block.block_hash for block in event.event.data.blocks] == [int.from_bytes(digest[-8:], "big"), 2**64 - 2]


async def test_without_kv_routing_nothing_is_followed(source: FakeKvSource) -> None:
    source.publish(stored(100))
    async with served(source, config=WorkerConfig(enable_kv_routing=False)) as (_, worker, published):
        await anyio.sleep(0.1)
        assert worker.failure is None
    assert (published.events, source.requests) == ([], [])


async def test_a_server_whose_events_do_not_come_still_answers(source: FakeKvSource) -> None:
    source.close()
    async with served(source) as (_, worker, _):
        request = PreprocessedRequest([1] * 9, stop_conditions=StopConditions(max_tokens=2))
        assert sum(map(len, await collect(worker, Context(request)))) == 2


# -- a rank that is silent


def follower(**settings: Any) -> KvEventFollower:
    source = EventSource("tcp://gpu-1:5557", topic="kv")
    return KvEventFollower(
        source, dp_rank=3, block_size_tokens=4, publish=lambda change, tier: None, silent_after_s=10.0, **settings
    )


async def test_topic_and_replay_are_those_of_the_source() -> None:
    source = EventSource("tcp://gpu-1:5557", "tcp://gpu-1:5657", "kv")
    made = KvEventFollower(source, dp_rank=3, block_size_tokens=4, publish=lambda change, tier: None)
    assert (made.endpoint, made.replay_endpoint, made.topic) == ("tcp://gpu-1:5557", "tcp://gpu-1:5657", b"kv")


async def test_what_is_left_out_is_shown_by_rank_and_reason() -> None:
    sources = {rank: EventSource(f"tcp://gpu-1:{5557 + rank}") for rank in (0, 1)}
    feeds = KvEventFeeds(ServerFacts(model="m", block_size_tokens=4, event_sources=sources))
    for rank, source in enumerate(feeds.sources()):
        source.on_ready(KvEventPublisher(7, rank, lambda event: None))
    feeds.followers[1].receive([b"", bytes(8), to_msgpack([1.0, [], 5000])])
    feeds.followers[1].receive([b"", bytes(8), b"garbled"])
    shown = feeds.metrics_text()
    for rank, reason, count in ((1, "rank_too_high", 1), (1, "malformed", 1), (0, "malformed", 0)):
        assert f'penstock_kv_events_refused_total{{dp_rank="{rank}",reason="{reason}"}} {count}\n' in shown


def test_events_of_blocks_of_unknown_size_are_not_followed() -> None:
    sources = {0: EventSource("tcp://gpu-1:5557")}
    assert KvEventFeeds(ServerFacts(model="m", event_sources=sources)).sources() == []
    assert len(KvEventFeeds(ServerFacts(model="m", event_sources=sources, block_size_tokens=4)).sources()) == 1


async def test_a_rank_that_answers_and_publishes_nothing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    made = follower()
    for _ in range(30):
        made.note_answer(4)
        await anyio.sleep(1.0)
    (record,) = caplog.records
    assert made.is_silent
    assert "rank 3 answers prompts, but no KV event has come from tcp://gpu-1:5557" in record.getMessage()


@pytest.mark.parametrize("kind", [VllmUpstream, VllmPrefill])
async def test_a_server_that_answers_and_publishes_nothing_is_warned_of(
    kind: type[VllmUpstream], caplog: pytest.LogCaptureFixture
) -> None:
    pages = {"0": {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": None, "topic": ""}}
    async with (
        fake_vllm(event_sources=pages, block_size_tokens=BLOCK_TOKENS) as server,
        Runtime.in_process() as runtime,
        Worker(kind(URL, transport=server.transport), runtime=runtime, environment={}, times=TIMES) as worker,
    ):
        request = PreprocessedRequest([1] * BLOCK_TOKENS, stop_conditions=StopConditions(max_tokens=1))
        for _ in range(5):
            await collect(worker, Context(request))
            await anyio.sleep(10.0)
        assert re.search(r'penstock_kv_events_silent{dp_rank="0".*} 1\n', worker.native_metrics())
    assert [r.getMessage() for r in caplog.records if "no KV event has come from tcp://127.0.0.1:1" in r.getMessage()]


async def test_an_answer_is_that_of_the_rank_it_was_sent_to() -> None:
    pages = {str(rank): {"endpoint": f"tcp://127.0.0.1:{rank + 1}", "replay_endpoint": None} for rank in (0, 1)}
    async with fake_vllm(event_sources=pages, ranks=2) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        await engine.start(7)
        assert engine.kv_feeds is not None
        for rank, source in enumerate(engine.kv_feeds.sources()):
            source.on_ready(KvEventPublisher(7, rank, lambda event: None))
        for _ in range(2):
            await outputs(engine, PreprocessedRequest([1] * 40, routing=RoutingHints(dp_rank=1)))
            await anyio.sleep(31.0)
        await engine.cleanup()
        assert [engine.kv_feeds.followers[rank].is_silent for rank in (0, 1)] == [False, True]


async def test_prompts_that_fill_no_block_are_no_sign(caplog: pytest.LogCaptureFixture) -> None:
    made = follower()
    for _ in range(30):
        made.note_answer(3)
        await anyio.sleep(1.0)
    assert not caplog.records


async def test_a_rank_that_published_anything_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    made = follower()
    made.note_answer(4)
    made.receive([b"kv", bytes(8), to_msgpack([1.0, [], 0])])
    for _ in range(30):
        await anyio.sleep(1.0)
        made.note_answer(4)
    assert not caplog.records
    assert not made.is_silent
