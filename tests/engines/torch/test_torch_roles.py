"""A prompt computed by one engine and answered by another: equal tokens, no lost block, recomputed on failure."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from anyio.streams.text import TextReceiveStream
from attrs import evolve

from engines import DisaggregationMode, as_engine, run_conformance
from engines.torch import HandoverTimes, SocketHandover, TorchEngine, TorchSettings
from pipeline import Annotated, Context
from pipeline.protocols import LLMEngineOutput, PrefillResult, PreprocessedRequest

from .tiny_model import VOCAB, loader, plain_answer, random_prompt, tiny_model
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[3]
TIMES = HandoverTimes(lease_s=60)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Real time: the engines have threads of their own, and a socket between them."""
    return request.param


def engine_of(role: Any, times: HandoverTimes = TIMES) -> TorchEngine:
    settings = TorchSettings(
        role=role, block_size_tokens=8, kv_cache_blocks=256, max_num_seqs=8, max_num_batched_tokens=64
    )
    return TorchEngine(loader(), settings, handover=SocketHandover(prefills=role == "prefill", times=times))


@asynccontextmanager
async def both(times: HandoverTimes = TIMES) -> AsyncIterator[tuple[TorchEngine, Any, TorchEngine, Any]]:
    """Yield a prefill and a decode engine, each with itself as a stage."""
    prefill, decode = engine_of("prefill", times), engine_of("decode", times)
    async with (
        as_engine(prefill, mode=DisaggregationMode.PREFILL) as computes,
        as_engine(decode, mode=DisaggregationMode.DECODE) as answers,
    ):
        yield prefill, computes, decode, answers


async def chunks_of(stage: Any, request: PreprocessedRequest) -> list[LLMEngineOutput]:
    async with await stage.generate(Context(request)) as stream:
        items: list[Annotated[LLMEngineOutput]] = [item async for item in stream]
    if (error := items[-1].extract_error()) is not None:
        raise error
    return [item.data for item in items if item.data is not None]


async def answer_of(computes: Any, answers: Any, request: PreprocessedRequest) -> list[int]:
    """Compute the prompt with one stage, and answer the request with the other."""
    first, *_ = await chunks_of(computes, request)
    handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
    return [token for chunk in await chunks_of(answers, handed) for token in chunk.token_ids]


async def test_fifty_answers_after_a_hand_over_equal_plain_decoding() -> None:
    random = Random(11)
    cases = [(random_prompt(random, 1, 120), random.randint(1, 20)) for _ in range(50)]
    found: dict[int, list[int]] = {}
    async with both() as (prefill, computes, decode, answers):
        places = anyio.CapacityLimiter(8)

        async def ask(number: int) -> None:
            async with places:
                prompt, tokens = cases[number]
                found[number] = await answer_of(computes, answers, request_of(prompt, max_tokens=tokens))

        async with anyio.create_task_group() as tasks:
            for number in range(len(cases)):
                tasks.start_soon(ask, number)
        for made in (prefill, decode):
            assert isinstance(made.handover, SocketHandover)
            assert not made.handover.failures
            assert len(made.handover) == 0
            assert made.batcher.pool.active == 0
    assert [found[number] for number in range(50)] == [plain_answer(prompt, tokens) for prompt, tokens in cases]


async def test_fifty_answers_to_prompts_of_another_process_equal_plain_decoding() -> None:
    random = Random(15)
    cases = [(random_prompt(random, 1, 120), random.randint(1, 20)) for _ in range(50)]
    found: dict[int, list[int]] = {}
    lines = "".join(f"{json.dumps([number, prompt])}\n" for number, (prompt, _) in enumerate(cases))
    command = [sys.executable, "-m", "tests.engines.torch.prefill_process"]
    decode = engine_of("decode")
    async with (
        await anyio.open_process(command, cwd=ROOT, stderr=None) as process,
        as_engine(decode, mode=DisaggregationMode.DECODE) as answers,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(lines.encode())
        printed = TextReceiveStream(process.stdout)
        text = ""
        while len(found) < len(cases):
            text += await printed.receive()
            *whole, text = text.split("\n")
            for number, params in map(json.loads, whole):
                prompt, tokens = cases[number]
                handed = evolve(request_of(prompt, max_tokens=tokens), prefill_result=PrefillResult(params))
                found[number] = [token for chunk in await chunks_of(answers, handed) for token in chunk.token_ids]
        await process.stdin.aclose()
        assert await process.wait() == 0
    assert isinstance(decode.handover, SocketHandover)
    assert not decode.handover.failures
    assert [found[number] for number in range(50)] == [plain_answer(prompt, tokens) for prompt, tokens in cases]


async def test_blocks_that_no_worker_fetches_are_free_after_the_lease_and_the_prompt_is_computed_again() -> None:
    prompt = random_prompt(Random(12), 40, 40)
    async with both(HandoverTimes(lease_s=0.3)) as (prefill, computes, decode, answers):
        request = request_of(prompt, max_tokens=8)
        first, *_ = await chunks_of(computes, request)
        assert prefill.batcher.pool.active > 0
        await anyio.sleep(0.6)
        assert prefill.batcher.pool.active == 0
        handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
        chunks = await chunks_of(answers, handed)
        assert [token for chunk in chunks for token in chunk.token_ids] == plain_answer(prompt, 8)
        assert isinstance(decode.handover, SocketHandover)
        assert decode.handover.failures == {"WorkerOverloaded": 1}


async def test_a_prefill_worker_that_has_ended_costs_a_computation() -> None:
    prompt = random_prompt(Random(13), 40, 40)
    request = request_of(prompt, max_tokens=8)
    async with as_engine(engine_of("decode"), mode=DisaggregationMode.DECODE) as answers:
        async with as_engine(engine_of("prefill"), mode=DisaggregationMode.PREFILL) as computes:
            first, *_ = await chunks_of(computes, request)
        handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
        chunks = await chunks_of(answers, handed)
    assert [token for chunk in chunks for token in chunk.token_ids] == plain_answer(prompt, 8)


async def test_an_answer_that_migrates_after_a_hand_over_goes_on_with_the_same_tokens() -> None:
    prompt = random_prompt(Random(14), 40, 40)
    async with both() as (_, computes, _, answers):
        request = request_of([*prompt, *plain_answer(prompt, 6)], max_tokens=10)
        assert await answer_of(computes, answers, request) == plain_answer(prompt, 16)[6:]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_each_role_holds_the_contract_of_engines(role: str) -> None:
    tiny_model()
    await run_conformance(lambda: engine_of(role), bad_request=request_of([VOCAB]))
