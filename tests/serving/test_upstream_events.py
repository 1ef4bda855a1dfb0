"""The cache-aware router in front of servers that publish KV events, over real sockets of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from engines import ShutdownTimes
from engines.upstream import KvEventFollower, Upstream
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import GraphConfig, HostOptions, Retry, UpstreamConfig, UpstreamGraph, upstream_graph
from tests.edge.model_folder import write_model_folder
from tests.engines.upstream.worlds import FakeVllm
from tests.pipeline.llm.kv_events.kv_source import BLOCK_TOKENS, FakeKvSource, removed, stored

ONE, TWO = "http://gpu-1:8000", "http://gpu-2:8000"
RETRY = Retry(first_s=0.05, longest_s=0.2)
WAIT_S = 10.0
SETTLE_S = 0.3
"""What an event needs from the worker to the router's index, with room to spare."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """In real time: sockets know no other."""
    backend: str = request.param
    return backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    write_model_folder(path := tmp_path_factory.mktemp("model") / "tiny")
    return path


@pytest.fixture
def sources() -> Iterator[dict[str, FakeKvSource]]:
    """Where the servers publish."""
    with ExitStack() as opened:
        yield {url: opened.enter_context(FakeKvSource.opened()) for url in (ONE, TWO)}


class Site:
    """Two servers, and the graph in front of them."""

    def __init__(self, tasks: TaskGroup, sources: dict[str, FakeKvSource]) -> None:
        self.servers = {
            url: FakeVllm(
                tasks,
                block_size_tokens=BLOCK_TOKENS,
                token_s=0.0,
                event_sources={"0": {"endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "topic": ""}},
            )
            for url, one in sources.items()
        }
        self.opened: UpstreamGraph | None = None

    def follower(self, url: str) -> KvEventFollower | None:
        """What follows the server's events now."""
        assert self.opened is not None
        for worker in self.opened.workers:
            engine = worker.engine
            if isinstance(engine, Upstream) and str(engine.address) == url and engine.kv_feeds is not None:
                return engine.kv_feeds.followers.get(0)
        return None

    async def until(self, url: str, condition: Callable[[KvEventFollower], bool]) -> None:
        """Wait until that holds of the server's follower, and the router has taken what it delivered."""
        for _ in range(int(WAIT_S * 100)):
            if (found := self.follower(url)) is not None and condition(found):
                await anyio.sleep(SETTLE_S)
                return
            await anyio.sleep(0.01)
        raise AssertionError(f"it never came to that of {url}")

    async def chosen(self, prompt: list[int]) -> set[str]:
        """Return the servers that four requests for a prompt go to."""
        assert self.opened is not None
        before = {url: generated(server) for url, server in self.servers.items()}
        request = PreprocessedRequest(prompt, model="tiny", stop_conditions=StopConditions(max_tokens=1))
        for _ in range(4):
            async with await self.opened.tokens.generate(Context(request)) as stream:
                assert {item.extract_error() async for item in stream} == {None}
        return {url for url, server in self.servers.items() if generated(server) > before[url]}


def generated(server: FakeVllm) -> int:
    return sum(1 for one in server.requests("/inference/v1/generate") if one.json.get("stream"))


@asynccontextmanager
async def site(sources: dict[str, FakeKvSource], folder: Path) -> AsyncIterator[Site]:
    """The servers, with the graph in front of them."""
    async with anyio.create_task_group() as tasks:
        made = Site(tasks, sources)
        config = GraphConfig(model_path=folder, router="kv", seed=1, upstream=UpstreamConfig(urls=(ONE, TWO)))
        transports = {url: server.transport for url, server in made.servers.items()}
        hosting = HostOptions({}, transports=transports, times=ShutdownTimes(grace_s=0.0, timeout_s=5.0))
        async with upstream_graph(config, hosting, retry=RETRY) as made.opened:
            yield made
        tasks.cancel_scope.cancel()


def publish(source: FakeKvSource, prompt: list[int], blocks: int, **how: Any) -> None:
    """Publish the first blocks of a prompt, a batch for each."""
    for first in prompt[: blocks * BLOCK_TOKENS : BLOCK_TOKENS]:
        source.publish(stored(first, first - BLOCK_TOKENS if first > prompt[0] else None), **how)


PROMPT, OTHER = list(range(100, 117)), list(range(500, 517))


async def test_a_router_that_starts_late_knows_what_the_servers_had_cached(
    sources: dict[str, FakeKvSource], folder: Path
) -> None:
    publish(sources[TWO], PROMPT, 4)
    publish(sources[ONE], OTHER, 4)
    async with site(sources, folder) as found:
        for url in (ONE, TWO):
            await found.until(url, lambda one: one.replayed_batches == 4)
        assert await found.chosen(PROMPT) == {TWO}
        assert await found.chosen(OTHER) == {ONE}


async def test_events_that_are_lost_on_the_way_are_known_after_the_next(
    sources: dict[str, FakeKvSource], folder: Path
) -> None:
    async with site(sources, folder) as found:
        await found.until(TWO, lambda one: one.is_connected)
        publish(sources[TWO], PROMPT, 4, sent=False)
        sources[TWO].publish(removed(9))
        await found.until(TWO, lambda one: one.replayed_batches == 5)
        assert await found.chosen(PROMPT) == {TWO}


async def test_the_blocks_of_a_server_that_was_started_again_are_not_believed(
    sources: dict[str, FakeKvSource], folder: Path
) -> None:
    publish(sources[TWO], PROMPT, 4)
    publish(sources[ONE], PROMPT, 1)
    async with site(sources, folder) as found:
        await found.until(ONE, lambda one: one.has_received)
        await found.until(TWO, lambda one: one.replayed_batches == 4)
        assert await found.chosen(PROMPT) == {TWO}
        before = found.follower(TWO)
        found.servers[TWO].kill()
        sources[TWO].restart()
        found.servers[TWO].restart()
        await found.until(TWO, lambda one: one is not before and one.is_connected)
        assert await found.chosen(PROMPT) == {ONE}
        publish(sources[TWO], PROMPT, 4)
        await found.until(TWO, lambda one: one.has_received)
        assert await found.chosen(PROMPT) == {TWO}


async def test_the_blocks_of_an_engine_that_began_anew_behind_its_server_are_not_believed(
    sources: dict[str, FakeKvSource], folder: Path
) -> None:
    publish(sources[TWO], PROMPT, 4)
    publish(sources[ONE], PROMPT, 1)
    async with site(sources, folder) as found:
        await found.until(ONE, lambda one: one.has_received)
        await found.until(TWO, lambda one: one.replayed_batches == 4)
        assert await found.chosen(PROMPT) == {TWO}
        sources[TWO].restart()
        await found.until(TWO, lambda one: one.restarts == 1)
        assert await found.chosen(PROMPT) == {ONE}


async def test_a_cleared_cache_is_not_believed(sources: dict[str, FakeKvSource], folder: Path) -> None:
    publish(sources[TWO], PROMPT, 4)
    publish(sources[ONE], PROMPT, 1)
    async with site(sources, folder) as found:
        await found.until(ONE, lambda one: one.has_received)
        await found.until(TWO, lambda one: one.replayed_batches == 4)
        sources[TWO].publish({"type": "AllBlocksCleared"})
        await anyio.sleep(SETTLE_S)
        assert await found.chosen(PROMPT) == {ONE}
