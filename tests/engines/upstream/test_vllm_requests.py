"""What of a request vLLM gets by each of its routes, and what comes back of it."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engines.upstream import VllmUpstream
from pipeline.errors import InvalidArgument
from pipeline.protocols import (
    FinishReason,
    GuidedDecodingOptions,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.protocols.request import AgentContext
from tests.engines.upstream.vllm_worlds import FakeVllm, fake_vllm, started
from tests.engines.upstream.worlds import continued, outputs, prompt, tokens_of

ROUTES = pytest.mark.parametrize("generates", [True, False], ids=["generate", "completions"])


def sent(server: FakeVllm) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Body, sampling parameters and headers of the last request for tokens."""
    received = [one for one in server.received if b'"stream":true' in one.body][-1]
    body = received.json
    return body, body.get("sampling_params", body), received.headers


@ROUTES
async def test_sampling_and_limits_are_sent(generates: bool) -> None:
    sampling = SamplingOptions(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, presence_penalty=0.25)
    stop = StopConditions(max_tokens=4, min_tokens=2, ignore_eos=False, stop_token_ids=[9], stop_token_ids_hidden=[2])
    stop = evolve(stop, max_thinking_tokens=100)
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        await outputs(engine, PreprocessedRequest([5], sampling_options=sampling, stop_conditions=stop))
        body, params, headers = sent(server)
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.25,
    }
    wanted |= {"max_tokens": 4, "min_tokens": 2, "stop_token_ids": [2, 9], "thinking_token_budget": 100}
    assert wanted.items() <= params.items()
    assert headers["x-request-id"] == body["request_id"]
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@ROUTES
async def test_stop_strings_are_sent_to_a_server_with_a_tokenizer(generates: bool) -> None:
    request = PreprocessedRequest([5], stop_conditions=StopConditions(max_tokens=2, stop=["\n\n"]))
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        await outputs(engine, request)
        assert sent(server)[1]["stop"] == ["\n\n"]
    async with fake_vllm(tokens_only=True) as server, started(server) as engine:
        assert len(tokens_of(await outputs(engine, request))) == 2
        assert "stop" not in sent(server)[1]


@ROUTES
async def test_a_stop_id_ends_the_answer_and_is_named(generates: bool) -> None:
    met = continued([5, 6, 7], 4)[-1]
    request = prompt(None)
    request.stop_conditions = StopConditions(max_tokens=10, stop_token_ids=[met])
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        found = await outputs(engine, request)
    assert tokens_of(found) == continued([5, 6, 7], 4)
    assert (found[-1].finish_reason, found[-1].stop_reason) == (FinishReason.STOP, met)


@ROUTES
async def test_the_form_of_a_guided_answer_is_sent(generates: bool) -> None:
    guided = GuidedDecodingOptions(choice=["yes", "no"])
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        await outputs(engine, prompt(sampling_options=SamplingOptions(guided_decoding=guided)))
        assert sent(server)[1]["structured_outputs"] == {"choice": ["yes", "no"]}


@ROUTES
async def test_log_probabilities_come_back_with_their_candidates(generates: bool) -> None:
    async with fake_vllm(generates=generates, tokens_per_chunk=2) as server, started(server) as engine:
        found = await outputs(engine, prompt(4, output_options=OutputOptions(logprobs=2)))
    tokens = continued([5, 6, 7], 4)
    assert [len(output.log_probs or ()) for output in found] == [2, 2, 0]
    top = [one for output in found for one in output.top_logprobs or ()]
    assert [[(one.rank, one.token_id) for one in ranked] for ranked in top] == [
        [(1, token), (2, token + 1)] for token in tokens
    ]


@ROUTES
async def test_values_without_candidates_are_requested_too(generates: bool) -> None:
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        found = await outputs(engine, prompt(2, output_options=OutputOptions(logprobs=0)))
        body, params, _ = sent(server)
    assert params["logprobs"] == 0
    assert [len(output.log_probs or ()) for output in found] == [1, 1, 0]
    assert body.get("return_tokens_as_token_ids") is (None if generates else True)


@ROUTES
async def test_no_stop_id_is_sent_to_go_on_behind(generates: bool) -> None:
    stop = StopConditions(max_tokens=3, ignore_eos=True, stop_token_ids_hidden=[2])
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        await outputs(engine, PreprocessedRequest([5], stop_conditions=stop))
        assert "stop_token_ids" not in sent(server)[1]


@ROUTES
async def test_choices_are_told_apart_by_their_index(generates: bool) -> None:
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        found = await outputs(engine, prompt(3, sampling_options=SamplingOptions(n=2)))
    assert tokens_of(found, 0) == continued([5, 6, 7], 3)
    assert tokens_of(found, 1) == continued([5, 6, 7, 1], 3)
    assert [output.index for output in found if output.finish_reason is not None] == [0, 1]
    usage = found[-1].completion_usage
    assert usage is not None
    assert usage.completion_tokens == 6


