"""The small decisions around a request, each without a loop: options, prompts, usage, repair."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.protocols import BackendOutput, CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from serving.http import HttpOptions
from serving.http.body import parse, repair
from serving.openai import one_per_prompt
from serving.openai.form import PLACE, around, encode, event
from tests.serving.openai.usage_counts import usage_count


@pytest.mark.parametrize(
    ("text", "status"),
    [(None, 529), ("abc", 529), ("99", 529), ("150", 529), (" 503 ", 503), ("599", 599), ("600", 529), ("-503", 529)],
)
def test_the_status_of_overload_comes_from_the_environment(text: str | None, status: int) -> None:
    environment = {} if text is None else {"DYN_HTTP_OVERLOAD_STATUS_CODE": text}
    assert HttpOptions.from_environment(environment).overload_status == status


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("DYN_HTTP_BODY_LIMIT_MB", "7", "body_limit_mb", 7),
        ("DYN_HTTP_BODY_LIMIT_MB", "0", "body_limit_mb", 45),
        ("DYN_DISABLE_FRONTEND_NVEXT", "1", "nvext", False),
        ("DYN_DISABLE_FRONTEND_NVEXT", "no", "nvext", True),
        ("DYN_ENABLE_FORCE_INCLUDE_USAGE", "TRUE", "force_usage", True),
        ("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "30", "silence_timeout_s", 60.0),
        ("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "0", "silence_timeout_s", None),
        ("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", "25", "keep_alive_s", 0.025),
        ("DYN_CONTEXT_WINDOW", "123", "context_window_tokens", 123),
        ("DYN_MAX_OUTPUT_TOKENS", "x", "max_output_tokens", None),
        ("DYN_MAX_OUTPUT_TOKENS", "9" * 5000, "max_output_tokens", None),
        ("DYN_HTTP_SVC_CHAT_PATH", "/chat", "chat_path", "/chat"),
        ("DYN_HTTP_SVC_CMP_PATH", "no/slash", "completions_path", "/v1/completions"),
        ("DYN_HTTP_SVC_MODELS_PATH", "/{models}", "models_path", "/v1/models"),
    ],
)
def test_what_cannot_be_read_counts_as_not_set(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(HttpOptions.from_environment({name: text}), field) == value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["one"], ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], [[]]),
        (None, [None]),
    ],
)
def test_only_lists_of_prompts_are_taken_apart(prompt: Any, expected: list[Any]) -> None:
    request = CompletionRequest(model="m", prompt=prompt, max_tokens=3)
    parts = one_per_prompt(request)
    assert [getattr(part, "prompt", None) for part in parts] == expected
    assert {part.max_tokens for part in parts} == {3}


def test_a_chat_is_one_prompt() -> None:
    request = ChatCompletionRequest(model="m", messages=[])
    assert one_per_prompt(request) == [request]


def output(tokens: int, usage: CompletionUsage | None = None) -> BackendOutput:
    return BackendOutput([1] * tokens, [], completion_usage=usage)


def test_completion_tokens_are_counted_and_prompt_tokens_believed() -> None:
    usage = usage_count(tokens=3)
    usage.add(output(2), 0)
    usage.add(output(1, CompletionUsage.of(7, 99)), 0)
    assert usage.total() == CompletionUsage.of(7, 3)


def test_prompts_of_a_batch_are_summed() -> None:
    usage = usage_count(3, tokens=4)
    usage.add(output(1, CompletionUsage(7, 1, 8, PromptTokensDetails(cached_tokens=2))), 0)
    usage.add(output(2, CompletionUsage(5, 2, 7, PromptTokensDetails(cached_tokens=3))), 1)
    usage.add(output(1, CompletionUsage.of(1, 1)), 2)
    assert usage.total() == CompletionUsage(13, 4, 17, PromptTokensDetails(cached_tokens=5))


def test_details_of_one_prompt_are_passed_on() -> None:
    usage, details = usage_count(tokens=4), CompletionTokensDetails(reasoning_tokens=3)
    usage.add(output(4, CompletionUsage(7, 4, 11, PromptTokensDetails(audio_tokens=1), details)), 0)
    assert usage.total() == CompletionUsage(7, 4, 11, PromptTokensDetails(audio_tokens=1), details)


@given(st.text())
def test_a_text_between_its_surroundings_is_the_event_of_the_whole_value(text: str) -> None:
    before, after = around({"id": "x", "choices": [{"text": PLACE, "n": None}], "usage": None})
    whole = event({"id": "x", "choices": [{"text": text, "n": None}], "usage": None})
    assert before + encode(text) + after == whole


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_repair_changes_nothing_in_correct_json(value: dict[str, Any]) -> None:
    correct = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert json.loads(repair(correct)) == json.loads(correct)


@given(st.text(st.characters(codec="utf-8")))
def test_repair_escapes_raw_control_characters_inside_strings(text: str) -> None:
    body = '{\n "a":\t"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"}'
    assert json.loads(repair(body.encode())) == {"a": text}


@given(st.text(alphabet='"\\\\\nax{}'))
def test_repair_takes_every_character_once(text: str) -> None:
    """A string that never ends does not start anew at each quote inside it; nothing but control characters changes."""
    assert repair(text.encode()).decode().replace("\\u000a", "\n") == text.replace("\\u000a", "\n")


def test_repair_takes_a_time_that_grows_with_the_body_only() -> None:
    """A string that never ends was once tried again at each of its quotes: this took hours."""
    body = b'"' + b'\\"' * 500_000
    assert repair(body) == body


def test_json_that_is_correct_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.http.body.repair", lambda body: pytest.fail("repaired"))
    with pytest.raises(InvalidArgument):
        parse(b'{"model": 3}', CompletionRequest)


def test_what_repair_cannot_save_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidArgument, match=r"^Failed to deserialize the JSON body") as failure:
        parse(b'{"model": "a\n", "messages": 3}', ChatCompletionRequest)
    assert failure.value.field == "messages"
