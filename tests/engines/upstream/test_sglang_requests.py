"""What of a request SGLang gets, and what is refused since it has no option for it."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engines.adapter import RequestAdapter
from pipeline import Context, InvalidArgument
from pipeline.protocols import (
    GuidedDecodingOptions,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from tests.engines.upstream.sglang_worlds import fake_sglang, started_sglang
from tests.engines.upstream.worlds import outputs, prompt

PROMPT = [5, 6, 7]


async def body_of(request: PreprocessedRequest, **server: Any) -> Any:
    """Return the body that the server received for a request."""
    async with fake_sglang(**server) as fake, started_sglang(fake) as engine:
        await outputs(engine, request)
        return fake.requests("/generate")[0].json


async def test_without_a_limit_the_server_goes_on_as_long_as_it_can() -> None:
    body = await body_of(prompt(None))
    assert body["sampling_params"]["max_new_tokens"] is None


async def test_the_options_have_the_names_of_the_server() -> None:
    stop = StopConditions(max_tokens=9, min_tokens=2, stop=["end"], stop_token_ids=[4], stop_token_ids_hidden=[2])
    sampling = SamplingOptions(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, presence_penalty=0.1, frequency_penalty=0.2
    )
    body = await body_of(PreprocessedRequest(PROMPT, stop_conditions=stop, sampling_options=sampling))
    assert body["input_ids"] == PROMPT
    assert body["stream"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop": ["end"],
        "stop_token_ids": [2, 4],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "sampling_seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }


async def test_adapter_cache_session_and_priority_are_passed_through() -> None:
    hints = RoutingHints(lora_name="poet", cache_namespace="tenant", priority=3)
    info = {"enable_priority_scheduling": True}
    async with fake_sglang(info=info, adapters=("poet",)) as fake, started_sglang(fake) as engine:
        context = Context(prompt(routing=hints), metadata={"x-dynamo-session-id": "s-1"})
        async with await RequestAdapter(engine).generate(context) as stream:
            assert [item.error async for item in stream if item.error is not None] == []
        body = fake.requests("/generate")[0].json
    assert (body["lora_path"], body["extra_key"], body["priority"], body["session_id"]) == ("poet", "tenant", 3, "s-1")


@pytest.mark.parametrize(
    ("info", "sent"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, 3),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, -3),
    ],
)
async def test_a_priority_is_sent_only_where_the_server_has_priorities(info: dict[str, Any], sent: int | None) -> None:
    body = await body_of(prompt(routing=RoutingHints(priority=3)), info=info)
    assert body.get("priority") == sent


@pytest.mark.parametrize(("top_k", "sent"), [(None, None), (0, -1), (40, 40)])
async def test_no_limit_of_candidates_is_minus_one(top_k: int | None, sent: int | None) -> None:
    body = await body_of(prompt(sampling_options=SamplingOptions(top_k=top_k)))
    assert body["sampling_params"].get("top_k") == sent


@pytest.mark.parametrize(("ranks", "sent"), [(1, None), (4, 2)])
async def test_the_rank_is_sent_to_a_server_with_several(ranks: int, sent: int | None) -> None:
    body = await body_of(prompt(routing=RoutingHints(dp_rank=2)), info={"dp_size": ranks})
    assert body.get("routed_dp_rank") == sent


async def test_stop_strings_are_left_to_the_stages_here_if_the_server_has_no_tokenizer() -> None:
    request = PreprocessedRequest(PROMPT, stop_conditions=StopConditions(max_tokens=2, stop=["x"]))
    assert "stop" not in (await body_of(request, info={"skip_tokenizer_init": True}))["sampling_params"]


@pytest.mark.parametrize(
    ("guided", "sent"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        ({"json": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["yes", "no.", "(x)"]}, {"regex": r"(yes|no\.|\(x\))"}),
        ({"grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"structural_tag": {"tag": 1}}, {"structural_tag": '{"tag":1}'}),
    ],
)
async def test_a_guided_form_has_its_name_at_the_server(guided: dict[str, Any], sent: dict[str, Any]) -> None:
    request = prompt(2, sampling_options=SamplingOptions(guided_decoding=GuidedDecodingOptions(**guided)))
    params = (await body_of(request))["sampling_params"]
    assert {name: params[name] for name in sent} == sent


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "sampling_options.use_beam_search"),
        ({"sampling_options": SamplingOptions(n=2, best_of=3)}, "sampling_options.best_of"),
        ({"sampling_options": SamplingOptions(length_penalty=2.0)}, "sampling_options.length_penalty"),
        ({"output_options": OutputOptions(prompt_logprobs=1)}, "output_options.prompt_logprobs"),
        ({"stop_conditions": StopConditions(max_thinking_tokens=1)}, "stop_conditions.max_thinking_tokens"),
    ],
)
async def test_what_the_server_has_no_option_for_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    async with fake_sglang() as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidArgument) as refused:
            await outputs(engine, evolve(PreprocessedRequest(PROMPT), **fields))
        assert refused.value.field == named
        assert fake.begun == 0
