"""VllmUpstream against a simulated server: discovery, tokens in and out."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from engines import Worker
from engines.adapter import RequestAdapter
from engines.upstream import VllmUpstream
from engines.upstream.vllm import ABORT, GENERATE
from pipeline import Context
from pipeline.errors import InvalidArgument, InvalidMessage, Unavailable
from pipeline.network import Runtime
from pipeline.protocols import FinishReason, PreprocessedRequest
from tests.engines.upstream.vllm_worlds import fake_vllm, started
from tests.engines.upstream.worlds import URL, VOCABULARY, continued, outputs, prompt, tokens_of
from tests.engines.worker.worlds import TIMES

ROUTES = pytest.mark.parametrize("generates", [True, False], ids=["generate", "completions"])


async def test_discovery_finds_model_blocks_ranks_and_event_sources() -> None:
    sources = {str(rank): {"endpoint": f"tcp://*:{5557 + rank}", "replay_endpoint": None} for rank in range(2)}
    async with fake_vllm(ranks=2, adapters=("french",), event_sources=sources) as server, started(server) as engine:
        facts = engine.known
        assert (facts.model, facts.root, facts.adapters) == ("tiny", "/models/tiny", ("french",))
        assert (facts.context_length, facts.block_size_tokens, facts.total_blocks) == (4096, 32, 512)
        assert list(facts.ranks) == [0, 1]
        assert facts.event_sources[1].endpoint == "tcp://gpu-1:5558"
        assert facts.config().kv_cache_block_size == 32


@ROUTES
async def test_an_answer_has_the_tokens_of_the_server_and_their_count(generates: bool) -> None:
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        found = await outputs(engine)
        assert tokens_of(found) == continued([5, 6, 7], 5)
        assert found[-1].finish_reason == FinishReason.LENGTH
        assert found[-1].completion_usage is not None
        assert found[-1].completion_usage.total_tokens == 8


@ROUTES
async def test_an_error_in_place_of_the_first_chunk_refuses_the_request(generates: bool) -> None:
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        with pytest.raises(InvalidArgument, match="out of vocabulary"):
            await outputs(engine, PreprocessedRequest([VOCABULARY]))


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("/v1/models", b"{garbled"),
        ("/v1/models", b"[]"),
        ("/v1/models", b'{"data": [5]}'),
        ("/v1/models", b'{"data": {"id": "tiny"}}'),
        ("/kv_event_sources", b"[]"),
        ("/kv_event_sources", b'{"0": {}}'),
        ("/kv_event_sources", b'{"first": {"endpoint": "tcp://*:5557"}}'),
        ("/kv_event_sources", b'{"0": {"endpoint": 5557}}'),
        ("/v1/completions", b'{"choices": []}'),
        ("/v1/completions", b'{"choices": {"first": 1}}'),
        ("/v1/completions", b'{"choices": [5]}'),
    ],
)
async def test_a_page_of_another_form_is_a_typed_error_and_leaves_nothing(path: str, page: bytes) -> None:
    async with fake_vllm(generates=False, pages={path: page}) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        with pytest.raises(InvalidMessage):
            await engine.start(1)
        await engine.cleanup()


async def test_ranks_begin_where_those_of_the_server_do() -> None:
    text = "".join(f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="9"}} 1\n' for rank in (5, 4))
    async with fake_vllm(pages={"/metrics": text.encode()}) as server, started(server) as upstream:
        assert [*upstream.known.ranks] == [4, 5]
        assert upstream.known.config().data_parallel_start_rank == 4


async def test_names_of_one_root_are_aliases_and_no_others() -> None:
    cards = [
        {"id": "a", "root": "/models/a"},
        {"id": "b", "root": "/models/b"},
        {"id": "a-chat", "root": "/models/a"},
        {"id": "french", "root": "/adapters", "parent": "a"},
    ]
    page = json.dumps({"data": cards}).encode()
    async with fake_vllm(pages={"/v1/models": page}) as server, started(server) as upstream:
        assert (upstream.known.aliases, upstream.known.adapters) == (("a-chat",), ("french",))
        adapter = VllmUpstream(URL, model="french", transport=server.transport)
        with pytest.raises(InvalidArgument, match="it has a, b, a-chat"):
            await adapter.start(1)
        await adapter.cleanup()


@pytest.mark.parametrize("field", ["silence_s", "health_every_s", "load_every_s"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(field: str, seconds: float) -> None:
    times: dict[str, Any] = {field: seconds}
    with pytest.raises(InvalidArgument) as refused:
        VllmUpstream(URL, **times)
    assert refused.value.field == field


@pytest.mark.parametrize("engine", ["x", "²", "9" * 5000])
async def test_a_rank_that_is_no_number_is_none(engine: str) -> None:
    info = f'vllm:cache_config_info{{block_size="{engine}",engine="{engine}",num_gpu_blocks="0"}} 1.0\n'
    async with fake_vllm(pages={"/metrics": info.encode()}) as server, started(server) as upstream:
        facts = upstream.known
    assert (list(facts.ranks), facts.block_size_tokens, facts.total_blocks) == ([0], None, None)


async def test_a_server_without_a_model_is_unavailable() -> None:
    async with fake_vllm(pages={"/v1/models": b'{"data": []}'}) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        with pytest.raises(Unavailable):
            await engine.start(1)
        await engine.cleanup()


async def test_a_server_that_is_too_old_to_send_ids_is_refused() -> None:
    async with fake_vllm(generates=False, pages={"/v1/completions": b'{"choices": [{"text": "a"}]}'}) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        with pytest.raises(InvalidArgument, match="too old"):
            await engine.start(1)
        await engine.cleanup()


async def test_every_request_has_the_key_and_no_message_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    """A line end in a key, as files have it, would be an invalid header, which errors of HTTP show whole."""
    async with fake_vllm(kv_usage=0.5, token_s=10.0, ignores_hang_ups=True) as server, Runtime.in_process() as runtime:
        engine = VllmUpstream(URL, transport=server.transport, api_key="secret\nkey\n")
        async with (
            Worker(engine, runtime=runtime, environment={}, times=TIMES) as worker,
            anyio.create_task_group() as tasks,
        ):
            context = Context(prompt(50))
            async with await RequestAdapter(engine, spawn=tasks.start_soon).generate(context) as stream:
                await anext(stream)
                context.stop()
                await anyio.sleep(2.5)
            server.kill()
            await worker.wait()
            assert "secret" not in repr((worker.failure, engine.known, vars(engine.client)))
        paths = {one.path for one in server.received}
        assert paths >= {"/v1/models", "/metrics", "/health", GENERATE, ABORT}
        assert {one.headers.get("authorization") for one in server.received} == {"Bearer secret?key"}
    assert "secret" not in caplog.text
