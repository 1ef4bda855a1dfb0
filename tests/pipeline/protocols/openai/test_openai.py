"""OpenAI requests and responses: what is read, what is kept, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import InvalidArgument
from pipeline.protocols import CompletionUsage
from pipeline.protocols.openai import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    MediaUrl,
    NamedToolChoice,
    ToolCall,
)
from pipeline.wire import from_plain, to_plain

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return from_plain({"model": "m", "messages": [USER], **fields}, ChatCompletionRequest)


@pytest.mark.parametrize(
    "names",
    [
        "stream stream_options temperature top_p n stop max_tokens max_completion_tokens presence_penalty",
        "frequency_penalty logit_bias seed user metadata response_format top_k min_p repetition_penalty ignore_eos",
        "min_tokens stop_token_ids include_stop_str_in_output guided_json guided_regex guided_choice guided_grammar",
        "guided_decoding_backend guided_whitespace_pattern skip_special_tokens return_tokens_as_token_ids detokenize",
        "allowed_token_ids bad_words_token_ids logprob_token_ids cache_salt nvext logprobs top_logprobs tools",
        "tool_choice parallel_tool_calls functions function_call reasoning_effort thinking chat_template_args",
        "chat_template_kwargs add_generation_prompt mm_processor_kwargs prompt_embeds prompt_logprobs",
    ],
)
def test_known_fields_are_not_left_over_and_may_be_null(names: str) -> None:
    assert chat(**dict.fromkeys(names.split())).unsupported == {}


def test_unknown_fields_are_kept_for_one_answer_about_all_of_them() -> None:
    request = chat(foo=1, bar={"x": 2})
    assert request.unsupported == {"foo": 1, "bar": {"x": 2}}
    assert to_plain(request)["bar"] == {"x": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_salt", 5),
        ("stop_token_ids", ["a"]),
        ("detokenize", "yes"),
        ("allowed_token_ids", [-1]),
        ("bad_words_token_ids", [1]),
        ("logprob_token_ids", 1),
    ],
)
def test_pass_through_fields_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat(**{name: value})
    assert refused.value.field.startswith(name)


def test_template_arguments_have_an_older_name_too() -> None:
    assert chat(chat_template_kwargs={"a": 1}).chat_template_args == {"a": 1}
    assert chat(chat_template_kwargs={"a": 1}, chat_template_args=None).chat_template_args == {"a": 1}
    both = chat(chat_template_kwargs={"a": 1}, chat_template_args={"a": 2})
    assert both.chat_template_args == {"a": 2}
    assert both.unsupported == {}


@pytest.mark.parametrize("stop", [None, "a", ["a", "b"], [1, 2], []])
def test_stop_is_a_text_texts_or_ids(stop: Any) -> None:
    assert chat(stop=stop).stop == stop


@pytest.mark.parametrize(
    ("stop", "place"), [(5, "stop"), (["a", 1], "stop[1]"), ([1, "a"], "stop[1]"), ([None], "stop[0]")]
)
def test_what_is_no_stop_is_refused(stop: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        chat(stop=stop)
    assert refused.value.field == place


@pytest.mark.parametrize("prompt", [None, "", "a", ["a", "b"], [1, 2], [[1], [2, 3]], []])
def test_a_prompt_is_text_or_ids_one_or_several(prompt: Any) -> None:
    assert from_plain({"model": "m", "prompt": prompt}, CompletionRequest).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "place"), [(1, "prompt"), ([[1], 2], "prompt[1]"), ([[1, "a"]], "prompt[0][1]"), ([True], "prompt[0]")]
)
def test_what_is_no_prompt_is_refused_at_its_index(prompt: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"model": "m", "prompt": prompt}, CompletionRequest)
    assert refused.value.field == place


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_tool_choice_is_a_word(choice: str) -> None:
    assert chat(tool_choice=choice).tool_choice == choice


def test_tool_choice_names_a_function() -> None:
    named = chat(tool_choice={"type": "function", "function": {"name": "f"}}).tool_choice
    assert isinstance(named, NamedToolChoice)
    assert named.function.name == "f"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "system", "content": "s"}, ChatMessage("system", "s")),
        ({"role": "developer", "content": "d"}, ChatMessage("developer", "d")),
        ({"role": "assistant"}, ChatMessage("assistant")),
        ({"role": "assistant", "content": None, "refusal": "no"}, ChatMessage("assistant", refusal="no")),
        ({"role": "tool", "content": "r", "tool_call_id": "c"}, ChatMessage("tool", "r", tool_call_id="c")),
        ({"role": "function", "name": "f", "content": None}, ChatMessage("function", name="f")),
        ({"role": "user", "content": "u", "mood": 1}, ChatMessage("user", "u", extra={"mood": 1})),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            ChatMessage("assistant", tool_calls=[ToolCall("1", FunctionCall("f", "{}"))]),
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "low"}}]},
            ChatMessage("user", [ContentPart("image_url", image_url=MediaUrl("u", "low"))]),
        ),
    ],
)
def test_messages_of_every_role_are_read(message: Any, expected: ChatMessage) -> None:
    assert from_plain(message, ChatMessage) == expected


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "smell"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].image_url.url"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[1].name"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_a_bad_message_is_named_by_its_path(message: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"model": "m", "messages": [USER, message]}, ChatCompletionRequest)
    assert refused.value.field == place


def test_a_content_chunk_has_its_null_keys_and_nothing_that_is_not_set() -> None:
    chunk = ChatCompletionChunk("chatcmpl-1", 5, "m", [ChatChunkChoice(0, ChatDelta(content="x"))])
    assert to_plain(chunk) == {
        "id": "chatcmpl-1",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None, "logprobs": None}],
        "object": "chat.completion.chunk",
        "usage": None,
    }


def test_the_usage_chunk_has_no_choices() -> None:
    chunk = ChatCompletionChunk("chatcmpl-1", 5, "m", [], usage=CompletionUsage.of(1, 2))
    assert to_plain(chunk)["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
