"""The answer of several workers, presented as that of one: counts, last items, and the error that is shown."""

from __future__ import annotations

from typing import Any

import pytest

from operators.migration import behind, ending, error_shown
from pipeline import Annotated, Cancelled, CannotConnect, Disconnected, InvalidArgument
from pipeline.errors import StatusError, chain
from pipeline.protocols import (
    BackendOutput,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PromptTokensDetails,
)


def item(**fields: Any) -> Any:
    return Annotated(LLMEngineOutput([1], **fields))


def joined(delivered_tokens: int, last: LLMEngineOutput | None, later: Any) -> Any:
    """The data of an item behind those tokens."""
    return behind(delivered_tokens, last)(later).data


def test_usage_counts_the_delivered_tokens_as_completion() -> None:
    later = item(completion_usage=CompletionUsage(13, 7, 20, PromptTokensDetails(12, 1), CompletionTokensDetails(2)))
    usage = joined(3, LLMEngineOutput([9]), later).completion_usage
    assert usage == CompletionUsage(10, 10, 20, PromptTokensDetails(10, 1), CompletionTokensDetails(2))
    assert later.data.completion_usage.prompt_tokens == 13


def test_details_of_the_answer_add_up_where_the_worker_before_counted_them() -> None:
    before = LLMEngineOutput(
        [9], completion_usage=CompletionUsage(10, 3, 13, None, CompletionTokensDetails(3, None, 1))
    )
    later = item(completion_usage=CompletionUsage(13, 7, 20, None, CompletionTokensDetails(2, 4)))
    details = joined(3, before, later).completion_usage.completion_tokens_details
    assert details == CompletionTokensDetails(5, 4, 1)
    silent = item(completion_usage=CompletionUsage(13, 7, 20))
    assert joined(3, before, silent).completion_usage.completion_tokens_details == CompletionTokensDetails(3, None, 1)


@pytest.mark.parametrize(("before", "now", "whole"), [(-2.0, -0.5, -2.5), (None, -0.5, -0.5), (-2.0, None, None)])
def test_cumulative_logprobs_continue_from_the_worker_before(
    before: float | None, now: float | None, whole: float | None
) -> None:
    last = LLMEngineOutput([9], cum_log_probs=before)
    assert joined(3, last, item(cum_log_probs=now)).cum_log_probs == whole


def test_an_item_without_counts_is_passed_on_itself() -> None:
    whole = behind(3, LLMEngineOutput([9], cum_log_probs=-1.0))
    for one in (item(), item(log_probs=[-1.0]), Annotated(event="note"), Annotated(BackendOutput([1], ["a"]))):
        assert whole(one) is one
    counted = item(completion_usage=CompletionUsage.of(3, 1))
    assert behind(0, None)(counted) is counted


@pytest.mark.parametrize("kind", [LLMEngineOutput, BackendOutput])
def test_the_last_item_is_of_the_type_of_the_items_before(kind: Any) -> None:
    last = kind([9], index=0) if kind is LLMEngineOutput else kind([9], ["a"], index=0)
    made: Any = ending(kind, FinishReason.LENGTH, last, CompletionUsage.of(1, 1))
    assert (type(made.data), made.data.token_ids, made.data.finish_reason) == (kind, [], FinishReason.LENGTH)
    assert (made.data.index, made.data.completion_usage) == (0, CompletionUsage.of(1, 1))
    assert ending(None, FinishReason.LENGTH, None) is None


def test_the_error_is_the_one_that_broke_it_with_the_reason_as_its_last_cause() -> None:
    inner = StatusError("inner", status=404)
    broke, ended = Disconnected("gone", cause=inner), CannotConnect("no", cause=InvalidArgument("x", field="f"))
    shown = error_shown(broke, ended)
    assert [str(link) for link in chain(shown)] == ["gone", "inner", "no", "x"]
    assert [type(link) for link in chain(shown)] == [Disconnected, StatusError, CannotConnect, InvalidArgument]
    assert next(link.status for link in chain(shown) if isinstance(link, StatusError)) == 404
    assert inner.__cause__ is None


def test_the_same_error_again_is_no_cause_of_itself() -> None:
    broke = Disconnected("gone")
    assert error_shown(broke, broke) is broke
    assert error_shown(broke, CannotConnect("no", cause=broke)) is broke


def test_a_cancellation_is_shown_as_one() -> None:
    ended = CannotConnect("no", cause=Cancelled("given up"))
    assert error_shown(Disconnected("gone"), ended) is ended


def test_an_error_that_cannot_be_copied_is_shown_as_it_is() -> None:
    class Odd(Disconnected):
        def __init__(self, *, number: int) -> None:
            super().__init__(str(number))

    broke = Odd(number=1)
    assert error_shown(broke, CannotConnect("no")) is broke
