"""The router kv in front of servers that publish KV events, over real sockets of this machine and in real time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from operators import KvPushRouter
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import Retry, UpstreamGraph
from tests.edge.model_folder import write_model_folder
from tests.engines.upstream.worlds import FakeVllm
from tests.pipeline.llm.kv_events.kv_source import BLOCK_TOKENS, FakeKvSource, stored
from tests.serving.upstream_worlds import ONE, THREE, TWO, Site, generated, site_of, tokens

SOON = Retry(first_s=0.05, longest_s=0.2)
WAIT_S = 20.0
"""How long what must come is waited for; nothing takes that long."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """In real time, as sockets know no other."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model_folder(path := tmp_path_factory.mktemp("model") / "tiny")
    return path


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[Site]:
    async with site_of(folder) as made:
        yield made


@pytest.fixture
def sources() -> Iterator[list[FakeKvSource]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeKvSource.opened()) for _ in range(2)]


def with_events(site: Site, url: str, source: FakeKvSource) -> FakeVllm:
    page = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint, "topic": "", "buffer_steps": 9}
    return site.server(url, event_sources={"0": page}, block_size_tokens=BLOCK_TOKENS, token_s=0.0)


def prompt(first: int, blocks: int) -> Context[PreprocessedRequest]:
    """A prompt of so many whole blocks from a token on, and one more token."""
    ids = [*range(first, first + blocks * BLOCK_TOKENS), 1]
    stop = StopConditions(max_tokens=1, ignore_eos=True)
    return Context(PreprocessedRequest(ids, model="tiny", stop_conditions=stop))


def known(opened: UpstreamGraph) -> dict[int, tuple[str, int]]:
    """How the router knows each worker's blocks, and how many it knows."""
    parts = opened.tokens.graphs["tiny"].parts()  # type: ignore[attr-defined]
    (stage,) = [part for part in parts if isinstance(part, KvPushRouter)]
    return {rank.worker_id: (kind, blocks) for rank, kind, blocks in stage.router.lookup.held_blocks()}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S * 100)):
        if condition():
            return
        await anyio.sleep(0.01)
    raise AssertionError("it never came")


def chain(first: int, blocks: int) -> list[dict[str, Any]]:
    """The stores of the blocks of `prompt`."""
    begins = range(first, first + blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    return [stored(begin, None if begin == first else begin - BLOCK_TOKENS) for begin in begins]


async def test_a_router_that_starts_late_knows_every_cached_block(site: Site, sources: list[FakeKvSource]) -> None:
    servers = [with_events(site, url, source) for url, source in zip((ONE, TWO), sources, strict=True)]
    for source, first in zip(sources, (100, 500), strict=True):
        source.publish(*chain(first, 8))
    async with site.graph(router="kv") as opened:
        await until(lambda: sorted(known(opened).values()) == [("events", 8)] * 2)
        for _ in range(3):
            await tokens(opened, prompt(100, 8))
        await tokens(opened, prompt(500, 8))
        assert [generated(server) for server in servers] == [3, 1]


async def test_the_blocks_of_a_server_that_was_started_again_are_not_believed(
    site: Site, sources: list[FakeKvSource]
) -> None:
    first, second = (with_events(site, url, source) for url, source in zip((ONE, TWO), sources, strict=True))
    sources[0].publish(*chain(100, 8))
    async with site.graph(router="kv", retry=SOON) as opened:
        await until(lambda: sorted(blocks for _, blocks in known(opened).values()) == [0, 8])
        await tokens(opened, prompt(100, 8))
        assert (generated(first), generated(second)) == (1, 0)
        first.kill()
        sources[0].restart()
        await until(lambda: len(known(opened)) == 1)
        first.restart()
        await until(lambda: len(known(opened)) == 2)
        sources[1].publish(*chain(100, 8))
        await until(lambda: sorted(blocks for _, blocks in known(opened).values()) == [0, 8])
        await tokens(opened, prompt(100, 8))
        assert (generated(first), generated(second)) == (1, 1)
        sources[0].publish(*chain(900, 3))  # and what it publishes in its new life counts
        await until(lambda: sorted(blocks for _, blocks in known(opened).values()) == [3, 8])


async def test_servers_with_and_without_events_are_in_one_pool(site: Site, sources: list[FakeKvSource]) -> None:
    seen = with_events(site, ONE, sources[0])
    unseen = site.server(THREE, block_size_tokens=BLOCK_TOKENS, token_s=0.0)
    sources[0].publish(*chain(100, 8))
    async with site.graph(router="kv") as opened:
        await until(lambda: ("events", 8) in known(opened).values())
        await tokens(opened, prompt(100, 8))
        assert (generated(seen), generated(unseen)) == (1, 0)
        for _ in range(50):  # the first choices between equals are drawn
            if not generated(unseen):
                await tokens(opened, prompt(2000, 6))
        assert generated(unseen) == 1
        before = generated(seen)
        for _ in range(5):
            await tokens(opened, prompt(2000, 6))
        assert (generated(seen), generated(unseen)) == (before, 6)
        assert sorted(known(opened).values()) == [("approximate", 6), ("events", 8)]
