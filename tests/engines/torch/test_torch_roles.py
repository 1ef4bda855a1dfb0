"""A prompt computed by one engine and answered by another: equal tokens, no lost block, recomputed on failure."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import DisaggregationMode, ShutdownTimes, Worker, WorkerConfig, as_engine, run_conformance
from engines.torch import HandoverTimes, PeerHandover, TorchEngine, TorchSettings
from pipeline import Annotated, Context
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PrefillResult, PreprocessedRequest

from .tiny_model import VOCAB, loader, plain_answer, random_prompt, tiny_model
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[3]
TIMES = HandoverTimes(lease_s=60)
QUICK_END = ShutdownTimes(grace_s=0.0, timeout_s=10.0)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Real time: the engines have threads of their own."""
    return request.param


def engine_of(role: Any, times: HandoverTimes = TIMES) -> TorchEngine:
    settings = TorchSettings(
        role=role, block_size_tokens=8, kv_cache_blocks=256, max_num_seqs=8, max_num_batched_tokens=64
    )
    return TorchEngine(loader(), settings, handover=PeerHandover(prefills=role == "prefill", times=times))


@asynccontextmanager
async def hosted(runtime: Runtime, engine: TorchEngine) -> AsyncIterator[Any]:
    """Host the engine; yield it as a stage."""
    role = engine.settings.role
    config = WorkerConfig(namespace="ns", component=role, disaggregation_mode=DisaggregationMode(role))
    async with Worker(engine, config, runtime=runtime, times=QUICK_END, environment={}) as worker:
        assert worker.served is not None
        yield runtime.requests.engine(worker.served.instance, Annotated[LLMEngineOutput])


@asynccontextmanager
async def both(times: HandoverTimes = TIMES) -> AsyncIterator[tuple[TorchEngine, Any, TorchEngine, Any]]:
    """Yield a prefill and a decode engine, each with itself as a stage."""
    prefill, decode = engine_of("prefill", times), engine_of("decode", times)
    async with (
        Runtime.in_process() as runtime,
        hosted(runtime, prefill) as computes,
        hosted(runtime, decode) as answers,
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
            assert isinstance(made.handover, PeerHandover)
            assert not made.handover.failures
            assert len(made.handover) == 0
            assert made.batcher.pool.active == 0
    assert [found[number] for number in range(50)] == [plain_answer(prompt, tokens) for prompt, tokens in cases]


@asynccontextmanager
async def prefill_process(url: str) -> AsyncIterator[Any]:
    """A prefill worker in a process of its own, until the block ends."""
    command = [sys.executable, "-m", "tests.engines.torch.prefill_process", url]
    async with await anyio.open_process(command, cwd=ROOT, stdin=PIPE, stdout=None, stderr=None) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def test_fifty_answers_to_prompts_of_another_process_equal_plain_decoding(tmp_path: Path) -> None:
    random = Random(15)
    cases = [(random_prompt(random, 1, 120), random.randint(1, 20)) for _ in range(50)]
    found: dict[int, list[int]] = {}
    decode, url = engine_of("decode"), f"file:{tmp_path}"
    async with (
        prefill_process(url) as process,
        Runtime.at(url, graceful_timeout_s=0.1) as runtime,
        hosted(runtime, decode) as answers,
    ):
        pool = runtime.workers("ns/prefill/generate", Annotated[LLMEngineOutput])
        with anyio.fail_after(60):
            (worker_id,) = await pool.wait_for_instances()
        places = anyio.CapacityLimiter(8)

        async def ask(number: int) -> None:
            async with places:
                prompt, tokens = cases[number]
                request = request_of(prompt, max_tokens=tokens)
                found[number] = await answer_of(pool.engine(worker_id), answers, request)

        async with anyio.create_task_group() as tasks:
            for number in range(len(cases)):
                tasks.start_soon(ask, number)
        assert isinstance(decode.handover, PeerHandover)
        assert not decode.handover.failures
        assert [found[number] for number in range(50)] == [plain_answer(prompt, tokens) for prompt, tokens in cases]

        prompt, tokens = cases[0]
        request = request_of(prompt, max_tokens=tokens)
        first, *_ = await chunks_of(pool.engine(worker_id), request)
        process.kill()
        handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
        again = [token for chunk in await chunks_of(answers, handed) for token in chunk.token_ids]
        assert again == found[0]
        assert sum(decode.handover.failures.values()) == 1
        pool.close()


async def test_blocks_that_no_worker_fetches_are_free_after_the_lease_and_the_prompt_is_computed_again() -> None:
    prompt = random_prompt(Random(12), 40, 40)
    async with both(HandoverTimes(lease_s=2)) as (prefill, computes, decode, answers):
        request = request_of(prompt, max_tokens=8)
        first, *_ = await chunks_of(computes, request)
        assert prefill.batcher.pool.active > 0
        with anyio.fail_after(20):
            while prefill.batcher.pool.active:  # noqa: ASYNC110 - the pool knows no event
                await anyio.sleep(0.05)
        handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
        chunks = await chunks_of(answers, handed)
        assert [token for chunk in chunks for token in chunk.token_ids] == plain_answer(prompt, 8)
        assert isinstance(decode.handover, PeerHandover)
        assert decode.handover.failures == {"WorkerOverloaded": 1}


async def test_a_prefill_worker_that_has_ended_costs_a_computation() -> None:
    prompt = random_prompt(Random(13), 40, 40)
    request = request_of(prompt, max_tokens=8)
    decode = engine_of("decode")
    async with Runtime.in_process() as runtime, hosted(runtime, decode) as answers:
        async with hosted(runtime, engine_of("prefill")) as computes:
            first, *_ = await chunks_of(computes, request)
        handed = evolve(request, prefill_result=PrefillResult(first.disaggregated_params))
        chunks = await chunks_of(answers, handed)
    assert [token for chunk in chunks for token in chunk.token_ids] == plain_answer(prompt, 8)
    assert isinstance(decode.handover, PeerHandover)
    assert decode.handover.failures == {"CannotConnect": 1}


async def test_engines_without_a_runtime_compute_each_prompt_again() -> None:
    prompt = random_prompt(Random(16), 40, 40)
    prefill, decode = engine_of("prefill"), engine_of("decode")
    async with (
        as_engine(prefill, mode=DisaggregationMode.PREFILL) as computes,
        as_engine(decode, mode=DisaggregationMode.DECODE) as answers,
    ):
        assert await answer_of(computes, answers, request_of(prompt, max_tokens=8)) == plain_answer(prompt, 8)
        assert prefill.batcher.pool.active == 0


async def test_an_answer_that_migrates_after_a_hand_over_goes_on_with_the_same_tokens() -> None:
    prompt = random_prompt(Random(14), 40, 40)
    async with both() as (_, computes, _, answers):
        request = request_of([*prompt, *plain_answer(prompt, 6)], max_tokens=10)
        assert await answer_of(computes, answers, request) == plain_answer(prompt, 16)[6:]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_each_role_holds_the_contract_of_engines(role: str) -> None:
    tiny_model()
    await run_conformance(lambda: engine_of(role), bad_request=request_of([VOCAB]))
