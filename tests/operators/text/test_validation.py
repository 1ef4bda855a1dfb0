"""The table of rules: what passes, what is refused, and in which words."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.text import validate
from operators.text.validation import RULES
from pipeline import InvalidArgument
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from pipeline.wire import from_plain

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "look_up"}}
USER = CHAT["messages"]


def chat(**fields: Any) -> ChatCompletionRequest:
    return from_plain({**CHAT, **fields}, ChatCompletionRequest)


def text(**fields: Any) -> CompletionRequest:
    return from_plain({**TEXT, **fields}, CompletionRequest)


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **fields}}


EMBEDS = b64encode(bytes(100)).decode()

ACCEPTED: list[GenerationRequest] = [
    chat(),
    text(),
    chat(temperature=0, top_p=1, min_p=0, top_k=-1, n=1, max_tokens=1, top_logprobs=20, frequency_penalty=-2),
    chat(temperature=2, top_p=0.01, min_p=1, top_k=0, n=128, max_completion_tokens=1048576, repetition_penalty=2),
    chat(stop_token_ids=[]),
    chat(stop=["x"] * 32, stop_token_ids=[1], logit_bias={"5": -100, "6": 100}, user="u"),
    chat(stop=[1, 0], stream=True, stream_options={"include_usage": True}),
    chat(tools=[TOOL] * 1536, tool_choice="none", parallel_tool_calls=False),
    chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True),
    chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}),
    chat(modalities=["text"], store=False, service_tier="auto", prediction={"type": "content", "content": "x"}),
    chat(service_tier="default", user="u", metadata={"a": "b"}, media_io_kwargs={"video": {}}, modalities=[]),
    chat(logprobs=False, top_logprobs=0),
    chat(nvext={"token_data": [1]}),
    chat(messages=[calling("{}"), *USER], tool_choice="auto", response_format=schema()),
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}], cache_salt="s", detokenize=True),
    chat(nvext={"extra_fields": ["completion_token_ids"]}),
    text(prompt=["a"] * 64, n=2, best_of=2, logprobs=5, suffix="", echo=False),
    text(prompt=[1, 0, 2], best_of=1),
    text(n=20, best_of=20),
    text(prompt=[[1]], nvext={"token_data": [1]}),
    text(prompt=[[1], [2]]),
    text(prompt=None, prompt_embeds=EMBEDS),
]

REFUSED: list[tuple[GenerationRequest, str, str]] = [
    (chat(foo=1, bar=2), "unsupported", "Unsupported parameter(s): `foo`, `bar`"),
    (chat(functions=[]), "unsupported", "Unsupported parameter(s): `functions`"),
    (chat(chat_template_args={"chat_template": "x"}), "chat_template_args.chat_template", "chat_template"),
    (chat(messages=[]), "messages", "Messages array cannot be empty"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]),
        "messages[0].content[0].type",
        "image_url",
    ),
    (chat(messages=[*USER, calling("[1]")]), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (chat(messages=[calling("[" * 100_000)]), "messages[0].tool_calls[0].function.arguments", "must be a JSON object"),
    (chat(messages=[calling("{")]), "messages[0].tool_calls[0].function.arguments", "must be a JSON object"),
    (chat(model=" "), "model", "Model cannot be empty"),
    (text(user="\t"), "user", "User ID cannot be empty"),
    (chat(frequency_penalty=-3), "frequency_penalty", "Frequency penalty must be between -2 and 2, got -3"),
    (chat(presence_penalty=2.5), "presence_penalty", "Presence penalty must be between -2 and 2, got 2.5"),
    (chat(repetition_penalty=0), "repetition_penalty", "Repetition penalty must be between 0 and 2, got 0"),
    (chat(temperature=2.01), "temperature", "Temperature must be between 0 and 2, got 2.01"),
    (chat(top_p=-3), "top_p", "Top_p must be between 0 and 1, got -3"),
    (chat(top_p=0), "top_p", "Top_p must be between 0 and 1, got 0"),
    (chat(min_p=1.5), "min_p", "Min_p must be between 0 and 1, got 1.5"),
    (chat(top_k=-2), "top_k", "Top_k must be at least -1, got -2"),
    (chat(logit_bias={"7": 101}), "logit_bias.7", "Logit_bias for token 7 must be between -100 and 100, got 101"),
    (chat(top_logprobs=25), "top_logprobs", "Top_logprobs must be between 0 and 20, got 25"),
    (text(logprobs=6), "logprobs", "Logprobs must be between 0 and 5, got 6"),
    (chat(n=0), "n", "N must be between 1 and 128, got 0"),
    (chat(n=129), "n", "N must be between 1 and 128, got 129"),
    (chat(n=2, temperature=0), "n", "N must be 1 when temperature is 0, got 2"),
    (
        text(prompt=["a"] * 100, n=2),
        "prompt",
        "Total choices (batch_size × n = 100 × 2 = 200) exceeds maximum of 128",  # noqa: RUF001
    ),
    (text(best_of=21), "best_of", "Best_of must be between 0 and 20, got 21"),
    (text(best_of=1, n=2), "best_of", "Best_of must be greater than or equal to n"),
    (text(best_of=3, n=2), "best_of", "Best_of greater than n is not supported, got best_of=3 and n=2"),
    (text(best_of=2), "best_of", "Best_of greater than n is not supported, got best_of=2 and n=1"),
    (chat(max_tokens=0), "max_tokens", "Max_tokens must be between 1 and 1048576, got 0"),
    (chat(max_completion_tokens=1048577), "max_completion_tokens", "between 1 and 1048576"),
    (chat(stop=""), "stop", "Stop cannot be an empty string"),
    (chat(stop=[]), "stop", "Stop must have between 1 and 32 entries, got 0"),
    (chat(stop=["x"] * 33), "stop", "Stop must have between 1 and 32 entries, got 33"),
    (chat(stop=["x", ""]), "stop[1]", "Stop[1] cannot be an empty string"),
    (chat(stop_token_ids=[1] * 33), "stop_token_ids", "Stop_token_ids must have at most 32 entries, got 33"),
    (chat(tools=[TOOL] * 1537), "tools", "Tools must have at most 1536 entries"),
    (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "Tools[0]"),
    (chat(tools=[{"type": "function", "function": {"name": "a" * 129}}]), "tools[0].function.name", "128"),
    (chat(tool_choice="required"), "tool_choice", "Tool_choice is required, but there are no tools"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
        "tool_choice.function.name",
        "not among the tools",
    ),
    (chat(tools=[TOOL], tool_choice="required"), "tool_choice", "`tool_choice` required is not supported"),
    (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look_up"}}),
        "tool_choice",
        "A function in `tool_choice` is not supported",
    ),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema", "json_schema` is required"),
    (chat(response_format=schema(name=" ")), "response_format.json_schema.name", "name` cannot be empty"),
    (text(response_format=schema(schema=None)), "response_format.json_schema.schema", "schema` is required"),
    (text(response_format=schema(schema=42)), "response_format.json_schema.schema", "must be a JSON object"),
    (chat(stream_options={"include_usage": True}), "stream_options", "stream_options"),
    (text(prompt=None), "prompt", "Prompt or prompt_embeds must be given"),
    (text(prompt=""), "prompt", "Prompt string cannot be empty"),
    (text(prompt=[]), "prompt", "Prompt array cannot be empty"),
    (text(prompt=["a", ""]), "prompt[1]", "Prompt[1] cannot be empty"),
    (text(prompt=[[1], []]), "prompt[1]", "Prompt[1] cannot be empty"),
    (text(prompt_embeds="*" * 200), "prompt_embeds", "Prompt_embeds must be valid base64"),
    (text(prompt_embeds=b64encode(bytes(99)).decode()), "prompt_embeds", "got 99"),
    (text(echo=True), "echo", "`echo` is not supported"),
    (text(suffix="x"), "suffix", "`suffix` is not supported"),
    (text(suffix="x" * 10_001), "suffix", "`suffix` is not supported"),
    (chat(logprobs=False, top_logprobs=1), "top_logprobs", "Top_logprobs cannot be given when `logprobs` is false"),
    (
        chat(stream=True, stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
        "`stream_options.include_obfuscation` is not supported",
    ),
    (chat(modalities=["text", "audio"]), "modalities[1]", "Modalities other than text are not supported, got audio"),
    (chat(audio={"voice": "alloy", "format": "wav"}), "audio", "`audio` is not supported"),
    (chat(store=True), "store", "`store` is not supported"),
    (chat(web_search_options={}), "web_search_options", "`web_search_options` is not supported"),
    (chat(service_tier="flex"), "service_tier", "Service_tier must be auto or default, got flex"),
    (chat(nvext={"metadata_upload": {"url": "http://a"}}), "nvext.metadata_upload", "is not supported"),
    (text(prompt=["a", "b"], nvext={"token_data": [1]}), "nvext.token_data", "needs exactly one prompt"),
    (chat(nvext={"extra_fields": ["completion_token_ids"]}, n=2), "nvext.extra_fields", "exactly one choice"),
    (
        text(prompt=["a", "b"], nvext={"extra_fields": ["completion_token_ids"]}),
        "nvext.extra_fields",
        "exactly one choice",
    ),
]


@pytest.mark.parametrize("request_", ACCEPTED)
def test_values_at_their_limits_pass(request_: GenerationRequest) -> None:
    validate(request_)


@pytest.mark.parametrize(("request_", "field", "words"), REFUSED)
def test_an_invalid_value_is_reported_with_its_place(request_: GenerationRequest, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate(request_)
    assert caught.value.field == field
    assert str(caught.value).startswith("Validation: ")
    assert words in str(caught.value)


def test_every_row_of_the_table_has_a_request_that_it_refuses() -> None:
    refusing = set()
    for request, _, _ in REFUSED:
        for rule in RULES:
            value = getattr(request, rule.field, None)
            if isinstance(request, rule.kind) and (value is not None or rule.is_required):
                refusing |= {rule} if next(iter(rule.check(value, request)), None) else set()
    assert refusing == set(RULES)


def test_the_first_row_of_the_table_speaks_first() -> None:
    with pytest.raises(InvalidArgument, match="Unsupported"):
        validate(chat(foo=1, messages=[], temperature=9))
    with pytest.raises(InvalidArgument, match="Messages"):
        validate(chat(messages=[], temperature=9))


def test_unknown_fields_may_be_ignored_and_nothing_else() -> None:
    validate(chat(foo=1), ignore_unsupported=True)
    with pytest.raises(InvalidArgument, match="Temperature"):
        validate(chat(foo=1, temperature=9), ignore_unsupported=True)


RANGES: list[tuple[type[GenerationRequest], str, float, float, bool]] = [
    (ChatCompletionRequest, "frequency_penalty", -2, 2, False),
    (ChatCompletionRequest, "presence_penalty", -2, 2, False),
    (CompletionRequest, "repetition_penalty", 0, 2, True),
    (CompletionRequest, "temperature", 0, 2, False),
    (ChatCompletionRequest, "top_p", 0, 1, True),
    (CompletionRequest, "min_p", 0, 1, False),
    (ChatCompletionRequest, "top_k", -1, math.inf, False),
    (ChatCompletionRequest, "top_logprobs", 0, 20, False),
    (CompletionRequest, "logprobs", 0, 5, False),
    (CompletionRequest, "best_of", 1, 1, False),
    (ChatCompletionRequest, "n", 1, 128, False),
    (CompletionRequest, "max_tokens", 1, 1048576, False),
    (ChatCompletionRequest, "max_completion_tokens", 1, 1048576, False),
]


@given(range_=st.sampled_from(RANGES), value=st.floats(-300, 2e6) | st.integers(-5, 140) | st.just(math.nan))
def test_a_number_passes_exactly_if_it_is_in_its_range(
    range_: tuple[type[GenerationRequest], str, float, float, bool], value: float
) -> None:
    kind, field, low, high, above_low = range_
    change: dict[str, Any] = {field: value}
    request = evolve(chat() if kind is ChatCompletionRequest else text(), **change)
    if low <= value <= high and not (above_low and value == low):
        validate(request)
        return
    with pytest.raises(InvalidArgument) as caught:
        validate(request)
    assert caught.value.field == field
    assert str(caught.value).startswith("Validation: ")
    assert field.replace("_", " ") in str(caught.value).lower().replace("_", " ")


@pytest.mark.parametrize(
    ("value", "shown"), [(-3.0, "-3"), (2.5, "2.5"), (1e300, "1e+300"), (math.inf, "inf"), (math.nan, "nan")]
)
def test_a_number_is_shown_as_it_was_written(value: float, shown: str) -> None:
    """JSON has one kind of number, so a reader of records makes a float of both."""
    with pytest.raises(InvalidArgument, match=rf"got {re.escape(shown)}$"):
        validate(chat(temperature=value))


@given(st.binary(min_size=100, max_size=200), st.integers(0, 130), st.sampled_from("-_ =\n\x00é"))
def test_prompt_embeds_are_base64_with_its_padding(data: bytes, at: int, other: str) -> None:
    """A character that does not belong there is found without decoding the rest."""
    embeds = b64encode(data).decode()
    validate(text(prompt=None, prompt_embeds=embeds))
    with pytest.raises(InvalidArgument, match="must be valid base64"):
        validate(text(prompt=None, prompt_embeds=embeds[:at] + other + embeds[at + 1 :]))
