"""How long a stop string and the arguments of a tool call may be."""

from __future__ import annotations

from typing import Any

import pytest

from operators.text import validate
from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.wire import from_plain

LIMITS = RequestLimits(max_stop_characters=4)


def text(stop: Any) -> CompletionRequest:
    return from_plain({"model": "m", "prompt": "hi", "stop": stop}, CompletionRequest)


@pytest.mark.parametrize(("stop", "field"), [("abcde", "stop"), (["a", "日本日本日"], "stop[1]")])
def test_a_stop_string_beyond_the_limit_is_refused_with_its_place(stop: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match="at most 4 characters, got 5") as caught:
        validate(text(stop), limits=LIMITS)
    assert caught.value.field == field
    assert caught.value.exceeded == ExceededLimit("max_stop_characters", 5, 4)


@pytest.mark.parametrize("stop", ["abcd", ["日本日本"] * 32, [123456], None])
def test_a_stop_string_up_to_the_limit_passes(stop: Any) -> None:
    validate(text(stop), limits=LIMITS)


def test_without_a_limit_any_length_passes() -> None:
    validate(text("x" * 1_000_000), limits=RequestLimits(max_stop_characters=0))


def chat(*arguments: str) -> ChatCompletionRequest:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
    return from_plain({"model": "m", "messages": messages}, ChatCompletionRequest)


def test_arguments_of_a_tool_call_beyond_the_limit_are_refused_before_they_are_read() -> None:
    limits = RequestLimits(max_tool_call_characters=4)
    validate(chat("{  }", "{}"), limits=limits)
    with pytest.raises(InvalidArgument, match="at most 4 characters, got 5") as caught:
        validate(chat("{}", "no ob"), limits=limits)
    assert caught.value.field == "messages[1].tool_calls[1].function.arguments"
    assert caught.value.exceeded == ExceededLimit("max_tool_call_characters", 5, 4)
    validate(chat('{"a": "%s"}' % ("x" * 300_000)), limits=RequestLimits(max_tool_call_characters=0))
