"""Rendering items: the fast way and the long way give the same chunks, and folding them gives the whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocols import BackendOutput, FinishReason, TopLogprob
from pipeline.protocols.openai import ChatCompletionChunk, ChatCompletionRequest, Completion, CompletionRequest
from pipeline.wire import from_plain
from serving.openai import (
    Answer,
    AnswerForm,
    ChatAnswer,
    ChatChunks,
    Chunks,
    CompletionAnswer,
    CompletionChunks,
)
from serving.openai.form import LogprobForm
from tests.serving.openai.usage_counts import usage_count

FORM = AnswerForm(id="chatcmpl-1", created=1, model="m")
APIS = [(ChatChunks, ChatAnswer), (CompletionChunks, CompletionAnswer)]

outputs = st.lists(
    st.builds(
        lambda text, ids, index, reason: BackendOutput(ids, [None] * len(ids), text, index=index, finish_reason=reason),
        st.none() | st.text(max_size=8),
        st.lists(st.integers(0, 9), max_size=2),
        st.none() | st.integers(0, 2),
        st.none() | st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    ),
    max_size=12,
)


def rendered(make: type[Chunks], form: AnswerForm, items: list[BackendOutput]) -> list[Any]:
    chunks = make(form, usage_count(form.prompts))
    frames = [frame for item in items if (frame := chunks.frame(item)) is not None]
    assert all(frame.startswith(b"data: ") and frame.endswith(b"\n\n") for frame in frames)
    assert all(frame.count(b"\n") == 2 for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


@pytest.mark.parametrize("make", [ChatChunks, CompletionChunks])
@given(items=outputs, model=st.text(max_size=10))
def test_the_fast_way_gives_the_chunks_of_the_long_way(make: Any, items: list[BackendOutput], model: str) -> None:
    """Asking for an extension that never comes turns the fast way off and changes nothing else."""
    form = evolve(FORM, model=model)
    slow = rendered(make, evolve(form, extra_fields=frozenset({"engine_data"})), items)
    assert rendered(make, form, items) == slow


texts = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 2), st.text(max_size=4)), max_size=12)


@pytest.mark.parametrize("make", [ChatChunks, CompletionChunks])
@given(
    tokens=texts, prompt=st.integers(0, 1), extra=st.sampled_from([frozenset(), frozenset({"completion_token_ids"})])
)
def test_a_token_gives_the_bytes_of_its_item(make: Any, tokens: list[Any], prompt: int, extra: frozenset[str]) -> None:
    form = evolve(FORM, prompts=2, choices_per_prompt=3, extra_fields=extra)
    by_token, by_item = make(form, usage_count(2)), make(form, usage_count(2))
    for token_id, index, text in tokens:
        item = BackendOutput([token_id], [text or None], text or None, index=index)
        assert by_token.token_frame(token_id, index, text, prompt) == by_item.frame(item, prompt)


@pytest.mark.parametrize("make", [ChatChunks, CompletionChunks])
@given(items=outputs)
def test_every_chunk_is_one_of_openai(make: Any, items: list[BackendOutput]) -> None:
    kind = ChatCompletionChunk if make is ChatChunks else Completion
    for plain in rendered(make, FORM, items):
        from_plain(plain, kind)


@pytest.mark.parametrize(("make", "fold"), APIS)
@given(items=outputs)
def test_chunks_and_the_whole_answer_have_the_same_text(
    make: Any, fold: type[Answer], items: list[BackendOutput]
) -> None:
    answer = fold(FORM, usage_count())
    for item in items:
        answer.add(item)
    choices = json.loads(b"".join(answer.json_parts()))["choices"]
    whole = {choice["index"]: choice.get("text", choice.get("message", {}).get("content")) for choice in choices}
    streamed: dict[int, str] = dict.fromkeys(whole, "")
    for chunk in rendered(make, FORM, items):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice.get("text", choice.get("delta", {}).get("content")) or ""
    assert streamed == whole


def test_a_placeholder_in_the_model_name_changes_nothing() -> None:
    form = evolve(FORM, model='\x00text\x00 "')
    chunks = rendered(ChatChunks, form, [BackendOutput([1], ["a"], "a"), BackendOutput([1], ["b"], "b")])
    assert [chunk["model"] for chunk in chunks] == [form.model] * 2
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["a", "b"]


# -- log probabilities

SCORED = BackendOutput(
    [5, 6],
    ["é", None],
    "é",
    log_probs=[-0.5, -1.0],
    top_logprobs=[[TopLogprob(1, 5, -0.5, "é"), TopLogprob(2, 9, -2.0, "x")], [TopLogprob(1, 7, -0.1, "y")]],
)


def test_chat_log_probabilities_name_each_token_and_the_likeliest() -> None:
    form = evolve(FORM, logprobs=LogprobForm(top=1))
    (chunk,) = rendered(ChatChunks, form, [SCORED])
    own = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    nothing = {"token": "", "logprob": -1.0, "bytes": None}
    assert chunk["choices"][0]["logprobs"]["content"] == [
        own | {"top_logprobs": [own]},
        nothing | {"top_logprobs": [{"token": "y", "logprob": -0.1, "bytes": [121]}, nothing]},
    ]


def test_completion_log_probabilities_have_offsets_that_go_on() -> None:
    form = evolve(FORM, logprobs=LogprobForm(top=2, as_token_ids=True))
    chunks = rendered(CompletionChunks, form, [SCORED, SCORED])
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1], [1, 2]]
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] == [
        {"token_id:5": -0.5, "token_id:9": -2.0},
        {"token_id:7": -0.1, "token_id:6": -1.0},
    ]


@pytest.mark.parametrize(("make", "fold"), APIS)
def test_the_whole_answer_has_the_log_probabilities_of_all_chunks(make: Any, fold: type[Answer]) -> None:
    form = evolve(FORM, logprobs=LogprobForm())
    answer = fold(form, usage_count())
    for _ in range(2):
        answer.add(SCORED)
    whole = json.loads(b"".join(answer.json_parts()))["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in rendered(make, form, [SCORED, SCORED])]
    for name in ("content", "tokens", "token_logprobs", "text_offset"):
        assert whole.get(name) == (parts[0][name] + parts[1][name] if name in parts[0] else None)


def test_tokens_without_text_still_bring_their_log_probabilities() -> None:
    silent = BackendOutput([5], [None], None, log_probs=[-1.0])
    assert rendered(ChatChunks, FORM, [silent]) == []
    assert len(rendered(ChatChunks, evolve(FORM, logprobs=LogprobForm()), [silent])) == 1


def test_an_engine_without_log_probabilities_gives_null() -> None:
    form = evolve(FORM, logprobs=LogprobForm(top=3))
    (chunk,) = rendered(ChatChunks, form, [BackendOutput([1], ["a"], "a")])
    assert chunk["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 3}, None),
        ({"logprobs": True}, LogprobForm(1)),
        ({"logprobs": True, "top_logprobs": 0}, LogprobForm(0)),
        ({"logprobs": True, "top_logprobs": 4, "return_tokens_as_token_ids": True}, LogprobForm(4, True)),
    ],
)
def test_a_chat_requests_log_probabilities_by_two_fields(fields: Any, expected: LogprobForm | None) -> None:
    request = ChatCompletionRequest(model="m", messages=[], **fields)
    assert AnswerForm.of(request, id="i", created=1).logprobs == expected


@pytest.mark.parametrize(("count", "expected"), [(None, None), (0, LogprobForm(0)), (2, LogprobForm(2))])
def test_a_completion_requests_log_probabilities_by_one_field(count: int | None, expected: LogprobForm | None) -> None:
    request = CompletionRequest(model="m", prompt="p", logprobs=count)
    assert AnswerForm.of(request, id="i", created=1).logprobs == expected
