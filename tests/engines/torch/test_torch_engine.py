"""TorchEngine with a tiny model: the contract of engines, and greedy tokens equal to those of transformers alone."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from engines import as_engine, run_conformance
from engines.torch import TorchEngine
from pipeline import Context, InvalidArgument
from pipeline.protocols import (
    FinishReason,
    OutputOptions,
)

from .tiny_model import (
    EOS,
    VOCAB,
    answers_of,
    chunks_of,
    plain_answer,
    random_prompt,
    tiny_engine,
    tiny_model,
    tokens_of,
)
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    tiny_model()


async def test_it_holds_the_contract_of_engines() -> None:
    await run_conformance(tiny_engine, bad_request=request_of([VOCAB]))


async def test_fifty_answers_in_batches_equal_plain_decoding() -> None:
    random = Random(1)
    cases = [(random_prompt(random, 1, 60), random.randint(1, 30)) for _ in range(50)]
    async with as_engine(tiny_engine()) as engine:
        requests = [request_of(prompt, max_tokens=tokens, temperature=0.0) for prompt, tokens in cases]
        answers = await answers_of(engine, requests)
    assert answers == [plain_answer(prompt, tokens) for prompt, tokens in cases]


async def test_answers_on_cached_prefixes_equal_plain_decoding() -> None:
    random, made = Random(2), tiny_engine()
    shared = random_prompt(random, 100, 100)
    cases = [(shared[: random.randint(9, 100)] + random_prompt(random, 1, 20), 12) for _ in range(50)]
    async with as_engine(made) as engine:
        await tokens_of(engine, request_of(shared, max_tokens=1))
        chunks = [await chunks_of(engine, request_of(prompt, max_tokens=tokens)) for prompt, tokens in cases]
    cached = 0
    for (prompt, tokens), answer in zip(cases, chunks, strict=True):
        assert [token for chunk in answer for token in chunk.token_ids] == plain_answer(prompt, tokens)
        usage = answer[-1].completion_usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached += usage.prompt_tokens_details.cached_tokens or 0
    assert cached > 40 * 50


async def test_answers_of_preempted_requests_equal_plain_decoding() -> None:
    random, made = Random(3), tiny_engine(kv_cache_blocks=12)
    cases = [(random_prompt(random, 10, 20), 40) for _ in range(6)]
    async with as_engine(made) as engine:
        answers = await answers_of(engine, [request_of(prompt, max_tokens=tokens) for prompt, tokens in cases])
    assert made.batcher.preemptions > 0
    assert answers == [plain_answer(prompt, tokens) for prompt, tokens in cases]


async def test_a_migrated_answer_goes_on_with_the_same_tokens() -> None:
    random = Random(4)
    async with as_engine(tiny_engine()) as one, as_engine(tiny_engine()) as other:
        options: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}]
        for sampling in options:
            for _ in range(5):
                prompt = random_prompt(random, 5, 40)
                whole = await tokens_of(one, request_of(prompt, max_tokens=20, **sampling))
                rest = await tokens_of(other, request_of([*prompt, *whole[:8]], max_tokens=12, **sampling))
                assert whole[:8] + rest == whole


async def test_memory_is_back_to_its_start_after_random_endings() -> None:
    random, made = Random(5), tiny_engine(kv_cache_blocks=40)
    shared = random_prompt(random, 40, 40)

    async def ask(engine: Any, seed: int) -> None:
        luck = Random(seed)
        prompt = shared[: luck.randint(0, 40)] + random_prompt(luck, 1, 20)
        context = Context(request_of(prompt, max_tokens=luck.randint(1, 30), n=luck.choice([1, 1, 2])))
        after, how = luck.randint(0, 20), luck.choice(["read", "stop", "kill", "close"])
        async with await engine.generate(context) as stream:
            async for _ in stream:
                after -= 1
                if after <= 0 and how != "read":
                    if how == "close":
                        break
                    getattr(context, how)()

    async with as_engine(made) as engine:
        for beginning in range(0, 1000, 25):
            async with anyio.create_task_group() as tasks:
                for seed in range(beginning, beginning + 25):
                    tasks.start_soon(ask, engine, seed)
        batcher = made.batcher
        assert (batcher.pool.active, len(batcher.waiting), len(batcher.running)) == (0, 0, 0)
        batcher.pool.check()
        assert batcher.pool.available == 40
        prompt = random_prompt(random, 20, 20)
        assert await tokens_of(engine, request_of(prompt, max_tokens=10)) == plain_answer(prompt, 10)


async def test_log_probabilities_are_those_of_the_model() -> None:
    prompt = [5, 6, 7]
    request = request_of(prompt, max_tokens=3)
    request.output_options = OutputOptions(logprobs=2)
    async with as_engine(tiny_engine()) as engine:
        chunks = await chunks_of(engine, request)
    torch: Any = pytest.importorskip("torch")
    ids, total = list(prompt), 0.0
    for chunk in chunks:
        with torch.inference_mode():
            shares = torch.log_softmax(tiny_model(is_plain=True)(torch.tensor([ids])).logits[0, -1], -1)
        values, likely = torch.topk(shares, 2)
        assert chunk.top_logprobs is not None
        assert [one.token_id for one in chunk.top_logprobs[0]] == likely.tolist()
        assert [one.logprob for one in chunk.top_logprobs[0]] == pytest.approx(values.tolist(), abs=1e-4)
        assert chunk.log_probs == pytest.approx([values[0].item()], abs=1e-4)
        total += values[0].item()
        assert chunk.cum_log_probs == pytest.approx(total, abs=1e-4)
        ids += chunk.token_ids


async def test_an_end_token_ends_an_answer_and_not_before_min_tokens() -> None:
    random = Random(6)
    prompts = iter(lambda: random_prompt(random, 3, 9), None)
    prompt = next(one for one in prompts if EOS in plain_answer(one, 20) and EOS not in plain_answer(one, 2))
    plain = plain_answer(prompt, 30)
    place = plain.index(EOS)
    async with as_engine(tiny_engine(eos=[EOS])) as engine:
        ended = await chunks_of(engine, request_of(prompt, max_tokens=30))
        longer = await tokens_of(engine, request_of(prompt, max_tokens=30, min_tokens=25))
        request = request_of(prompt, max_tokens=30)
        request.stop_conditions.ignore_eos = True
        ignored = await tokens_of(engine, request)
        request = request_of(prompt, max_tokens=30)
        request.stop_conditions.stop_token_ids = [plain[1]]
        stopped = await chunks_of(engine, request)
    assert [chunk.token_ids[0] for chunk in ended] == plain[: place + 1]
    assert ended[-1].finish_reason == FinishReason.EOS
    assert len(longer) >= 25
    assert EOS not in longer[:24]
    assert longer[:place] == plain[:place]
    assert ignored == plain
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == (FinishReason.STOP, plain[1])


async def test_choices_with_a_seed_differ_and_repeat() -> None:
    request = request_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_tokens=12, temperature=1.0, seed=3, n=3)
    answers: list[list[list[int]]] = []
    async with as_engine(tiny_engine()) as engine:
        for _ in range(2):
            chunks = await chunks_of(engine, request)
            answers.append(
                [[token for one in chunks if one.index == index for token in one.token_ids] for index in range(3)]
            )
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 3


async def test_a_penalty_keeps_tokens_from_coming_again() -> None:
    async with as_engine(tiny_engine()) as engine:
        answer = await tokens_of(engine, request_of([1, 2, 3], max_tokens=40, repetition_penalty=1e6))
    assert len(set(answer)) == 40
    assert not set(answer) & {1, 2, 3}


async def test_what_the_loader_raises_comes_out_of_the_start_and_leaves_no_thread() -> None:
    def fails(report: Any) -> Any:
        raise InvalidArgument("no such model", field="model_path")

    with pytest.raises(InvalidArgument, match="no such model"):
        async with as_engine(TorchEngine(fails)):
            pass
