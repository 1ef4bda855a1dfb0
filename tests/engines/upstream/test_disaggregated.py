"""What holds of two servers that share a request, whichever kind they are: behind a PrefillRouter."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pipeline import Context, PenstockError
from pipeline.protocols import OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions
from tests.engines.upstream.handover_worlds import answer_of, sglang_world, vllm_world
from tests.engines.upstream.worlds import VOCABULARY, continued, prompt, tokens_of

PROMPT = [5, 6, 7]
PATHS = ("/inference/v1/generate", "/generate")
KINDS = pytest.mark.parametrize("world", [vllm_world, sglang_world], ids=["vllm", "sglang"])


def prompts(server: Any) -> list[list[int]]:
    """The prompts that were sent to a server, without those of discovery."""
    bodies = [one.json for path in PATHS for one in server.requests(path)]
    found = [body.get("token_ids") or body.get("input_ids") for body in bodies]
    return [one for one in found if one != [0]]


@KINDS
async def test_the_answer_is_that_of_one_server_and_prefills_token_is_not_passed_on(world: Any) -> None:
    for tokens in (1, 9):
        async with world() as halved:
            found = await answer_of(halved.graph, prompt(tokens, output_options=OutputOptions(logprobs=2)))
            await halved.idle()
            assert prompts(halved.prefill) == prompts(halved.decode) == [PROMPT]
        assert tokens_of(found) == continued(PROMPT, tokens)
        assert [len(output.log_probs or ()) for output in found] == [len(output.token_ids) for output in found]
        assert all(output.disaggregated_params is None for output in found)


@pytest.mark.slow
@KINDS
async def test_fifty_prompts_eight_at_a_time_have_the_tokens_of_one_server(world: Any) -> None:
    async with world() as halved:
        limit, answers = anyio.CapacityLimiter(8), list[bool]()

        async def one(number: int) -> None:
            tokens = [number + 1, 17, number * 3 + 2]
            request = PreprocessedRequest(tokens, stop_conditions=StopConditions(max_tokens=30, ignore_eos=True))
            async with limit:
                answers.append(tokens_of(await answer_of(halved.graph, request)) == continued(tokens, 30))

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        assert answers == [True] * 50
        assert len(prompts(halved.prefill)) == len(prompts(halved.decode)) == 50
        await halved.idle()


@KINDS
async def test_two_choices_are_refused_before_the_prompt_is_computed(world: Any) -> None:
    async with world(decode_patience_s=1.0) as halved:
        with pytest.raises(PenstockError) as refused:
            await answer_of(halved.graph, prompt(2, sampling_options=SamplingOptions(n=2)))
        assert refused.value.facts.status == 400
        await halved.idle()
        assert prompts(halved.prefill) == prompts(halved.decode) == []


@KINDS
async def test_a_prompt_that_the_servers_refuse_is_wrong(world: Any) -> None:
    async with world(decode_patience_s=1.0) as halved:
        with pytest.raises(PenstockError) as refused:
            await answer_of(halved.graph, PreprocessedRequest([VOCABULARY]))
        assert refused.value.facts.status == 400
        await halved.idle()


@KINDS
async def test_a_dropped_stream_frees_both_servers(world: Any) -> None:
    async with world() as halved:
        async with await halved.graph.generate(Context(prompt(500))) as stream:
            await anext(stream)
        await anyio.sleep(0.2)
        assert halved.running == (0, 0)
        await halved.idle()
