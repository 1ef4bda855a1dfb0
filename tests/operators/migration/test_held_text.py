"""Text a decoder held back when its worker failed: taken up by the next one, or shown where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from operators import Detokenize, Migration, Model
from pipeline import Annotated, Context, Disconnected, PenstockError, StreamIncomplete, link
from pipeline.errors import BackendUnknown
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import Fail, Fault, Faults, ScriptedEngine, watch_streams

pytestmark = pytest.mark.anyio

GONE = Disconnected("gone")
REFUSED = Fault(fail_to_connect=True)


def asking(*stops: str) -> PreprocessedRequest:
    return PreprocessedRequest([65], stop_conditions=StopConditions(max_tokens=20, stop=list(stops)))


def speaker(text: str, *breaks: int, ends: Any = None) -> ScriptedEngine:
    """Says `text`, a token for each byte; attempts break after so many of their tokens, the rest hold."""
    plan = list(breaks)

    def script(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = [Annotated(LLMEngineOutput([byte])) for byte in text.encode()[len(payload.token_ids) - 1 :]]
        return [*items[: plan.pop(0)], ends or Fail(GONE)] if plan else items

    return ScriptedEngine(script)


async def text_of(see: Any, *stages: Any, request: PreprocessedRequest) -> tuple[str, Any]:
    """All text that was seen, and the rest of what was."""
    graph = link(stages[0], Detokenize(Model.byte_level()), *stages[1:])
    with watch_streams() as streams:
        seen = await see(graph, Context(request))
    assert streams.open == []
    return "".join(item.data.text or "" for item in seen.items if item.data is not None), seen


async def test_a_stop_string_across_a_break_is_found_and_nothing_of_it_shown(see: Any) -> None:
    text, seen = await text_of(see, Migration(3), speaker("ok User: hi", 5, 0, 2), request=asking("User:"))
    assert (text, seen.finish, seen.items[-1].data.stop_reason) == ("ok ", FinishReason.STOP, "User:")


async def test_what_turns_out_to_be_no_stop_string_is_shown_once(see: Any) -> None:
    text, seen = await text_of(see, Migration(3), speaker("ok Users", 5, 1), request=asking("User:"))
    assert (text, seen.raised) == ("ok Users", None)


async def test_what_is_held_survives_a_refusal_between_two_workers(see: Any) -> None:
    plan: list[Fault | None] = [None, REFUSED]
    faults = Faults(plan=lambda _: plan.pop(0) if plan else None)
    text, _ = await text_of(see, Migration(3), faults, speaker("ok User: hi", 5), request=asking("User:"))
    assert text == "ok "


@pytest.mark.parametrize("error", [StreamIncomplete("gone"), BackendUnknown("bug")])
async def test_where_nobody_goes_on_it_is_shown_before_the_error(error: PenstockError, see: Any) -> None:
    plan: list[Fault | None] = [None]
    faults = Faults(plan=lambda _: plan.pop(0) if plan else REFUSED)
    for ends in (Fail(error), Annotated[Any].from_error(error)):
        plan[:] = [None]
        text, seen = await text_of(see, Migration(3), faults, speaker("ok Us", 5, ends=ends), request=asking("User:"))
        assert text == "ok Us"
        shown = seen.raised or seen.items[-1].error
        assert (type(shown), seen.items[-1].is_error) == (type(error), seen.raised is None)


async def test_where_all_tokens_are_there_it_is_shown_before_the_end(see: Any) -> None:
    request = asking("User:")
    request.stop_conditions.max_tokens = 5
    text, seen = await text_of(see, Migration(3), speaker("ok User:", 5), request=request)
    assert (text, seen.finish, seen.raised) == ("ok Us", FinishReason.LENGTH, None)


async def test_after_a_kill_it_is_not_shown() -> None:
    asked = Context(asking("User:"))
    graph = link(Migration(3), Detokenize(Model.byte_level()), speaker("ok User:", 5))
    async with await graph.generate(asked) as stream:
        seen = [await anext(stream) for _ in range(5)]
        asked.kill()
        assert [item async for item in stream] == []
    assert "".join(item.data.text or "" for item in seen) == "ok "


async def test_a_stop_string_that_lies_in_what_was_held_ends_the_answer(see: Any) -> None:
    """It waited for a longer one that began before it."""
    text, seen = await text_of(see, Migration(3), speaker("xabcd", 4), request=asking("abcd", "bc"))
    assert (text, seen.finish, seen.items[-1].data.stop_reason, seen.raised) == ("xa", FinishReason.STOP, "bc", None)
