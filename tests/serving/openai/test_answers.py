"""Whole answers: the JSON that is made item by item is that of the whole record, and its end costs little."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import CodecError
from pipeline.protocols import BackendOutput, FinishReason, TopLogprob
from pipeline.protocols.openai import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ResponseMessage,
)
from pipeline.wire import to_plain
from serving.openai import Answer, AnswerForm, ChatAnswer, CompletionAnswer
from serving.openai.form import LogprobForm
from tests.serving.openai.usage_counts import usage_count

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ['"', '"content":""', '"content":[]', '"text":""', '"tokens":[]', '"choices":[]', "\\", "\0", "ü", "x" * 20_000]
)


@st.composite
def items(draw: st.DrawFn) -> list[BackendOutput]:
    found = []
    for _ in range(draw(st.integers(0, 6))):
        texts: list[str | None] = [*draw(st.lists(TEXTS, max_size=2))]
        ids = list(range(len(texts)))
        probabilities = [draw(st.floats(-9, 0)) for _ in ids] if draw(st.booleans()) else None
        top = [[TopLogprob(0, rank, -1.0, text) for rank in range(draw(st.integers(0, 2)))] for text in texts]
        reason = draw(st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]))
        index = draw(st.integers(0, 2))
        found.append(
            BackendOutput(
                ids,
                texts,
                "".join(map(str, texts)),
                log_probs=probabilities,
                top_logprobs=top,
                finish_reason=reason,
                index=index,
            )
        )
    return found


def form(logprobs: LogprobForm | None, **fields: Any) -> AnswerForm:
    return AnswerForm("id", 1, 'm"choices":[]', choices_per_prompt=3, logprobs=logprobs, **fields)


def of(kind: type[Answer], form: AnswerForm, outputs: list[BackendOutput]) -> Any:
    answer = kind(form, usage_count(1))
    for output in outputs:
        answer.add(output)
    parts = answer.json_parts()
    assert b"" not in parts
    plain = json.loads(b"".join(parts))
    plain.pop("usage")
    return plain


def of_choices(outputs: list[BackendOutput]) -> dict[int, list[BackendOutput]]:
    indexes = sorted({output.index or 0 for output in outputs})
    return {index: [output for output in outputs if (output.index or 0) == index] for index in indexes}


def text(outputs: list[BackendOutput]) -> str:
    return "".join(output.text or "" for output in outputs)


def reason(outputs: list[BackendOutput]) -> Any:
    found = [output.finish_reason.openai_completion for output in outputs if output.finish_reason is not None]
    return found[-1] if found else None


FORMS = st.none() | st.builds(LogprobForm, st.integers(0, 2), st.booleans())


@given(outputs=items(), logprobs=FORMS)
def test_a_whole_chat_is_the_json_of_its_record(outputs: list[BackendOutput], logprobs: LogprobForm | None) -> None:
    choices = []
    for index, own in of_choices(outputs).items():
        found = [logprobs.chat(output) for output in own] if logprobs else []
        content = [entry for each in found if each is not None for entry in each.content or []]
        whole = ChatLogprobs(content) if content else None
        choices.append(ChatChoice(index, ResponseMessage(content=text(own)), reason(own), whole))
    expected = to_plain(ChatCompletion("id", 1, 'm"choices":[]', choices))
    assert of(ChatAnswer, form(logprobs), outputs) == expected


@given(outputs=items(), logprobs=FORMS)
def test_a_whole_completion_is_the_json_of_its_record(
    outputs: list[BackendOutput], logprobs: LogprobForm | None
) -> None:
    choices = []
    for index, own in of_choices(outputs).items():
        whole, offset = None, 0
        for output in own:
            found = logprobs.completion(output, offset) if logprobs else None
            offset += len(output.text or "")
            if found is not None:
                whole = whole or CompletionLogprobs()
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    getattr(whole, name).extend(getattr(found, name))
        choices.append(CompletionChoice(text(own), index, whole, reason(own)))
    expected = to_plain(Completion("id", 1, 'm"choices":[]', choices))
    del expected["usage"]
    assert of(CompletionAnswer, form(logprobs), outputs) == expected


def test_the_ids_of_all_tokens_are_joined() -> None:
    form = AnswerForm("id", 1, "m", extra_fields=frozenset({"completion_token_ids", "stop_reason"}))
    outputs = [BackendOutput([1, 2], ["a", "b"], "ab"), BackendOutput([3], ["c"], "c", stop_reason=7)]
    assert of(ChatAnswer, form, outputs)["nvext"] == {"completion_token_ids": [1, 2, 3], "stop_reason": 7}


def test_half_a_character_is_no_json() -> None:
    answer = ChatAnswer(form(None), usage_count(1))
    with pytest.raises(CodecError):
        answer.add(BackendOutput([1], ["\ud800"], "\ud800"))


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_neither_an_item_nor_the_end_of_a_long_answer_takes_long(kind: type[Answer]) -> None:
    """At most 20 ms of the loop in one piece. It was 0.2 s for 5,000 tokens with 20 candidates each."""
    top = [[TopLogprob(rank, rank, -1.0, f"some{rank}") for rank in range(20)]]
    output = BackendOutput([1], ["some"], "some", log_probs=[-1.0], top_logprobs=top)
    times_s = []
    for _ in range(3):
        answer, longest_s = kind(form(LogprobForm(20)), usage_count(1)), 0.0
        for _ in range(5_000):
            before_s = time.thread_time()
            answer.add(output)
            longest_s = max(longest_s, time.thread_time() - before_s)
        before_s = time.thread_time()
        parts = answer.json_parts()
        times_s.append(max(longest_s, time.thread_time() - before_s))
        assert sum(map(len, parts)) > 1_000_000
    assert min(times_s) < 0.020, times_s
