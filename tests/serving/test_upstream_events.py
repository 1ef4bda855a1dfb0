"""The router kv in front of servers that publish KV events, over real sockets of this machine and in real time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from engines.upstream import Upstream
from operators import KvPushRouter
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import Retry, UpstreamGraph
from tests.engines.upstream.vllm_worlds import FakeVllm
from tests.pipeline.llm.kv_events.kv_source import BLOCK_TOKENS, FakeKvSource, removed, stored
from tests.serving.upstream_worlds import ONE, THREE, TWO, Site, generated, tokens

SOON = Retry(first_s=0.05, longest_s=0.2)
WAIT_S = 20.0
"""How long what must come is waited for; nothing takes that long."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """In real time, as sockets know no other."""
    return request.param


@pytest.fixture
def sources() -> Iterator[list[FakeKvSource]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeKvSource.opened()) for _ in range(2)]


def with_events(site: Site, url: str, source: FakeKvSource, **fields: Any) -> FakeVllm:
    page = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint, "topic": "", "buffer_steps": 9}
    return site.server(url, event_sources={"0": page}, block_size_tokens=BLOCK_TOKENS, token_s=0.0, **fields)


def two_with_events(site: Site, sources: list[FakeKvSource], **fields: Any) -> list[FakeVllm]:
    return [with_events(site, url, source, **fields) for url, source in zip((ONE, TWO), sources, strict=True)]


def prompt(first: int, blocks: int, model: str = "tiny") -> Context[PreprocessedRequest]:
    """A prompt of so many whole blocks from a token on, and one more token."""
    ids = [*range(first, first + blocks * BLOCK_TOKENS), 1]
    stop = StopConditions(max_tokens=1, ignore_eos=True)
    return Context(PreprocessedRequest(ids, model=model, stop_conditions=stop))


def chain(first: int, blocks: int, **fields: Any) -> list[dict[str, Any]]:
    """The stores of the blocks of `prompt`."""
    begins = range(first, first + blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    return [stored(begin, None if begin == first else begin - BLOCK_TOKENS, **fields) for begin in begins]


def known(opened: UpstreamGraph) -> dict[str, tuple[str, int]]:
    """How the router knows the blocks of each server that is there, and how many it knows."""
    parts = opened.tokens.graphs["tiny"].parts()  # type: ignore[attr-defined]
    (stage,) = [part for part in parts if isinstance(part, KvPushRouter)]
    urls = {one.worker_id: str(one.engine.address) for one in opened.workers if isinstance(one.engine, Upstream)}
    held = {rank.worker_id: (kind, blocks) for rank, kind, blocks in stage.router.lookup.held_blocks()}
    return {urls[worker]: found for worker, found in held.items() if worker in urls}


def by_events(one: int, two: int) -> dict[str, tuple[str, int]]:
    """What is known of two servers with events, in blocks."""
    return {ONE: ("events", one), TWO: ("events", two)}


async def until_known(opened: UpstreamGraph, expected: dict[str, tuple[str, int]]) -> None:
    """Wait until this is known of exactly these servers."""
    for _ in range(int(WAIT_S * 100)):
        if known(opened) == expected:
            return
        await anyio.sleep(0.01)
    raise AssertionError(f"it never came; known is {known(opened)}")


async def counts(opened: UpstreamGraph, servers: list[FakeVllm], prompts: list[tuple[int, int]]) -> list[int]:
    """Send the prompts one after the other; return how many each server had of them."""
    before = [generated(server) for server in servers]
    for first, blocks in prompts:
        await tokens(opened, prompt(first, blocks))
    return [generated(server) - count for server, count in zip(servers, before, strict=True)]


async def test_a_router_that_starts_late_knows_every_cached_block(site: Site, sources: list[FakeKvSource]) -> None:
    servers = two_with_events(site, sources)
    for source, first in zip(sources, (100, 500), strict=True):
        source.publish(*chain(first, 8))
    async with site.graph(router="kv") as opened:
        await until_known(opened, by_events(8, 8))
        assert await counts(opened, servers, [(100, 8), (500, 8), (100, 8), (100, 8)]) == [3, 1]


async def test_events_that_are_lost_on_the_way_are_known_after_the_next(
    site: Site, sources: list[FakeKvSource]
) -> None:
    servers = two_with_events(site, sources)
    async with site.graph(router="kv") as opened:
        sources[1].publish(*chain(500, 1))
        await until_known(opened, by_events(0, 1))
        for event in chain(100, 4):
            sources[1].publish(event, sent=False)
        sources[1].publish(removed(9))
        await until_known(opened, by_events(0, 5))
        assert await counts(opened, servers, [(100, 4)] * 2) == [0, 2]


async def test_the_blocks_of_a_server_that_was_started_again_are_not_believed(
    site: Site, sources: list[FakeKvSource]
) -> None:
    servers = two_with_events(site, sources)
    sources[0].publish(*chain(100, 8))
    sources[1].publish(*chain(100, 2))
    async with site.graph(router="kv", retry=SOON) as opened:
        await until_known(opened, by_events(8, 2))
        assert await counts(opened, servers, [(100, 8)]) == [1, 0]
        servers[0].kill()
        sources[0].restart()
        await until_known(opened, {TWO: ("events", 2)})
        servers[0].restart()
        await until_known(opened, by_events(0, 2))
        assert await counts(opened, servers, [(100, 8)]) == [0, 1]
        sources[0].publish(*chain(900, 3))  # and what it publishes in its new life counts
        await until_known(opened, by_events(3, 2))
        assert await counts(opened, servers, [(900, 3)]) == [1, 0]


async def test_the_blocks_of_an_engine_that_began_anew_behind_its_server_are_not_believed(
    site: Site, sources: list[FakeKvSource]
) -> None:
    servers = two_with_events(site, sources)
    sources[0].publish(*chain(100, 2))
    sources[1].publish(*chain(100, 4))
    async with site.graph(router="kv") as opened:
        await until_known(opened, by_events(2, 4))
        assert await counts(opened, servers, [(100, 4)]) == [0, 1]
        sources[1].restart()
        await until_known(opened, by_events(2, 0))
        assert await counts(opened, servers, [(100, 4)]) == [1, 0]


async def test_a_cleared_cache_is_not_believed(site: Site, sources: list[FakeKvSource]) -> None:
    servers = two_with_events(site, sources)
    sources[0].publish(*chain(100, 2))
    sources[1].publish(*chain(100, 4))
    async with site.graph(router="kv") as opened:
        await until_known(opened, by_events(2, 4))
        sources[1].publish({"type": "AllBlocksCleared"})
        await until_known(opened, by_events(2, 0))
        assert await counts(opened, servers, [(100, 4)]) == [1, 0]


async def test_a_prompt_is_looked_for_among_the_blocks_of_its_own_adapter(
    site: Site, sources: list[FakeKvSource]
) -> None:
    servers = two_with_events(site, sources, adapters=("a",))
    sources[0].publish(*chain(100, 8, lora_id=1, lora_name="a", extra_keys=[["a"]]))
    sources[1].publish(*chain(100, 8))
    async with site.graph(router="kv") as opened:
        await until_known(opened, by_events(8, 8))
        for model in ("a", "tiny", "a", "a"):
            await tokens(opened, prompt(100, 8, model))
        sent = [[one.json for one in server.requests("/inference/v1/generate")] for server in servers]
        named = [[one["model"] for one in those if one.get("stream")] for those in sent]
        assert named == [["a"] * 3, ["tiny"]]


async def test_servers_with_and_without_events_are_in_one_pool(site: Site, sources: list[FakeKvSource]) -> None:
    seen = with_events(site, ONE, sources[0])
    unseen = site.server(THREE, block_size_tokens=BLOCK_TOKENS, token_s=0.0)
    sources[0].publish(*chain(100, 8))
    async with site.graph(router="kv") as opened:
        await until_known(opened, {ONE: ("events", 8), THREE: ("approximate", 0)})
        assert await counts(opened, [seen, unseen], [(100, 8)]) == [1, 0]
        for _ in range(50):  # the first choices between equals are drawn
            if not generated(unseen):
                await tokens(opened, prompt(2000, 6))
        assert await counts(opened, [seen, unseen], [(2000, 6)] * 5) == [0, 5]
        assert known(opened) == {ONE: ("events", 8), THREE: ("approximate", 6)}
