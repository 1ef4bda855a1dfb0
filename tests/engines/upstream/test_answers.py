"""The answers of all kinds of servers: bytes cut anywhere, and events without an end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engines.upstream.llama_cpp import LlamaAnswer
from engines.upstream.sglang_answer import SglangAnswer
from engines.upstream.streamed_answer import MAX_EVENT_BYTES
from engines.upstream.text_answer import TextAnswer
from engines.upstream.token_answer import TokenAnswer
from engines.upstream.vllm_logprobs import of_completion, of_generate
from engines.upstream.vllm_text import TextTokenAnswer
from pipeline.errors import BackendUnknown, Disconnected, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PromptTokensDetails

SENT: dict[str, tuple[Callable[[], Any], list[Any]]] = {
    "vllm": (
        lambda: TokenAnswer(1, 3, of_generate),
        [
            {"choices": [{"index": 0, "token_ids": [8], "finish_reason": None}]},
            {"choices": [{"index": 0, "token_ids": [9], "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 2}},
            "[DONE]",
        ],
    ),
    "sglang": (
        lambda: SglangAnswer(1, 3),
        [
            {"output_ids": [8], "meta_info": {"completion_tokens": 1, "finish_reason": None}},
            {"output_ids": [8, 9], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}},
            "[DONE]",
        ],
    ),
    "text": (
        TextAnswer,
        [
            {"choices": [{"text": "ü", "token_ids": [8], "finish_reason": None}]},
            {"choices": [{"text": "é", "token_ids": [9], "finish_reason": "length"}]},
            "[DONE]",
        ],
    ),
    "llama.cpp": (
        lambda: LlamaAnswer(3),
        [
            {"content": "ü", "tokens": [8], "stop": False},
            {"content": "é", "tokens": [9], "stop": False},
            {"content": "", "tokens": [], "stop": True, "stop_type": "limit"},
        ],
    ),
}
KINDS = pytest.mark.parametrize("kind", SENT)
LINE_ENDS = pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])


def written(events: list[Any], line_end: str = "\n", space: str = " ") -> bytes:
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in events]
    return "".join(f"data:{space}{text}{line_end}{line_end}" for text in texts).encode()


def read(answer: Any, sent: bytes, size: int, *, whole: bool = True) -> list[LLMEngineOutput]:
    """What an answer makes of bytes in parts of this size, and of their end."""
    found: list[LLMEngineOutput] = []
    for place in range(0, len(sent), size):
        if not answer.is_done:
            found += answer.feed(sent[place : place + size])
    return found if answer.is_done else [*found, *answer.end(whole=whole)]


@KINDS
@LINE_ENDS
@pytest.mark.parametrize("size", [1, 2, 3, 13, 100_000])
def test_an_answer_may_be_cut_anywhere(kind: str, line_end: str, size: int) -> None:
    make, events = SENT[kind]
    found = read(make(), b": ping\n\n" + written(events, line_end), size)
    assert [token for output in found for token in output.token_ids] == [8, 9]
    assert [output.finish_reason for output in found if output.finish_reason] == [FinishReason.LENGTH]
    assert found[-1].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_an_event_may_have_several_lines(end: str, size: int) -> None:
    lines = ['data: {"choices": [', 'data: {"index": 0, "token_ids": [8], "finish_reason": "length"}]}']
    sent = (end.join(lines) + "\n\n").encode() + written(["[DONE]"])
    found = read(TokenAnswer(1, 3, of_generate), sent, size)
    assert [token for output in found for token in output.token_ids] == [8]


def test_an_error_event_is_one_wherever_it_is_cut() -> None:
    sent = b'event: error\ndata: {"message": "it broke"}\n\n'
    for place in range(len(sent)):
        answer = TextAnswer()
        assert [*answer.feed(sent[:place])] == []
        with pytest.raises(BackendUnknown, match="it broke"):
            list(answer.feed(sent[place:]))


def test_what_came_together_is_one_chunk_with_all_that_each_had() -> None:
    first = {"index": 0, "token_ids": [8], "text": "a", "finish_reason": None}
    then = {"index": 0, "token_ids": [9], "text": "b", "finish_reason": "stop", "stop_reason": 9}
    events = [{"choices": [first]}, {"choices": [then]}, {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]"]
    (found,) = TextTokenAnswer(1, 3, of_completion).feed(written(events))
    assert (found.token_ids, found.text) == ([8, 9], "ab")
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, 9)
    assert found.completion_usage == CompletionUsage.of(3, 2)


def test_what_came_together_with_values_and_without_stays_apart() -> None:
    values = [None, {"token_logprobs": [-1.0]}, {"token_logprobs": [-2.0]}, None]
    events = [{"choices": [{"index": 0, "token_ids": [8], "logprobs": one}]} for one in values]
    found = TokenAnswer(1, 3, of_completion).feed(written(events))
    assert [(one.token_ids, one.log_probs) for one in found] == [([8], None), ([8, 8], [-1.0, -2.0]), ([8], None)]


def test_what_came_together_of_several_choices_stays_apart() -> None:
    came = [(0, [8], None), (1, [5], None), (1, [6], "stop"), (0, [9], None), (0, [], "length")]
    events: list[Any] = [
        {"choices": [{"index": index, "token_ids": ids, "finish_reason": reason}]} for index, ids, reason in came
    ]
    events += [{"choices": [], "usage": {"completion_tokens": 4}}, "[DONE]"]
    found = TokenAnswer(2, 3, of_generate).feed(written(events))
    assert [(one.index, one.token_ids, one.finish_reason) for one in found] == [
        (0, [8], None),
        (1, [5, 6], FinishReason.STOP),
        (0, [9], FinishReason.LENGTH),
    ]


@KINDS
@pytest.mark.parametrize(("whole", "error"), [(True, StreamIncomplete), (False, Disconnected)])
def test_an_answer_without_its_last_events_is_none(kind: str, whole: bool, error: type[Exception]) -> None:
    make, events = SENT[kind]
    found: list[LLMEngineOutput] = []
    answer = make()
    found += answer.feed(written(events[:1]))
    with pytest.raises(error):
        found += answer.end(whole=whole)
    assert [output.token_ids for output in found] == [[8]]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_cached_tokens_of_the_prompt_and_those_so_far_are_counted(kind: str) -> None:
    make, events = SENT[kind]
    usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}
    if kind == "vllm":
        events = [*events[:2], {"choices": [], "usage": usage}, "[DONE]"]
    else:
        events = [
            one if isinstance(one, str) else {**one, "meta_info": {**one["meta_info"], "cached_tokens": 2}}
            for one in events
        ]
    found = read(make(), written(events), 100_000)[-1].completion_usage
    assert found == CompletionUsage(3, 2, 5, prompt_tokens_details=PromptTokensDetails(cached_tokens=2))
    answer = make()
    assert [output.token_ids for output in answer.feed(written(events[:1]))] == [[8]]
    stopped = answer.cancelled()
    assert stopped.finish_reason == FinishReason.CANCELLED
    assert stopped.completion_usage is not None
    assert stopped.completion_usage.completion_tokens == 1


def test_what_is_handed_over_is_in_the_first_chunk_only() -> None:
    answer = SglangAnswer(1, 3, handed_over={"bootstrap_room": 7})
    found = read(answer, written(SENT["sglang"][1]), 1)  # what comes together is one chunk
    assert [output.disaggregated_params for output in found] == [{"bootstrap_room": 7}, None]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        *[("stop", FinishReason.STOP), ("eos", FinishReason.STOP), ("length", FinishReason.LENGTH)],
        *[("content_filter", FinishReason.CONTENT_FILTER), ("repetition", FinishReason.STOP)],
    ],
)
def test_the_reason_of_an_end_is_kept(sent: str, reason: FinishReason) -> None:
    end = {"choices": [{"index": 0, "token_ids": [8], "finish_reason": sent}]}
    assert read(TokenAnswer(1, 3, of_generate), written([end, "[DONE]"]), 100_000)[-1].finish_reason == reason


def test_a_stop_string_that_llama_cpp_met_is_named() -> None:
    end = {"content": "", "tokens": [], "stop": True, "stop_type": "word", "stopping_word": "end"}
    found = read(LlamaAnswer(3), written([end]), 100_000)[-1]
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, "end")


@pytest.mark.parametrize("entries", [[], [{"logprob": -1.0, "top_logprobs": []}] * 2, 5, [{}], None])
def test_values_of_other_tokens_than_those_of_the_chunk_are_refused(entries: Any) -> None:
    sent = {"content": "a", "tokens": [8], "stop": False, "completion_probabilities": entries}
    with pytest.raises(InvalidMessage):
        read(LlamaAnswer(3, wants_logprobs=True), written([sent]), 100_000)


@KINDS
def test_an_event_that_does_not_end_is_refused_before_it_fills_the_memory(kind: str) -> None:
    answer, part = SENT[kind][0](), b"data: " + b"x" * 2**20
    with pytest.raises(InvalidMessage, match="without the end of an event"):
        read(answer, part * (2 * MAX_EVENT_BYTES // len(part)), len(part))


@KINDS
def test_comments_keep_a_slow_answer_open_for_as_long_as_it_takes(kind: str) -> None:
    make, events = SENT[kind]
    answer, comment = make(), b": " + b"x" * 2**20 + b"\n\n"
    for _ in range(2 * MAX_EVENT_BYTES // len(comment)):
        assert [*answer.feed(comment)] == []
    assert read(answer, written(events), 100_000)[-1].finish_reason == FinishReason.LENGTH
