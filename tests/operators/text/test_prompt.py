"""Which text, or which ids, a request's prompt is."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from operators import ChatTemplate, Model
from operators.text.preprocess import prompt_of
from pipeline import InvalidArgument
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.wire import from_plain

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def model(template: str | None = TEMPLATE) -> Model:
    return evolve(Model.byte_level("m"), chat_template=None if template is None else ChatTemplate(template))


def chat(*contents: str | dict[str, Any], template: str | None = TEMPLATE, **fields: Any) -> str | list[int]:
    messages = [{"role": "user", "content": text} if isinstance(text, str) else text for text in contents]
    request = from_plain({"model": "m", "messages": messages, **fields}, ChatCompletionRequest)
    return prompt_of(request, model(template))


def text(prompt: Any, **fields: Any) -> str | list[int]:
    return prompt_of(from_plain({"model": "m", "prompt": prompt, **fields}, CompletionRequest), model())


def test_a_chat_is_rendered_with_room_for_the_answer() -> None:
    assert chat("hi", {"role": "assistant", "content": "yes"}, "go") == "<user>hi<assistant>yes<user>go<answer>"
    assert chat("hi", add_generation_prompt=False) == "<user>hi"


def test_nul_characters_are_taken_out() -> None:
    assert chat("a\0b") == "<user>ab<answer>"
    assert text("a\0b") == "ab"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([0], [0])],
)
def test_a_completion_prompt_is_text_or_ids(prompt: Any, found: str | list[int]) -> None:
    assert text(prompt) == found


def test_embeddings_alone_have_no_ids() -> None:
    assert text(None, prompt_embeds="AAAA") == []


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2], [3]]])
def test_more_than_one_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"got {len(prompt)}") as caught:
        text(prompt)
    assert caught.value.field == "prompt"


def test_a_raw_prompt_is_the_texts_without_a_template() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert chat("a", {"role": "user", "content": parts}, template=None, nvext={"use_raw_prompt": True}) == "a\nb\nc"


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        chat("hi", template=None)
    assert caught.value.field == "messages"


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    template = "{{ messages[0].tool_calls[0].function.arguments.city }} {{ messages[0].mood }}"
    assert chat({"role": "assistant", "tool_calls": [call], "mood": "new"}, template=template) == "Bonn new"


def test_tools_reach_the_template_unless_none_may_be_used() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    template = "{{ tools | tojson }}"
    assert (
        chat("hi", template=template, tools=tools)
        == '[{"function": {"name": "f", "parameters": {"type": "object"}}, "type": "function"}]'
    )
    assert chat("hi", template=template, tools=tools, tool_choice="none") == "null"


def test_the_last_message_can_be_left_open() -> None:
    last = {"role": "assistant", "content": " Sure, "}
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    assert chat("hi", last, template=template, continue_final_message=True) == "hi<end> Sure,"
    with pytest.raises(InvalidArgument, match="changes the last message"):
        chat("hi", last, template="{{ messages[1].content | upper }}", continue_final_message=True)
    with pytest.raises(InvalidArgument, match="exclude each other"):
        chat("hi", last, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, "undefined undefined"),
        ({"thinking": True}, "True True"),
        ({"thinking": {"type": "enabled"}}, "True True"),
        ({"thinking": {"type": "disabled"}}, "False False"),
        ({"thinking": {"type": "adaptive"}}, "True True"),
        ({"reasoning_effort": "none"}, "False False"),
        ({"reasoning_effort": "low"}, "undefined undefined"),
        ({"thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "True False"),
    ],
)
def test_whether_to_think_reaches_the_template(fields: dict[str, Any], seen: str) -> None:
    template = "{{ thinking | default('undefined') }} {{ enable_thinking | default('undefined') }}"
    assert chat("hi", template=template, **fields) == seen


def test_how_hard_to_think_reaches_the_template() -> None:
    assert chat("hi", template="{{ reasoning_effort }}", reasoning_effort="high") == "high"
