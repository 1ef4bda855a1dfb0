"""VllmUpstream in front of a real vLLM: the engine contract, tokens, endings, and what the server shows of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import anyio
import pytest

from engines import as_engine, run_conformance
from engines.upstream import VllmUpstream
from pipeline import Annotated, AsyncEngine, Context
from pipeline.errors import InvalidArgument
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, SamplingOptions, StopConditions
from tests.vllm.servers import VllmServer, until

pytestmark = pytest.mark.vllm

PROMPT = list(range(300, 400))
Tokens = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


def greedy(token_ids: list[int], max_tokens: int) -> PreprocessedRequest:
    return PreprocessedRequest(
        token_ids,
        stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
    )


@asynccontextmanager
async def engine_of(server: VllmServer) -> AsyncIterator[Tokens]:
    async with as_engine(VllmUpstream(server.url)) as engine:
        yield engine


async def test_it_holds_the_engine_contract(server: VllmServer) -> None:
    await run_conformance(
        lambda: VllmUpstream(server.url),
        request=greedy(PROMPT, 24),
        bad_request=PreprocessedRequest([99_999]),
        deadline_s=10.0,
        within_s=120.0,
    )


async def test_it_finds_what_the_server_has(server: VllmServer) -> None:
    upstream = VllmUpstream(server.url)
    try:
        config = await upstream.start(1)
        facts = upstream.known
    finally:
        await upstream.cleanup()
    assert (config.model, config.context_length, config.kv_cache_block_size) == ("tiny", 8192, 32)
    assert config.total_kv_blocks == 8192
    assert facts.event_sources[0].endpoint == f"tcp://127.0.0.1:{server.events_port}"
    assert facts.event_sources[0].replay_endpoint == f"tcp://127.0.0.1:{server.replay_port}"
    assert facts.incarnation is not None


async def test_its_tokens_are_those_of_the_server(server: VllmServer) -> None:
    expected = server.greedy(PROMPT, 40)
    async with engine_of(server) as engine, await engine.generate(Context(greedy(PROMPT, 40))) as stream:
        outputs = [item.data async for item in stream]
    assert [token for output in outputs if output for token in output.token_ids] == expected


@pytest.mark.parametrize("way", ["stop", "kill", "close"])
async def test_a_request_that_ends_early_frees_its_place_at_the_server_within_100_ms(
    way: str, server: VllmServer
) -> None:
    async with engine_of(server) as engine:
        freed_s = sorted([await _freed_s(engine, server, way) for _ in range(5)])
    assert freed_s[2] < 0.1, freed_s


async def _freed_s(engine: Tokens, server: VllmServer, way: str) -> float:
    """Return how long the server computes for a request after it was stopped or killed and read on, or closed."""
    context = Context(greedy(PROMPT, 4000))
    async with await engine.generate(context) as stream:
        for _ in range(5):
            assert (await anext(stream)).data
        assert await anyio.to_thread.run_sync(lambda: server.running) == 1
        left = monotonic()
        match way:
            case "stop":
                context.control.stop()
                *_, last = [item.data async for item in stream if item.data]
                assert last.finish_reason == FinishReason.CANCELLED
            case "kill":
                context.control.kill()
                assert [item async for item in stream] == []
    await anyio.to_thread.run_sync(lambda: until(lambda: server.running, lambda n: n == 0, within_s=5))
    return monotonic() - left


async def test_a_token_out_of_the_vocabulary_is_the_clients_error(server: VllmServer) -> None:
    async with engine_of(server) as engine:
        with pytest.raises(InvalidArgument, match="out of vocabulary"):
            await _all(engine, PreprocessedRequest([99_999]))


async def _all(engine: Tokens, request: PreprocessedRequest) -> list[LLMEngineOutput | None]:
    async with await engine.generate(Context(request)) as stream:
        return [item.into_result() async for item in stream]
