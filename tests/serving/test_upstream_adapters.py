"""LoRA adapters of servers, each a model of its own: which are listed, and which server has a request for one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from operators import KvPushRouter, ModelNotFound
from pipeline import Context, Unavailable
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import UpstreamGraph
from serving.http import app
from tests.engines.upstream import worlds
from tests.engines.upstream.handover_worlds import Blocks, FakeHalf
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import FakeVllm
from tests.engines.upstream.worlds import continued
from tests.serving.upstream_worlds import ONE, THREE, TWO, Site, generated, request, tokens
from tests.serving.worlds import chat, request_to

ROUTERS = pytest.mark.parametrize("router", ["round-robin", "random", "p2c", "least-loaded", "kv"])


async def listed(opened: UpstreamGraph) -> list[str]:
    page = await request_to(app(opened.graph), "/v1/models", method="GET").run()
    return sorted(one["id"] for one in page.json["data"])


def models(server: FakeVllm) -> list[str]:
    """The models that streamed requests named at the server."""
    return [one.json["model"] for one in server.requests("/inference/v1/generate") if one.json.get("stream")]


@ROUTERS
async def test_a_request_for_an_adapter_goes_to_a_server_that_has_it(site: Site, router: str) -> None:
    site.server(ONE)
    french, both = site.server(TWO, adapters=("french",)), site.server(THREE, adapters=("french", "german"))
    async with site.graph(router=router) as opened:
        assert await listed(opened) == ["french", "german", "tiny"]
        for first in range(1, 13):
            assert await tokens(opened, request(first, model="french")) == continued([first, 6, 7], 5)
        for first in range(1, 4):
            assert await tokens(opened, request(first, model="german")) == continued([first, 6, 7], 5)
        assert generated(site.servers[ONE]) == 0
        assert {*models(french), *models(both)} == {"french", "german"}
        assert models(both).count("german") == 3
        assert "german" not in models(french)


async def test_an_adapter_answers_chats_under_its_own_name(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "VOCABULARY", 256)
    server = site.server(ONE, adapters=("french",))
    async with site.graph() as opened:
        service = app(opened.graph)
        answer = await chat(service, model="french", max_tokens=3).run()
        assert (answer.status, answer.json["model"]) == (200, "french")
        assert (await chat(service, model="tiny", max_tokens=3).run()).status == 200
        assert models(server) == ["french", "tiny"]
        card = (await request_to(service, "/v1/models/french", method="GET").run()).json
        assert card["context_window"] == 4096


async def test_a_drawing_shows_the_adapters(site: Site) -> None:
    site.server(ONE, adapters=("french",))
    async with site.graph() as opened:
        assert "LoraAdapter('french')" in opened.graph.draw("text")
        assert opened.graph.draw("text").count("LoraAdapter") == 1


async def test_an_adapter_that_no_server_has_is_not_found(site: Site) -> None:
    site.server(ONE, adapters=("french",))
    async with site.graph() as opened:
        with pytest.raises(ModelNotFound):
            await tokens(opened, request(model="german"))
        assert (await chat(app(opened.graph), model="german").run()).status == 404


async def test_adapters_that_come_and_go_are_seen_at_the_next_look(site: Site) -> None:
    one, two = site.server(ONE), site.server(TWO)
    async with site.graph() as opened:
        assert await listed(opened) == ["tiny"]
        one.adapters = ("french",)
        await anyio.sleep(1.5)
        assert await listed(opened) == ["french", "tiny"]
        for first in range(4):
            await tokens(opened, request(first, model="french"))
        two.adapters, one.adapters = ("french",), ()
        await anyio.sleep(1.5)
        for first in range(4):
            await tokens(opened, request(first, model="french"))
        assert (models(one), models(two)) == (["french"] * 4, ["french"] * 4)
        two.adapters = ()
        await anyio.sleep(1.5)
        assert await listed(opened) == ["tiny"]
        with pytest.raises(ModelNotFound):
            await tokens(opened, request(model="french"))
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)


async def test_while_the_server_of_an_adapter_is_down_requests_for_it_are_to_come_again(site: Site) -> None:
    server = site.server(ONE, adapters=("french",))
    site.server(TWO)
    async with site.graph() as opened:
        server.kill()
        await anyio.sleep(3)
        assert await listed(opened) == ["french", "tiny"]
        with pytest.raises(Unavailable, match="no worker has the adapter 'french' now"):
            await tokens(opened, request(model="french"))
        server.restart()
        await anyio.sleep(5)
        assert await tokens(opened, request(model="french")) == continued([5, 6, 7], 5)
        server.kill()
        server.adapters = ()
        server.restart()
        await anyio.sleep(8)
        assert await listed(opened) == ["tiny"]


async def test_an_answer_of_an_adapter_goes_on_where_the_adapter_is(site: Site) -> None:
    one, two, three = (site.server(url, token_s=0.1) for url in (ONE, TWO, THREE))
    one.adapters = two.adapters = ("french",)
    async with site.graph() as opened:
        found: list[list[int]] = []

        async def read() -> None:
            found.append(await tokens(opened, request(5, 40, model="french")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(1.5)
            (one if models(one) else two).kill()
        assert found == [continued([5, 6, 7], 40)]
        assert (models(one), models(two), models(three)) == (["french"], ["french"], [])


async def test_the_same_prompt_is_other_blocks_for_an_adapter(site: Site) -> None:
    for url in (ONE, TWO):
        site.server(url, block_size_tokens=32, adapters=("french",))
    ids = list(range(100, 261))
    async with site.graph(router="kv") as opened:
        for _ in range(3):
            for model in ("tiny", "french"):
                prompt = PreprocessedRequest(ids, model=model, stop_conditions=StopConditions(max_tokens=1))
                await tokens(opened, Context(prompt))
        (stage,) = [part for part in graph_of(opened, "tiny").parts() if isinstance(part, KvPushRouter)]
        held = [blocks for _, _, blocks in stage.router.lookup.held_blocks()]
        assert sum(held) == 10  # five of each
        assert [part.adapter for part in graph_of(opened, "french").parts() if hasattr(part, "adapter")] == ["french"]


def graph_of(opened: UpstreamGraph, model: str) -> Any:
    return opened.tokens.graphs[model]  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_it", [True, False])
@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_an_adapter_is_prefilled_where_prefill_has_it_and_else_where_it_decodes(
    site: Site, router: str, has_it: bool
) -> None:
    blocks = Blocks()
    prefill = site.add(ONE, FakeHalf, blocks=blocks, adapters=("french",) if has_it else ())
    decode = site.add(TWO, FakeHalf, blocks=blocks, adapters=("french",))
    async with site.graph(prefill=(ONE,), router=router) as opened:
        assert await tokens(opened, request(model="french")) == continued([5, 6, 7], 5)
        sent = [one.json for one in prefill.requests("/inference/v1/generate")]
        assert [one["model"] for one in sent if one.get("request_id")] == (["french"] if has_it else [])
        assert models(decode) == ["french"]
        assert len(blocks.fetched) == has_it


async def test_what_only_prefill_servers_have_is_no_model(site: Site) -> None:
    blocks = Blocks()
    site.add(ONE, FakeHalf, blocks=blocks, adapters=("french",))
    site.add(TWO, FakeHalf, blocks=blocks)
    async with site.graph(prefill=(ONE,)) as opened:
        assert await listed(opened) == ["tiny"]


@pytest.mark.parametrize("comes_later", [False, True])
async def test_a_model_comes_before_an_adapter_with_its_name(
    site: Site, comes_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    site.server(ONE, adapters=("qwen", "tiny"))
    late = site.server(TWO, model="qwen")
    if comes_later:
        late.kill()
    async with site.graph() as opened:
        if comes_later:
            assert await tokens(opened, request(model="qwen")) == continued([5, 6, 7], 5)
            late.restart()
            await anyio.sleep(5)
        assert await listed(opened) == ["qwen", "tiny"]
        assert await tokens(opened, request(model="qwen")) == continued([5, 6, 7], 5)
        assert (generated(site.servers[ONE]), generated(late)) == (int(comes_later), 1)
        assert await tokens(opened, request(model="tiny")) == continued([5, 6, 7], 5)
        assert "model has that name" in caplog.text


async def test_adapters_of_sglang_servers(site: Site) -> None:
    server = site.add(ONE, FakeSglang, adapters=("french",))
    async with site.graph() as opened:
        assert await tokens(opened, request(model="french")) == continued([5, 6, 7], 5)
        assert [one.json["lora_path"] for one in server.requests("/generate")] == ["french"]
