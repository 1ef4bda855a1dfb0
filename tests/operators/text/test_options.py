"""The options of a request, in the engine's records."""

from __future__ import annotations

from typing import Any

import pytest

from operators.text.options import extra_args, output_options, routing_hints, sampling_options, stop_conditions
from pipeline import InvalidArgument
from pipeline.protocols import (
    GuidedDecodingOptions,
    OutputOptions,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.wire import from_plain


def chat(**fields: Any) -> ChatCompletionRequest:
    return from_plain({"model": "m", "messages": [], **fields}, ChatCompletionRequest)


def text(**fields: Any) -> CompletionRequest:
    return from_plain({"model": "m", "prompt": "p", **fields}, CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "conditions"),
    [
        ({}, StopConditions(stop_token_ids_hidden=[8, 9])),
        ({"stop": "x"}, StopConditions(stop=["x"], stop_token_ids_hidden=[8, 9])),
        ({"stop": ["x", "y"]}, StopConditions(stop=["x", "y"], stop_token_ids_hidden=[8, 9])),
        (
            {"stop": [1, 2], "stop_token_ids": [2, 3]},
            StopConditions(stop_token_ids=[1, 2, 3], stop_token_ids_hidden=[8, 9]),
        ),
        ({"max_tokens": 5}, StopConditions(max_tokens=5, stop_token_ids_hidden=[8, 9])),
        ({"max_tokens": 5, "max_completion_tokens": 6}, StopConditions(max_tokens=6, stop_token_ids_hidden=[8, 9])),
        ({"min_tokens": 2}, StopConditions(min_tokens=2, stop_token_ids_hidden=[8, 9])),
        ({"nvext": {"max_thinking_tokens": 4}}, StopConditions(max_thinking_tokens=4, stop_token_ids_hidden=[8, 9])),
        (
            {"ignore_eos": True, "stop": "x", "stop_token_ids": [1], "min_tokens": 2, "max_tokens": 3},
            StopConditions(ignore_eos=True, min_tokens=2, max_tokens=3),
        ),
    ],
)
def test_when_to_stop(fields: dict[str, Any], conditions: StopConditions) -> None:
    assert stop_conditions(chat(**fields), [8, 9, 8]) == conditions


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, SamplingOptions()),
        ({"temperature": 0.5, "top_p": 0.5, "top_k": 0}, SamplingOptions(temperature=0.5, top_p=0.5, top_k=-1)),
        (
            {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "nvext": {"greed_sampling": True}},
            SamplingOptions(top_k=3),
        ),
        (
            {"n": 2, "seed": 7, "min_p": 0.1, "include_stop_str_in_output": True, "repetition_penalty": 1.5},
            SamplingOptions(n=2, seed=7, min_p=0.1, include_stop_str_in_output=True, repetition_penalty=1.5),
        ),
        (
            {"frequency_penalty": 1.0, "presence_penalty": 2.0, "length_penalty": 3.0, "use_beam_search": True},
            SamplingOptions(frequency_penalty=1.0, presence_penalty=2.0, length_penalty=3.0, use_beam_search=True),
        ),
    ],
)
def test_how_to_draw(fields: dict[str, Any], options: SamplingOptions) -> None:
    assert sampling_options(chat(**fields)) == options


def test_best_of_belongs_to_text_completions() -> None:
    assert sampling_options(text(best_of=3)) == SamplingOptions(best_of=3)


SCHEMA = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "guided"),
    [
        ({"guided_json": SCHEMA}, GuidedDecodingOptions(json=SCHEMA)),
        ({"guided_regex": "a+", "guided_decoding_backend": "b"}, GuidedDecodingOptions(regex="a+", backend="b")),
        ({"guided_choice": []}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            GuidedDecodingOptions(json=SCHEMA),
        ),
        ({"response_format": {"type": "json_object"}}, GuidedDecodingOptions(json={"type": "object"})),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<"]}},
            GuidedDecodingOptions(structural_tag={"type": "structural_tag", "triggers": ["<"]}),
        ),
    ],
)
def test_the_form_of_the_answer(fields: dict[str, Any], guided: GuidedDecodingOptions | None) -> None:
    assert sampling_options(chat(**fields)).guided_decoding == guided


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_decoding"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_grammar": "(" * 501}, "guided_grammar"),
    ],
)
def test_two_forms_or_a_bottomless_one_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sampling_options(chat(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": True}, 1),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False, "top_logprobs": 5}, None),
        ({"top_logprobs": 5}, 5),
        ({"top_logprobs": 0}, None),
    ],
)
def test_log_probabilities_of_a_chat(fields: dict[str, Any], logprobs: int | None) -> None:
    assert output_options(chat(**fields)) == OutputOptions(logprobs=logprobs, skip_special_tokens=True)


def test_what_else_comes_back() -> None:
    fields = {"logprobs": 3, "prompt_logprobs": 2, "skip_special_tokens": False, "return_tokens_as_token_ids": True}
    assert output_options(text(**fields)) == OutputOptions(
        logprobs=3, prompt_logprobs=2, skip_special_tokens=False, return_tokens_as_token_ids=True
    )


def test_a_request_without_routing_fields_has_no_hints() -> None:
    assert routing_hints(chat()) is None
    assert routing_hints(chat(nvext={"annotations": ["x"]}, cache_salt="")) is None


def test_where_to_go_and_how_urgent() -> None:
    nvext = {
        "backend_instance_id": 1,
        "prefill_worker_id": 2,
        "decode_worker_id": 3,
        "dp_rank": 4,
        "prefill_dp_rank": 5,
        "cache_salt": "mine",
        "agent_hints": {"priority": 6, "strict_priority": 7, "osl": 8},
        "routing_constraints": {"required_taints": ["gpu"]},
    }
    assert routing_hints(chat(nvext=nvext, cache_salt="other")) == RoutingHints(
        backend_instance_id=1,
        prefill_worker_id=2,
        decode_worker_id=3,
        dp_rank=4,
        prefill_dp_rank=5,
        cache_namespace="mine",
        priority=6,
        priority_jump=6.0,
        strict_priority=7,
        expected_output_tokens=8,
        routing_constraints=RoutingConstraints({"gpu"}),
    )


def test_the_cache_salt_of_the_request_is_used_where_there_is_no_other() -> None:
    assert routing_hints(chat(cache_salt="top")) == RoutingHints(cache_namespace="top")


def test_fields_only_the_engine_knows_ride_along() -> None:
    assert extra_args(chat()) is None
    fields = {"logit_bias": {"5": 1.0}, "allowed_token_ids": [1], "detokenize": False}
    assert extra_args(chat(**fields)) == fields
    assert extra_args(text(**fields)) == fields
    fields = {"prediction": {"type": "content", "content": "x"}, "media_io_kwargs": {"video": {"fps": 1}}}
    assert extra_args(chat(**fields)) == fields
