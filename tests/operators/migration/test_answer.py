"""The answer of several workers, presented as that of one: counts, last items, and the error that is shown."""

from __future__ import annotations

from typing import Any

import pytest

from operators import Detokenize, Migration, Model
from operators.migration import behind, ending, error_shown
from pipeline import (
    Annotated,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    StreamIncomplete,
    link,
)
from pipeline.errors import BackendUnknown, StatusError, chain
from pipeline.protocols import (
    BackendOutput,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
    StopConditions,
)
from pipeline.testing import Fail, Fault, Faults, ScriptedEngine, watch_streams
from tests.operators.migration.worlds import GONE, REFUSED, Answer, receive


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


# -- text that a decoder held back


def stopped_by(*stops: str) -> PreprocessedRequest:
    """A request for at most 20 tokens with these stop strings."""
    return PreprocessedRequest([65], stop_conditions=StopConditions(max_tokens=20, stop=list(stops)))


def worker(text: str, *breaks: int, ends: Any = None) -> ScriptedEngine:
    """A worker that generates `text`, a token for each byte.

    Attempt `i` breaks after `breaks[i]` tokens, with `ends`; attempts beyond them do not break.
    """
    plan = list(breaks)

    def script(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = [Annotated(LLMEngineOutput([byte])) for byte in text.encode()[len(payload.token_ids) - 1 :]]
        return [*items[: plan.pop(0)], ends or Fail(GONE)] if plan else items

    return ScriptedEngine(script)


async def text_of(*stages: Any, request: PreprocessedRequest) -> tuple[str, Answer]:
    """The text of the answer, and the answer; no stream of it stays open."""
    graph = link(stages[0], Detokenize(Model.byte_level()), *stages[1:])
    with watch_streams() as streams:
        seen = await receive(graph, Context(request))
    assert streams.open == []
    return "".join(item.data.text or "" for item in seen.items if item.data is not None), seen


async def test_a_stop_string_across_a_break_is_found_and_nothing_of_it_shown() -> None:
    text, seen = await text_of(Migration(3), worker("ok User: hi", 5, 0, 2), request=stopped_by("User:"))
    assert (text, seen.finish, seen.items[-1].data.stop_reason) == ("ok ", FinishReason.STOP, "User:")


async def test_held_text_that_is_not_a_stop_string_is_shown_once() -> None:
    text, seen = await text_of(Migration(3), worker("ok Users", 5, 1), request=stopped_by("User:"))
    assert (text, seen.raised) == ("ok Users", None)


async def test_held_text_survives_a_refusal_between_two_workers() -> None:
    plan: list[Fault | None] = [None, REFUSED]
    faults = Faults(plan=lambda _: plan.pop(0) if plan else None)
    text, _ = await text_of(Migration(3), faults, worker("ok User: hi", 5), request=stopped_by("User:"))
    assert text == "ok "


@pytest.mark.parametrize("error", [StreamIncomplete("gone"), BackendUnknown("bug")])
async def test_held_text_is_shown_before_the_error_if_no_worker_continues(error: PenstockError) -> None:
    plan: list[Fault | None] = [None]
    faults = Faults(plan=lambda _: plan.pop(0) if plan else REFUSED)
    for ends in (Fail(error), Annotated[Any].from_error(error)):
        plan[:] = [None]
        text, seen = await text_of(Migration(3), faults, worker("ok Us", 5, ends=ends), request=stopped_by("User:"))
        assert text == "ok Us"
        shown = seen.raised or seen.items[-1].error
        assert (type(shown), seen.items[-1].is_error) == (type(error), seen.raised is None)


async def test_held_text_is_shown_before_the_end_if_all_tokens_are_delivered() -> None:
    request = stopped_by("User:")
    request.stop_conditions.max_tokens = 5
    text, seen = await text_of(Migration(3), worker("ok User:", 5), request=request)
    assert (text, seen.finish, seen.raised) == ("ok Us", FinishReason.LENGTH, None)


async def test_held_text_is_not_shown_after_a_kill() -> None:
    sent = Context(stopped_by("User:"))
    graph = link(Migration(3), Detokenize(Model.byte_level()), worker("ok User:", 5))
    async with await graph.generate(sent) as stream:
        seen = [await anext(stream) for _ in range(5)]
        sent.kill()
        assert [item async for item in stream] == []
    assert "".join(item.data.text or "" for item in seen) == "ok "


async def test_a_stop_string_within_the_held_text_ends_the_answer() -> None:
    """It was held back because a longer stop string, which began before it, could still have matched."""
    text, seen = await text_of(Migration(3), worker("xabcd", 4), request=stopped_by("abcd", "bc"))
    assert (text, seen.finish, seen.items[-1].data.stop_reason, seen.raised) == ("xa", FinishReason.STOP, "bc", None)
