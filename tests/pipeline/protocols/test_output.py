"""What an engine sends: finish reasons, chunks, counts, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated
from pipeline.errors import InvalidArgument
from pipeline.llm.tracking import metrics_item, metrics_of
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, TopLogprob
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.protocols.timing import LLMMetricAnnotation
from pipeline.wire import from_json, from_msgpack, from_plain, to_json, to_msgpack, to_plain

PLAIN_REASONS = [
    (FinishReason.EOS, "eos", "stop"),
    (FinishReason.LENGTH, "length", "length"),
    (FinishReason.STOP, "stop", "stop"),
    (FinishReason.CANCELLED, "cancelled", "stop"),
    (FinishReason.CONTENT_FILTER, "content_filter", "content_filter"),
]
U32_MAX = 2**32 - 1


@pytest.mark.parametrize(("reason", "text", "openai"), PLAIN_REASONS)
def test_a_plain_reason_is_its_text_everywhere(reason: FinishReason, text: str, openai: str) -> None:
    assert to_plain(reason) == str(reason) == text
    assert FinishReason.parse(text) is reason
    assert from_json(to_json(reason), FinishReason) is reason
    assert from_msgpack(to_msgpack(reason), FinishReason) is reason
    assert reason.openai_completion == openai


@given(st.text())
def test_an_error_reason_keeps_its_message(message: str) -> None:
    reason = FinishReason.error(message)
    assert FinishReason.parse(str(reason)) == reason
    assert to_plain(reason) == {"error": message}
    assert from_json(to_json(reason), FinishReason) == reason
    assert from_msgpack(to_msgpack(reason), FinishReason) == reason
    assert reason.openai_completion == "stop"


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("abort", FinishReason.CANCELLED),
        ("error: boom", FinishReason.error("boom")),
        ({"error": "boom"}, FinishReason.error("boom")),
        ("error: error: twice", FinishReason.error("error: twice")),
        ("error: ", FinishReason.error("")),
        ({"error": ""}, FinishReason.error("")),
    ],
)
def test_older_forms_of_a_reason_are_read(wire: Any, reason: FinishReason) -> None:
    assert from_plain(wire, FinishReason) == reason


@pytest.mark.parametrize(
    "wire",
    ["error", "error:x", "", "EOS", "unknown", {}, {"stop": "x"}, {"error": "m", "x": 1}, {"error": 1}, 3, True, []],
)
def test_what_is_no_reason_is_refused(wire: Any) -> None:
    with pytest.raises(InvalidArgument):
        from_plain(wire, FinishReason)


def test_a_text_that_is_no_reason_is_not_parsed() -> None:
    with pytest.raises(InvalidRecord):
        FinishReason.parse("error")


def test_reasons_are_values() -> None:
    assert {FinishReason.error("a"), FinishReason.error("a"), FinishReason.STOP} == {
        FinishReason.STOP,
        FinishReason.error("a"),
    }
    with pytest.raises(AttributeError):
        FinishReason.STOP.message = "changed"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def test_only_an_error_reason_has_an_error_message() -> None:
    output = from_json(b'{"token_ids":[],"finish_reason":"error: boom"}', LLMEngineOutput)
    assert output.error_message == "boom"
    assert LLMEngineOutput.token(1).error_message is None
    assert [LLMEngineOutput.cancelled().error_message, LLMEngineOutput.error("").error_message] == [None, ""]


def test_an_encoder_ends_with_its_result_and_nothing_else() -> None:
    result = {"a": 1}
    assert LLMEngineOutput.encode_terminal(result) == LLMEngineOutput(
        [], finish_reason=FinishReason.STOP, index=0, encoder_result=result
    )


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (LLMEngineOutput.cancelled(), FinishReason.CANCELLED),
        (LLMEngineOutput.stop(), FinishReason.STOP),
        (LLMEngineOutput.length(), FinishReason.LENGTH),
        (LLMEngineOutput.error("m"), FinishReason.error("m")),
    ],
)
def test_a_terminal_chunk_has_its_reason_and_no_tokens(output: LLMEngineOutput, reason: FinishReason) -> None:
    assert output == LLMEngineOutput([], finish_reason=reason)


def test_chunks_are_copied_with_one_part_changed() -> None:
    chunk = LLMEngineOutput.token(1)
    usage = CompletionUsage.of(1, 2)
    assert chunk.with_tokens([2, 3]) == LLMEngineOutput([2, 3])
    assert chunk.with_usage(usage) == LLMEngineOutput([1], completion_usage=usage)
    assert chunk.with_encoder_result({}) == LLMEngineOutput([1], encoder_result={})
    assert chunk == LLMEngineOutput([1])


def test_which_parts_of_a_chunk_are_written() -> None:
    assert to_plain(LLMEngineOutput.token(7)) == {
        "token_ids": [7],
        "output_type": "text",
        **dict.fromkeys(["tokens", "text", "cum_log_probs", "log_probs", "top_logprobs", "finish_reason", "index"]),
    }
    assert to_plain(TopLogprob(1, 2, -0.5)) == {"rank": 1, "token_id": 2, "token": None, "logprob": -0.5}


@pytest.mark.parametrize(
    ("wire", "kind"),
    [({"type": "text", "text": "t"}, str), ({"type": "image_url", "image_url": {"url": "http://a"}}, object)],
)
def test_content_parts_are_tagged_by_type(wire: Any, kind: type) -> None:
    output = from_plain({"token_ids": [], "content_parts": [wire]}, LLMEngineOutput)
    assert to_plain(output)["content_parts"] == [wire]
    assert isinstance(getattr((output.content_parts or [])[0], wire["type"]), kind)


@given(st.integers(0, 2**33), st.integers(0, 2**33))
def test_usage_sums_end_at_the_largest_u32(prompt: int, completion: int) -> None:
    usage = CompletionUsage.of(prompt, completion)
    assert usage.total_tokens == min(prompt + completion, U32_MAX)
    assert from_msgpack(to_msgpack(usage), CompletionUsage) == usage


METRICS = LLMMetricAnnotation(10, 3, 1, prefill_worker_id=2**63, tokenize_latency_s=0.5)


@pytest.mark.parametrize("event", ["llm_metrics", "payload_usage"])
def test_metrics_travel_as_one_comment(event: str) -> None:
    item = metrics_item(METRICS, event)
    assert item.data is None
    assert metrics_of(item) == METRICS
    assert item.comment == [
        '{"input_tokens":10,"output_tokens":3,"chunk_tokens":1,"prefill_worker_id":9223372036854775808,"tokenize_latency":0.5}'
    ]


def test_a_latency_that_is_no_number_is_not_known_to_the_reader() -> None:
    assert metrics_of(metrics_item(evolve(METRICS, tokenize_latency_s=math.nan))) == evolve(
        METRICS, tokenize_latency_s=None
    )


@pytest.mark.parametrize("event", [None, "token_ids", "error"])
def test_an_item_of_another_event_holds_no_metrics(event: str | None) -> None:
    assert metrics_of(Annotated[Any](event=event, comment=["{}"])) is None


@pytest.mark.parametrize("comments", [None, [], ["{}", "{}"], ["no json"], ["{}"]])
def test_a_metrics_event_without_exactly_one_record_is_an_error(comments: list[str] | None) -> None:
    with pytest.raises(InvalidArgument):
        metrics_of(Annotated[Any](event="llm_metrics", comment=comments))
