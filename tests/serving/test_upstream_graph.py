"""The graph in front of servers: which are found, left out and back, and what clients notice of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from engines.upstream import OpenAIUpstream
from operators import KvPushRouter, ModelNotFound
from operators.kv import KvRouterConfig
from pipeline import Context, InvalidArgument, Unavailable
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment.upstream_graph import TRY_S
from serving.http import app
from tests.engines.upstream import worlds
from tests.engines.upstream.openai_worlds import FakeLlama, FakeText
from tests.engines.upstream.vllm_worlds import FakeVllm
from tests.engines.upstream.worlds import continued
from tests.serving.upstream_worlds import ONE, TWO, Site, generated, request, tokens
from tests.serving.worlds import chat, request_to


async def listed(service: Any) -> list[str]:
    page = await request_to(service, "/v1/models", method="GET").run()
    return [one["id"] for one in page.json["data"]]


# -- what is found


async def test_all_servers_of_a_model_are_one_pool(site: Site) -> None:
    for url in (ONE, TWO):
        site.server(url)
    async with site.graph() as opened:
        for first in range(1, 5):
            assert await tokens(opened, request(first)) == continued([first, 6, 7], 5)
        assert [generated(server) for server in site.servers.values()] == [2, 2]
        assert len(opened.workers) == 2


async def test_the_facts_of_the_server_are_in_the_card(site: Site) -> None:
    site.server(ONE, block_size_tokens=64, total_blocks=99, context_length=2048)
    async with site.graph() as opened:
        (worker,) = opened.workers
        assert worker.card is not None
        assert (worker.card.display_name, worker.card.kv_cache_block_size) == ("tiny", 64)
        assert (worker.card.runtime_config.total_kv_blocks, worker.card.runtime_config.context_length) == (99, 2048)
        assert worker.endpoint.path == "penstock-tiny/backend/generate"
        listed_model = (await request_to(app(opened.graph), "/v1/models/tiny", method="GET").run()).json
        assert listed_model["context_window"] == 2048


async def test_a_chat_goes_to_the_server_and_comes_back_as_text(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "VOCABULARY", 256)
    server = site.server(ONE)
    async with site.graph() as opened:
        answer = await chat(app(opened.graph), model="tiny", max_tokens=4, stream=True).run()
        assert answer.status == 200
        assert answer.chunks[-1]["choices"][0]["finish_reason"] == "length"
        (sent,) = [one.json for one in server.requests("/inference/v1/generate") if one.json.get("stream")]
        assert len(sent["token_ids"]) > 2
        assert sent["model"] == "tiny"


async def test_each_model_has_a_graph_of_its_own(site: Site) -> None:
    site.server(ONE, model="Org/Llama 3")
    site.server(TWO, model="qwen", aliases=("small",))
    async with site.graph() as opened:
        service = app(opened.graph)
        assert sorted(await listed(service)) == ["Org/Llama 3", "qwen", "small"]
        for model in ("Org/Llama 3", "qwen", "small", "qwen"):
            assert await tokens(opened, request(model=model)) == continued([5, 6, 7], 5)
        assert [generated(server) for server in site.servers.values()] == [1, 3]
        with pytest.raises(ModelNotFound):
            await tokens(opened, request(model="mistral"))
        assert (await chat(service, model="mistral").run()).status == 404
        names = sorted(worker.endpoint.namespace for worker in opened.workers)
        assert names[0].startswith("penstock-org-llama-3-")
        assert names[1] == "penstock-qwen"


async def test_a_name_of_ones_own_is_the_only_one(site: Site) -> None:
    site.server(ONE, model="/models/x", aliases=("y",))
    async with site.graph(model_name="mine") as opened:
        assert await listed(app(opened.graph)) == ["mine"]
        assert await tokens(opened, request(model="mine")) == continued([5, 6, 7], 5)


async def test_the_tokenizer_is_read_where_the_server_has_its_model(site: Site, folder: Path) -> None:
    site.server(ONE, root=str(folder))
    async with site.graph(model_path=None) as opened:
        assert await listed(app(opened.graph)) == ["tiny"]


async def test_a_model_without_a_tokenizer_on_this_machine_is_left_out(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.server(ONE, root="org/model")
    async with site.graph(model_path=None) as opened:
        (supervisor,) = opened.supervisors
        assert isinstance(supervisor.problem, InvalidArgument)
        assert "from 'org/model', which is no folder here, and has no tokenizer" in str(supervisor.problem)
        assert "--model-path FOLDER, or --upstream-model-path tiny=FOLDER" in str(supervisor.problem)
        assert opened.workers == []
    assert "is left out" in caplog.text


async def test_any_other_server_is_used_by_its_openai_api(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeVllm._models
    monkeypatch.setattr(FakeVllm, "_models", lambda self: [one | {"owned_by": "x"} for one in models(self)])
    server = site.server(ONE)
    async with site.graph(router="kv") as opened:
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        (worker,) = opened.workers
        assert isinstance(worker.engine, OpenAIUpstream)
        assert generated(server) == 0
        assert [one.json["prompt"] for one in server.requests("/v1/completions") if one.json["stream"]] == [[5, 6, 7]]
        assert worker.card is not None
        assert worker.card.runtime_config.kv_event_publishing_enabled is False


@pytest.mark.parametrize("kind", ["auto", "openai"])
async def test_any_other_server_has_no_half_of_a_request(
    site: Site, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = FakeVllm._models
    monkeypatch.setattr(FakeVllm, "_models", lambda self: [one | {"owned_by": "x"} for one in models(self)])
    for url in (ONE, TWO):
        site.server(url)
    async with site.graph(prefill=(ONE,), servers={"kind": kind}) as opened:
        problems = [one.problem for one in (*opened.supervisors, *opened.prefill_supervisors)]
        assert [getattr(one, "field", None) for one in problems] == ["upstream", "prefill_upstream"]


async def test_a_server_of_another_kind_answers_as_far_as_it_can(site: Site) -> None:
    """By ids where it sends them; in text otherwise, which is shown as it came."""
    site.add(ONE, FakeLlama)
    site.add(TWO, FakeText)
    async with site.graph() as opened:
        assert await tokens(opened, request(model="smol.gguf")) == continued([5, 6, 7], 5)
        answer = await chat(app(opened.graph), model="small", max_tokens=3).run()
        assert answer.json["choices"][0]["message"]["content"] == "0 1 2 "
        assert answer.json["usage"]["completion_tokens"] == 3


async def test_a_server_that_takes_no_ids_is_left_out_by_name(site: Site) -> None:
    site.add(ONE, FakeText, takes_ids=False)
    async with site.graph() as opened:
        (supervisor,) = opened.supervisors
        assert isinstance(supervisor.problem, InvalidArgument)
        assert "takes no prompts as token ids" in supervisor.problem.message


async def test_a_server_of_another_kind_computes_no_prompts_for_others(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.add(ONE, FakeLlama)
    site.server(TWO)
    async with site.graph(prefill=(ONE,)):
        assert "http://gpu-1:8000 is left out" in caplog.text
        assert "hands over no KV blocks" in caplog.text


# -- what is down


async def test_a_server_that_is_down_is_left_out_and_back_by_itself(site: Site) -> None:
    up, down = site.server(ONE), site.server(TWO)
    down.kill()
    async with site.graph() as opened:
        for first in range(1, 4):
            assert await tokens(opened, request(first)) == continued([first, 6, 7], 5)
        assert (generated(up), generated(down), len(opened.workers)) == (3, 0, 1)
        down.restart()
        await anyio.sleep(5)
        assert len(opened.workers) == 2
        for first in range(1, 5):
            await tokens(opened, request(first))
        assert generated(down) == 2


async def test_a_server_that_does_not_answer_holds_the_start_up_for_a_while_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.server(ONE)
    silent = site.server(TWO)
    answers = FakeVllm.answer

    async def answer(self: FakeVllm, line: Any, received: Any) -> None:
        if self is silent:
            await anyio.sleep_forever()
        await answers(self, line, received)

    with monkeypatch.context() as patched:
        patched.setattr(FakeVllm, "answer", answer)
        began_s = anyio.current_time()
        async with site.graph() as opened:
            assert anyio.current_time() - began_s == pytest.approx(TRY_S)
            assert await tokens(opened, request()) == continued([5, 6, 7], 5)
            assert len(opened.workers) == 1
            patched.undo()
            await anyio.sleep(40)
            assert len(opened.workers) == 2


async def test_while_no_server_is_there_clients_are_told_to_come_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "VOCABULARY", 256)
    server = site.server(ONE)
    server.kill()
    async with site.graph() as opened:
        service = app(opened.graph)
        assert (await chat(service, model="tiny").run()).status == 503
        assert (await request_to(service, "/health", method="GET").run()).status == 503
        server.restart()
        await anyio.sleep(5)
        answer = await chat(service, model="tiny", max_tokens=2).run()
        assert answer.status == 200, answer.content
        assert (await request_to(service, "/health", method="GET").run()).status == 200


async def test_a_model_whose_servers_are_all_gone_is_unavailable_and_stays_listed(site: Site) -> None:
    server = site.server(ONE)
    async with site.graph(migration_limit=0) as opened:
        server.kill()
        await anyio.sleep(3)
        assert opened.workers == []
        with pytest.raises(Unavailable):
            await tokens(opened, request())
        service = app(opened.graph)
        assert await listed(service) == ["tiny"]
        assert (await chat(service, model="tiny").run()).status == 503
        server.restart()
        await anyio.sleep(5)
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)


async def test_a_restarted_server_is_another_instance(site: Site) -> None:
    server = site.server(ONE)
    async with site.graph() as opened:
        (before,) = opened.workers
        server.kill()
        server.restart()
        await anyio.sleep(8)
        (after,) = opened.workers
        assert after.worker_id != before.worker_id
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)


async def test_an_answer_goes_on_at_another_server_token_by_token(site: Site) -> None:
    servers = [site.server(url, token_s=0.1) for url in (ONE, TWO)]
    async with site.graph() as opened:
        found: dict[int, list[int]] = {}

        async def read(first: int) -> None:
            found[first] = await tokens(opened, request(first, 40))

        async with anyio.create_task_group() as tasks:
            for first in range(1, 7):
                tasks.start_soon(read, first)
            await anyio.sleep(1.5)
            assert generated(servers[0]) == 3
            servers[0].kill()
        assert found == {first: continued([first, 6, 7], 40) for first in range(1, 7)}
        assert generated(servers[1]) == 6


async def test_a_server_with_another_model_after_its_restart_joins_that_model(site: Site) -> None:
    server = site.server(ONE)
    async with site.graph() as opened:
        server.kill()
        server.model = "other"
        server.restart()
        await anyio.sleep(8)
        assert await tokens(opened, request(model="other")) == continued([5, 6, 7], 5)
        with pytest.raises(Unavailable):
            await tokens(opened, request(model="tiny"))


async def test_the_metrics_show_which_servers_are_there(site: Site) -> None:
    site.server(ONE)
    site.server(TWO).kill()
    async with site.graph() as opened:
        text = opened.native_metrics()
        (worker,) = opened.workers
        assert f'upstream_up{{upstream="{ONE}",role="answer",worker_id="{worker.worker_id:x}"}} 1' in text
        assert f'upstream_up{{upstream="{TWO}",role="answer",worker_id=""}} 0' in text
        assert text.count("# TYPE dynamo_frontend_upstream_up gauge") == 1


# -- routers, ends


async def test_the_router_kv_predicts_the_cache_of_a_server_without_events(site: Site) -> None:
    for url in (ONE, TWO):
        site.server(url, block_size_tokens=32)
    async with site.graph(router="kv") as opened:
        beginning = list(range(100, 260))
        for turn in range(4):
            prompt = PreprocessedRequest([*beginning, turn], model="tiny", stop_conditions=StopConditions(max_tokens=1))
            await tokens(opened, Context(prompt))
        assert sorted(generated(server) for server in site.servers.values()) == [0, 4]


@pytest.mark.parametrize("shown_by", ["refusal", "loading", "start time", "a request"])
async def test_what_was_predicted_of_a_server_that_was_started_again_is_forgotten(site: Site, shown_by: str) -> None:
    servers = [site.add(url, FakeLlama, has_start_time=shown_by == "start time") for url in (ONE, TWO)]
    beginning = list(range(100, 260))

    async def answered() -> list[int]:
        """How many requests each server has had, after one more."""
        prompt = PreprocessedRequest(beginning, model="smol.gguf", stop_conditions=StopConditions(max_tokens=1))
        await tokens(opened, Context(prompt))
        return [len(server.requests("/completion")) for server in servers]

    async with site.graph(router="kv") as opened:
        for _ in range(3):
            await answered()
        found = await answered()
        assert sorted(found) == [0, 4]
        warm = servers[found.index(4)]
        before = {worker.worker_id for worker in opened.workers}
        warm.kill()
        if shown_by == "a request":
            await answered()  # which goes on at the other server
            assert len(opened.workers) == 1
        elif shown_by == "refusal":
            await anyio.sleep(1.5)
        warm.restart()
        warm.is_loading = shown_by == "loading"
        await anyio.sleep(1.5)
        warm.is_loading = False
        await anyio.sleep(8)
        after = {worker.worker_id for worker in opened.workers}
        assert (len(after), len(before & after)) == (2, 1)
        (stage,) = [part for part in parts_of(opened, "smol.gguf") if isinstance(part, KvPushRouter)]
        held = {rank.worker_id: blocks for rank, _, blocks in stage.router.lookup.held_blocks()}
        assert {held[worker_id] for worker_id in after - before} == {0}


def parts_of(opened: Any, model: str) -> Any:
    """The stages of the graph of a model below its text."""
    return opened.tokens.graphs[model].parts()


async def test_a_model_path_where_nothing_is_ends_the_start(site: Site) -> None:
    server = site.server(ONE)
    with pytest.raises(InvalidArgument, match="/nowhere does not exist") as caught:
        async with site.graph(model_path=Path("/nowhere")):
            pass
    assert (caught.value.field, server.received) == ("model_path", [])


async def test_a_router_that_cannot_be_made_ends_the_start(site: Site) -> None:
    site.server(ONE)
    settings = KvRouterConfig(router_policy_config="/nowhere.toml")
    with pytest.raises(InvalidArgument) as caught:
        async with site.graph(router="kv", kv_router=settings):
            pass
    assert caught.value.field == "router_policy_config"


async def test_the_end_waits_for_the_answers_under_way(site: Site) -> None:
    site.server(ONE, token_s=0.1)
    found: list[list[int]] = []
    async with anyio.create_task_group() as tasks:
        async with site.graph() as opened:

            async def read() -> None:
                found.append(await tokens(opened, request(5, 20)))

            tasks.start_soon(read)
            await anyio.sleep(0.5)
        assert found == [continued([5, 6, 7], 20)]


async def test_an_error_of_the_block_is_raised_as_it_is(site: Site) -> None:
    site.server(ONE)
    with pytest.raises(LookupError, match="mine"):
        async with site.graph():
            raise LookupError("mine")
