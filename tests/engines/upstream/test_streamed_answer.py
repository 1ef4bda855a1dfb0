"""Answers by events: the chunks of one read are joined, and the tokens are the same however the bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.upstream import of_generate
from engines.upstream.sglang_answer import SglangAnswer
from engines.upstream.streamed_answer import JOINED_MAX_TOKENS, StreamedAnswer, checked_ids, join, whole_events
from engines.upstream.token_answer import TokenAnswer
from pipeline.errors import InvalidMessage
from pipeline.protocols import FinishReason, LLMEngineOutput
from pipeline.wire import SSEDecoder


def of_vllm(counts: list[int], *, has_logprobs: bool = False) -> bytes:
    """Events with so many tokens each, in vLLM's form; the tokens count from 100."""
    events, token = [], 100
    for number, count in enumerate(counts):
        ids = list(range(token, token + count))
        token += count
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": None}
        if has_logprobs:
            top = [{"token_id": 7, "logprob": -0.1, "rank": 1}]
            content = [{"token_id": one, "logprob": -one / 100, "rank": 2, "top_logprobs": top} for one in ids]
            choice["logprobs"] = {"content": content}
        if number == len(counts) - 1:
            choice["finish_reason"] = "length"
        events.append(json.dumps({"choices": [choice]}))
    events.append(json.dumps({"choices": [], "usage": {"completion_tokens": sum(counts)}}))
    return b"".join(b"data: %b\n\n" % event.encode() for event in [*events, "[DONE]"])


def of_sglang(counts: list[int]) -> bytes:
    """The same in SGLang's form, with only the new ids."""
    events, so_far = [], 0
    for number, count in enumerate(counts):
        ids = list(range(100 + so_far, 100 + so_far + count))
        so_far += count
        reason = {"type": "length"} if number == len(counts) - 1 else None
        events.append(
            json.dumps({"output_ids": ids, "meta_info": {"completion_tokens": so_far, "finish_reason": reason}})
        )
    return b"".join(b"data: %b\n\n" % event.encode() for event in [*events, "[DONE]"])


def fed(answer: StreamedAnswer, data: bytes, at: list[int]) -> list[LLMEngineOutput]:
    """The chunks of an answer whose bytes come in these pieces."""
    edges = [0, *sorted({place % len(data) for place in at}), len(data)]
    return [output for start, end in pairwise(edges) for output in answer.feed(data[start:end]) if start < end]


COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=60)
CUTS = st.lists(st.integers(0, 2**16), max_size=8)


@given(COUNTS, CUTS, st.sampled_from(["vllm", "vllm with log probabilities", "sglang"]))
def test_the_tokens_are_the_same_wherever_the_bytes_are_cut(counts: list[int], at: list[int], kind: str) -> None:
    has_logprobs = kind == "vllm with log probabilities"
    data = of_sglang(counts) if kind == "sglang" else of_vllm(counts, has_logprobs=has_logprobs)
    answer: StreamedAnswer = SglangAnswer(1, 3) if kind == "sglang" else TokenAnswer(1, 3, of_generate)
    outputs = fed(answer, data, at)
    tokens = list(range(100, 100 + sum(counts)))
    assert [token for output in outputs for token in output.token_ids] == tokens
    if has_logprobs:
        assert [one for output in outputs for one in output.log_probs or ()] == [-token / 100 for token in tokens]
        top = [one for output in outputs for one in output.top_logprobs or ()]
        assert [[candidate.token_id for candidate in one] for one in top] == [[7]] * len(tokens)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.LENGTH]
    assert outputs[-1].completion_usage is not None
    assert outputs[-1].completion_usage.completion_tokens == len(tokens)
    assert answer.is_done
    assert max(len(output.token_ids) for output in outputs) <= max(JOINED_MAX_TOKENS, *counts, 0)


def test_a_lone_token_is_a_chunk_at_once() -> None:
    answer = TokenAnswer(1, 3, of_generate)
    events = of_vllm([1] * 5).split(b"\n\n")
    assert [[output.token_ids for output in answer.feed(event + b"\n\n")] for event in events[:4]] == [
        [[100]],
        [[101]],
        [[102]],
        [[103]],
    ]


def test_what_comes_in_one_read_is_one_chunk_up_to_a_size() -> None:
    (whole,) = TokenAnswer(1, 3, of_generate).feed(of_vllm([1] * JOINED_MAX_TOKENS))
    assert (len(whole.token_ids), whole.finish_reason) == (JOINED_MAX_TOKENS, FinishReason.LENGTH)
    more = [*TokenAnswer(1, 3, of_generate).feed(of_vllm([1] * (JOINED_MAX_TOKENS + 1)))]
    assert [len(output.token_ids) for output in more] == [JOINED_MAX_TOKENS, 1]


def test_tokens_with_and_without_log_probabilities_are_not_joined() -> None:
    answer = TokenAnswer(1, 3, of_generate)
    events = [*of_vllm([1, 1]).split(b"\n\n")[:1], *of_vllm([1, 1], has_logprobs=True).split(b"\n\n")[:1]]
    outputs = [*answer.feed(b"\n\n".join([*events, b""]))]
    assert [output.log_probs for output in outputs] == [None, [-1.0]]


PIECES = [
    b'data: {"a":1}\n\n',
    b"data: {",
    b"}\n\n",
    b"\n",
    b"data:  [DONE]\n\n",
    b": c\n\n",
    b"data: 1\ndata: 2\n\n",
    b"\r",
]


@given(st.lists(st.sampled_from(PIECES)))
def test_whole_events_are_those_of_the_decoder(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    events, rest = whole_events(data)
    assert b"".join(b"data: %b\n\n" % event for event in events) + rest == data
    decoder = SSEDecoder()
    found = [message.data for message in decoder.feed(data[: len(data) - len(rest)])]
    texts = [event.decode().lstrip(" ") for event in events]
    assert found == [text for text in texts if text != "[DONE]"]
    assert decoder.is_done == ("[DONE]" in texts)


@pytest.mark.parametrize(
    "done", [b"data: [DONE]\n\n", b"data:  [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"]
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_the_end_of_an_answer_is_found_in_each_of_its_forms(done: bytes, is_alone: bool) -> None:
    answer, events = TokenAnswer(1, 3, of_generate), of_vllm([1, 1]).removesuffix(b"data: [DONE]\n\n")
    outputs = [*answer.feed(events), *answer.feed(done)] if is_alone else [*answer.feed(events + done)]
    assert [token for output in outputs for token in output.token_ids] == [100, 101]
    assert answer.is_done


def test_nothing_is_joined_to_what_ended_a_choice() -> None:
    last = LLMEngineOutput(token_ids=[1], finish_reason=FinishReason.LENGTH)
    outputs = [last]
    join(outputs, LLMEngineOutput(token_ids=[2]))
    assert [each.token_ids for each in outputs] == [[1], [2]]
    assert outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ids", [[-1], [2**32], [True], [1.0], ["1"], None, {}])
def test_what_are_no_token_ids_is_refused(ids: Any) -> None:
    assert checked_ids([0, 2**32 - 1]) == [0, 2**32 - 1]
    with pytest.raises(InvalidMessage, match="token ids are"):
        checked_ids(ids)
