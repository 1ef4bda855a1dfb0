"""The load of a server: vLLM's metrics, and the messages of SGLang, as routers and busy thresholds see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq

from engines import ComponentSnapshot, SnapshotPublisher, Worker
from engines.publishing import EngineMetrics
from engines.upstream import ServerFacts, VllmUpstream
from engines.upstream.client import Address, Client
from engines.upstream.load import LoadFeed, VllmLoad, load_stat
from operators.pool import BusyWatch, WorkerLoads, cards_of, load_reports
from pipeline import InvalidArgument
from pipeline.errors import EngineShutdown, InvalidMessage
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput
from pipeline.protocols.kv import ActiveLoad
from pipeline.protocols.limits import BusyThresholds
from pipeline.testing import virtual_time
from pipeline.wire import to_msgpack
from tests.engines.upstream.vllm_worlds import fake_vllm
from tests.engines.upstream.worlds import URL
from tests.engines.worker.worlds import TIMES

RECORDED = Path(__file__).with_name("recorded") / "vllm.json"
FACTS = ServerFacts(model="m", block_size_tokens=32, total_blocks=100, data_parallel_size=2)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """In real time, as sockets know no other, where a test has a source."""
    return request.param if "stats" in request.fixturenames else virtual_time(request.param)


# -- vLLM


def page(usage: float, queries: float = 0, hits: float = 0, engine: str = "0") -> str:
    labels = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"vllm:kv_cache_usage_perc{labels} {usage}\n"
        f"vllm:prefix_cache_queries_total{labels} {queries}\n"
        f"vllm:prefix_cache_hits_total{labels} {hits}\n"
    )


def test_the_metrics_of_a_real_server_are_read() -> None:
    text = "\n".join(json.loads(RECORDED.read_text(encoding="utf-8"))["metrics"])
    found = VllmLoad(ServerFacts(model="tiny", block_size_tokens=32, total_blocks=8192)).read(text)
    assert found == {0: ComponentSnapshot(0, 8192, 0.0, 704 / 1020, 0, active_decode_blocks=0)}


def test_each_rank_has_its_own_load() -> None:
    found = VllmLoad(FACTS).read(page(0.254) + page(0.5, engine="1"))
    assert {rank: (one.kv_used_blocks, one.active_decode_blocks, one.dp_rank) for rank, one in found.items()} == {
        0: (25, 25, 0),
        1: (50, 50, 1),
    }


def test_the_hit_rate_is_that_since_the_page_before() -> None:
    load = VllmLoad(FACTS)
    pages = [page(0, 100, 50), page(0, 200, 50), page(0, 200, 50), page(0, 300, 150), page(0, 10, 5)]
    rates = [load.read(one)[0].kv_cache_hit_rate for one in pages]
    assert rates == [0.5, 0.0, None, 1.0, None], "after a restart the counts are lower"


@pytest.mark.parametrize(
    "text",
    [
        *("", "vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_perc{} NaN", "vllm:kv_cache_usage_perc_other{} 0.5"),
        *(page(0.5, engine=engine) for engine in ("x", "-1", "²", "9" * 5000)),
    ],
    ids=lambda text: repr(text[:60]),
)
def test_a_page_without_the_usage_gives_no_load(text: str) -> None:
    assert VllmLoad(FACTS).read(text) == {}


def test_a_usage_beyond_the_whole_is_the_whole() -> None:
    assert VllmLoad(FACTS).read(page(1.5))[0].kv_used_blocks == 100
    assert VllmLoad(FACTS).read(page(-1))[0].kv_used_blocks == 0


def test_without_the_number_of_blocks_there_is_no_load() -> None:
    assert VllmLoad(ServerFacts(model="m")).read(page(0.5)) == {}


async def test_a_server_that_fills_up_is_busy_until_it_is_not() -> None:
    received: list[ActiveLoad] = []
    thresholds = BusyThresholds(active_decode_blocks_threshold=0.8)
    async with fake_vllm(kv_usage=0.25, total_blocks=512) as server, Runtime.in_process() as runtime:
        engine = VllmUpstream(URL, transport=server.transport)
        async with Worker(engine, runtime=runtime, worker_id=7, environment={}, times=TIMES) as worker:
            reports = load_reports(runtime.events, worker.endpoint)
            loads = WorkerLoads(runtime.workers(worker.endpoint, LLMEngineOutput))
            cards = cards_of(runtime.discovery.watch_models(worker.endpoint.path))
            watch = BusyWatch(loads, thresholds, cards)
            with reports.subscribe(received.append), loads.follow(reports), closing(watch):
                await anyio.sleep(2.5)
                assert received[-1] == ActiveLoad(7, 0, active_decode_blocks=128, kv_used_blocks=128)
                assert watch.busy() == frozenset()
                server.kv_usage = 0.9
                await anyio.sleep(1.5)
                assert watch.busy() == {7}
                server.kv_usage = 0.5
                await anyio.sleep(1.5)
                assert watch.busy() == frozenset()


async def test_a_restart_that_no_connection_shows_is_noticed_by_the_metrics() -> None:
    async with fake_vllm(kv_usage=0.25) as server, Runtime.in_process() as runtime:
        engine = VllmUpstream(URL, transport=server.transport)
        async with Worker(engine, runtime=runtime, worker_id=7, environment={}, times=TIMES) as worker:
            await anyio.sleep(2.5)
            assert worker.failure is None
            server.started_s += 100.0
            await anyio.sleep(1.5)
            assert isinstance(worker.failure, EngineShutdown)


async def test_a_page_that_cannot_be_had_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    published: list[ActiveLoad] = []
    reads: list[str] = []

    def read(text: str) -> dict[int, ComponentSnapshot]:
        reads.append(text)
        if len(reads) == 2:
            raise InvalidMessage("no figures")
        return {0: ComponentSnapshot(len(reads), 10, 0.1)}

    async with fake_vllm() as server:
        feed, client = LoadFeed(FACTS, read), Client(Address.parse(URL), 5.0, server.transport)
        attach = feed.bindings().on_publisher_ready
        assert attach is not None
        attach(SnapshotPublisher(7, [0], EngineMetrics(), published.append))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run, client, {}, 1.0)
            await anyio.sleep(2.5)
            tasks.cancel_scope.cancel()
        await client.aclose()
    assert [one.kv_used_blocks for one in published] == [1, 3]
    assert (feed.malformed, "no figures" in caplog.text) == (1, True)


async def test_a_page_that_is_never_there_is_warned_of_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    def read(text: str) -> dict[int, ComponentSnapshot]:
        raise InvalidMessage("no figures")

    async with fake_vllm() as server:
        feed, client = LoadFeed(FACTS, read), Client(Address.parse(URL), 5.0, server.transport)
        attach = feed.bindings().on_publisher_ready
        assert attach is not None
        attach(SnapshotPublisher(7, [0], EngineMetrics(), lambda load: None))
        with anyio.move_on_after(20.5):
            await feed.run(client, {}, 1.0)
        await client.aclose()
    assert (feed.malformed, caplog.text.count("no figures")) == (21, 3)


def test_a_server_that_shows_no_load_has_no_ranks_of_it() -> None:
    assert LoadFeed(FACTS).bindings().dp_ranks == ()
    assert LoadFeed(FACTS, lambda text: {}).bindings().dp_ranks == [0, 1]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_time_between_two_looks_is_above_zero(seconds: float) -> None:
    with pytest.raises(InvalidArgument) as raised:
        VllmUpstream(URL, load_every_s=seconds)
    assert raised.value.field == "load_every_s"


# -- SGLang


STAT = ["LoadStat", 3, 2, 1000, 4096, 1, 700, 1700, 16, 9000, 5_000_000]


def test_a_load_has_blocks_in_use_and_tokens_still_to_be_computed() -> None:
    assert load_stat(to_msgpack(STAT), 1, 64) == ComponentSnapshot(
        16, 64, 1000 / 4096, dp_rank=1, active_decode_blocks=16, active_prefill_tokens=700
    )


def test_older_servers_send_less_and_an_unknown_size_is_zero() -> None:
    assert load_stat(to_msgpack(["LoadStat", 0, 0, 10, 0, None]), 2, 1) == ComponentSnapshot(
        10, 0, 0.0, dp_rank=2, active_decode_blocks=10
    )


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", *map(to_msgpack, (5, [], ["LoadStat"], ["Other", *STAT[1:]], ["LoadStat", 0, 0, -1, 5, 0]))],
)
def test_what_is_no_load_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidMessage):
        load_stat(payload, 0, 64)


@pytest.fixture
def stats() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """The socket at which a server sends its load, and its endpoint."""
    with bound() as opened:
        yield opened


@contextmanager
def bound() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        context.destroy(linger=0)


async def test_a_message_that_is_too_large_does_not_end_the_load(stats: tuple[zmq.Socket[bytes], str]) -> None:
    socket, endpoint = stats
    published: list[ActiveLoad] = []
    feed = LoadFeed(ServerFacts(model="m", block_size_tokens=64, load_sources={0: endpoint}))
    attach = feed.bindings().on_publisher_ready
    assert attach is not None
    attach(SnapshotPublisher(7, [0], EngineMetrics(), published.append))
    client = Client(Address.parse(URL), 5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run, client, {}, 1.0)
        with anyio.fail_after(10):
            for _ in range(2):
                published.clear()
                while not published:
                    socket.send_multipart([b"load", bytes(8), to_msgpack(STAT)])
                    await anyio.sleep(0.01)
                socket.send_multipart([b"load", bytes(8), b"x" * 100_000])
                for _ in range(500):
                    await anyio.sleep(0.01)
                    if feed.malformed:
                        break
        tasks.cancel_scope.cancel()
    await client.aclose()


async def test_the_load_of_each_rank_comes_from_its_own_socket(stats: tuple[zmq.Socket[bytes], str]) -> None:
    published: dict[int, ActiveLoad] = {}
    with bound() as (other, at):
        feed = LoadFeed(ServerFacts(model="m", block_size_tokens=64, load_sources={2: stats[1], 3: at}))
        attach = feed.bindings().on_publisher_ready
        assert attach is not None
        attach(SnapshotPublisher(7, [2, 3], EngineMetrics(), lambda one: published.update({one.dp_rank: one})))
        client = Client(Address.parse(URL), 5.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run, client, {}, 1.0)
            with anyio.fail_after(10):
                while len(published) < 2:
                    for socket, used in ((stats[0], 640), (other, 1280)):
                        socket.send_multipart([b"load", bytes(8), to_msgpack(["LoadStat", 1, 0, used, 4096, 0, 0])])
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        await client.aclose()
    assert {rank: one.kv_used_blocks for rank, one in published.items()} == {2: 10, 3: 20}


async def test_what_a_server_sends_of_its_load_is_published(stats: tuple[zmq.Socket[bytes], str]) -> None:
    socket, endpoint = stats
    published: list[ActiveLoad] = []
    feed = LoadFeed(ServerFacts(model="m", block_size_tokens=64, load_sources={0: endpoint}))
    attach = feed.bindings().on_publisher_ready
    assert attach is not None
    client = Client(Address.parse(URL), 5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run, client, {}, 1.0)
        attach(SnapshotPublisher(7, [0], EngineMetrics(), published.append))
        with anyio.fail_after(10):
            while not published:
                socket.send_multipart([b"load", bytes(8), to_msgpack(STAT)])
                await anyio.sleep(0.01)
            socket.send_multipart([b"load", b"\xc1"])
            socket.send_multipart([b"load", bytes(8), b"\xc1"])
            socket.send_multipart([b"load", bytes(8), to_msgpack(["LoadStat", 0, 0, 0, 4096, 0, 0])])
            for _ in range(500):
                await anyio.sleep(0.01)
                if not published[-1].kv_used_blocks:
                    break
        tasks.cancel_scope.cancel()
    await client.aclose()
    assert published[0] == ActiveLoad(7, 0, active_decode_blocks=16, active_prefill_tokens=700, kv_used_blocks=16)
    assert published[-1] == ActiveLoad(7, 0, active_decode_blocks=0, active_prefill_tokens=0, kv_used_blocks=0)
    assert feed.malformed == 2
