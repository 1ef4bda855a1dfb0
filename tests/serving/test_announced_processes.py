"""Workers and front ends that are processes of their own, over a network in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import DisaggregationMode
from operators import KvPushRouter
from pipeline import Unavailable
from serving.deployment import RouterName
from serving.http import app
from tests.serving.announced_worlds import Cluster, answer, chat, first_text, processes_of, text_of
from tests.serving.worlds import chat as http_chat
from tests.serving.worlds import request_to

MOCK: dict[str, Any] = {"engine": "mocker", "engine_args": {"speedup_ratio": "100", "block_size": "4"}}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with processes_of(tmp_path / "cache") as made:
        yield made


async def listed(service: Any) -> list[str]:
    page = await request_to(service, "/v1/models", method="GET").run()
    return sorted(one["id"] for one in page.json["data"])


async def test_each_front_end_serves_what_the_workers_of_all_processes_announce(cluster: Cluster, folder: Path) -> None:
    await cluster.start("one")
    await cluster.start("tiny", model_path=folder)
    async with cluster.front() as first, cluster.front() as second:
        for opened in (first, second):
            assert await listed(app(opened.graph)) == ["one", "tiny"]
            assert await answer(opened.graph, chat("hello", "one")) == "hello"
            assert "hello" in await answer(opened.graph, chat("hello", "tiny"))


async def test_a_worker_of_another_process_restarts_behind_the_same_graph(cluster: Cluster) -> None:
    worker = await cluster.start()
    async with cluster.front() as opened:
        assert await answer(opened.graph, chat("hello")) == "hello"
        graphs = dict(opened.models.offers.switch.graphs)
        await cluster.end(worker)
        await anyio.sleep(1)
        with pytest.raises(Unavailable):
            await answer(opened.graph, chat("hello"))
        await cluster.start()
        await anyio.sleep(1)
        assert dict(opened.models.offers.switch.graphs) == graphs
        assert await answer(opened.graph, chat("hello")) == "hello"


async def test_a_request_moves_on_when_its_process_dies(cluster: Cluster) -> None:
    workers = [await cluster.start(engine_args={"delay_s": "1"}) for _ in range(2)]
    async with cluster.front() as opened, await opened.graph.generate(chat("hello")) as stream:
        first = await anext(stream)
        (busy,) = [one for one in workers if one.served is not None and one.served.running]
        await cluster.kill(busy)
        assert (first_text(first) + await text_of(stream)).startswith("hhello"), "the echo of another worker goes on"


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_prefill_and_decode_workers_of_several_processes_share_a_request(
    cluster: Cluster, router: RouterName
) -> None:
    await cluster.start(mode=DisaggregationMode.DECODE, **MOCK)
    await cluster.start(mode=DisaggregationMode.PREFILL, **MOCK)
    async with cluster.front(router=router) as opened:
        service = app(opened.graph)
        for _ in range(3):
            answered = await http_chat(service, model="echo", max_tokens=5).run()
            assert (answered.status, answered.json["usage"]["completion_tokens"]) == (200, 5)


async def test_the_kv_router_follows_the_blocks_of_other_processes(cluster: Cluster) -> None:
    for _ in range(4):
        await cluster.start(**MOCK)
    async with cluster.front(router="kv") as opened:
        prompt = "the same long prompt, which has many blocks of four tokens each"
        usages = []
        for _ in range(4):
            answered = await http_chat(
                app(opened.graph), model="echo", max_tokens=2, messages=[{"role": "user", "content": prompt}]
            ).run()
            usages.append(answered.json["usage"])
            await anyio.sleep(1)
        (stage,) = [one for one in opened.models.offers.tokens.graphs["echo"].parts() if isinstance(one, KvPushRouter)]
        assert stage.router.block_size_tokens == 4
        cached = [usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in usages]
        assert cached[0] == 0
        assert all(tokens > 0.8 * usages[0]["prompt_tokens"] for tokens in cached[1:]), cached
