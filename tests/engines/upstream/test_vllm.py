"""VllmUpstream against a simulated server: discovery, tokens in and out."""

from __future__ import annotations

import pytest

from engines import run_conformance
from engines.upstream import VllmUpstream
from pipeline.errors import InvalidArgument
from pipeline.protocols import FinishReason, PreprocessedRequest
from tests.engines.upstream.worlds import (
    URL,
    VOCABULARY,
    continued,
    fake_vllm,
    outputs,
    prompt,
    started,
    tokens_of,
)

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
    "generates", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["generate", "completions"]
)
async def test_it_holds_the_engine_contract(generates: bool) -> None:
    async with fake_vllm(generates=generates, token_s=0.001, keeps_alive=False) as server:
        await run_conformance(
            lambda: VllmUpstream(URL, transport=server.transport),
            request=prompt(24),
            bad_request=PreprocessedRequest([VOCABULARY]),
        )
