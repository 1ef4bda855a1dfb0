"""Each engine over a server holds the contract of engines."""

from __future__ import annotations

from typing import Any

import pytest

from engines import run_conformance
from engines.upstream import OpenAIUpstream, SglangUpstream, Upstream, VllmDecode, VllmText, VllmUpstream
from pipeline.protocols import PreprocessedRequest
from tests.engines.upstream.handover_worlds import FakeHalf
from tests.engines.upstream.openai_worlds import FakeLlama
from tests.engines.upstream.sglang_worlds import FakeSglang
from tests.engines.upstream.vllm_worlds import FakeVllm, Tokenizing
from tests.engines.upstream.worlds import URL, VOCABULARY, FakeServer, prompt, running

CONTEXT_TOKENS = 512
"""Many of the requests go on until the context is full."""


def case(name: str, engine: type[Upstream], server: type[FakeServer], *, is_slow: bool = False, **fields: Any) -> Any:
    """An engine over a server with these settings; slow where another one has nearly the same way."""
    return pytest.param(engine, server, fields, id=name, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(
    ("engine", "server", "fields"),
    [
        case("vllm by generate", VllmUpstream, FakeVllm),
        case("vllm by completions", VllmUpstream, FakeVllm, generates=False, is_slow=True),
        case("vllm in text", VllmText, Tokenizing),
        case("vllm that decodes", VllmDecode, FakeHalf),
        case("sglang cumulative", SglangUpstream, FakeSglang),
        case("sglang incremental", SglangUpstream, FakeSglang, is_incremental=True, is_slow=True),
        case("llama.cpp", OpenAIUpstream, FakeLlama),
    ],
)
async def test_an_engine_over_a_server_holds_the_contract(
    engine: type[Upstream], server: type[FakeServer], fields: dict[str, Any]
) -> None:
    always = {"token_s": 0.001, "keeps_alive": False, "context_length": CONTEXT_TOKENS}
    async with running(server, **always, **fields) as fake:
        await run_conformance(
            lambda: engine(URL, transport=fake.transport),
            request=prompt(24),
            bad_request=PreprocessedRequest([VOCABULARY]),
        )
