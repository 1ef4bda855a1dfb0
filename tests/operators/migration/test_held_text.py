"""Text that a decoder held back when its worker failed: the next worker continues it; without one it is shown."""

from __future__ import annotations

from typing import Any

import pytest

from operators import Detokenize, Migration, Model
from pipeline import Annotated, Context, PenstockError, StreamIncomplete, link
from pipeline.errors import BackendUnknown
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import Fail, Fault, Faults, ScriptedEngine, watch_streams
from tests.operators.migration.worlds import GONE, REFUSED, Answer, receive


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