@ROUTES
async def test_adapter_salt_rank_and_session_are_sent(generates: bool) -> None:
    routing = RoutingHints(lora_name="french", cache_namespace="tenant-7", dp_rank=1)
    request = prompt(routing=routing)
    async with fake_vllm(generates=generates, ranks=2, adapters=("french",)) as server, started(server) as engine:
        await outputs(engine, request, metadata={"x-dynamo-session-id": "s1"})
        body, _, headers = sent(server)
    assert (body["model"], body["cache_salt"]) == ("french", "dynamo-cache-salt:tenant-7")
    assert (headers["x-data-parallel-rank"], headers["x-session-id"]) == ("1", "s1")


@ROUTES
async def test_the_first_rank_and_the_session_of_an_agent_are_sent(generates: bool) -> None:
    request = prompt(routing=RoutingHints(dp_rank=0), agent_context=AgentContext(session_id="agent-1"))
    async with fake_vllm(generates=generates, ranks=2) as server, started(server) as engine:
        await outputs(engine, request, metadata={"x-dynamo-session-id": "s1"})
        headers = sent(server)[2]
        assert (headers["x-data-parallel-rank"], headers["x-session-id"]) == ("0", "agent-1")
        await outputs(engine, prompt())
        assert not {"x-data-parallel-rank", "x-session-id"} & sent(server)[2].keys()


@ROUTES
@pytest.mark.parametrize("prioritizes", [True, False])
async def test_a_priority_is_sent_to_a_server_that_schedules_by_it(generates: bool, prioritizes: bool) -> None:
    async with fake_vllm(generates=generates, prioritizes=prioritizes) as server, started(server) as engine:
        await outputs(engine, prompt(routing=RoutingHints(priority=3)))
        assert sent(server)[0].get("priority") == (-3 if prioritizes else None)


@ROUTES
async def test_the_parameters_of_a_transfer_go_to_the_server_as_they_came(generates: bool) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "new_key": "x"}
    request = prompt(prefill_result=PrefillResult({"kv_transfer_params": params}))
    async with fake_vllm(generates=generates) as server, started(server) as engine:
        await outputs(engine, request)
        assert sent(server)[0]["kv_transfer_params"] == params


async def test_what_a_router_adds_to_a_transfer_does_not_replace_what_prefill_has_sent() -> None:
    params = {"do_remote_prefill": True, "remote_port": 5600}
    hint = {"remote_port": 1, "hint": "x"}
    request = prompt(
        prefill_result=PrefillResult({"kv_transfer_params": params}), extra_args={"kv_transfer_params": hint}
    )
    async with fake_vllm() as server, started(server) as engine:
        await outputs(engine, request)
        assert sent(server)[0]["kv_transfer_params"] == {"hint": "x", **params}


REFUSED: list[tuple[PreprocessedRequest, str]] = [
    (PreprocessedRequest([]), "token_ids"),
    (prompt(prompt_embeds="AAAA"), "prompt_embeds"),
    (prompt(multi_modal_data={"image": []}), "multi_modal_data"),
    (prompt(sampling_options=SamplingOptions(n=0)), "sampling_options.n"),
    (prompt(sampling_options=SamplingOptions(n=1, best_of=3)), "sampling_options.best_of"),
    (prompt(sampling_options=SamplingOptions(use_beam_search=True)), "sampling_options.use_beam_search"),
    (prompt(output_options=OutputOptions(prompt_logprobs=1)), "output_options.prompt_logprobs"),
    (prompt(routing=RoutingHints(cache_namespace="a/b")), "routing.cache_salt"),
    (prompt(routing=RoutingHints(cache_namespace="a" * 111)), "routing.cache_salt"),
]


@pytest.mark.parametrize(("request_", "field"), REFUSED, ids=[field for _, field in REFUSED])
async def test_what_vllm_has_no_option_for_is_refused_by_name(request_: PreprocessedRequest, field: str) -> None:
    async with fake_vllm() as server, started(server) as engine:
        before = len(server.received)
        with pytest.raises(InvalidArgument) as caught:
            await outputs(engine, request_)
        assert caught.value.field == field
        assert len(server.received) == before


async def test_the_first_model_is_served_or_the_named_one() -> None:
    async with fake_vllm(model="big") as server:
        async with started(server, model="big") as engine:
            assert engine.known.model == "big"
        absent = VllmUpstream("http://gpu-1:8000", model="other", transport=server.transport)
        with pytest.raises(InvalidArgument, match="has no 'other'; it has big"):
            await absent.start(1)
        await absent.cleanup()
