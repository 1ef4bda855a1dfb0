"""Bundles: other items, the same answer; and the contracts hold with it in between."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Annotated, Context, Disconnected
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason, LLMEngineOutput
from pipeline.testing import Bundles, Fail, ScriptedEngine, Stall, bundled, check_operator

SIZES = [1, 7, None]


def tokens(*ids: int, **fields: Any) -> Annotated[LLMEngineOutput]:
    return Annotated(LLMEngineOutput(list(ids), **fields))


async def through(size: int | None, script: list[Any]) -> list[Any]:
    async with await bundled(ScriptedEngine(script), size).generate(Context(None)) as stream:
        return [item async for item in stream]


def ids(items: list[Any]) -> list[list[int]]:
    return [item.data.token_ids for item in items]


@pytest.mark.parametrize("size", SIZES)
async def test_it_holds_the_contract_of_operators(size: int | None) -> None:
    items = [tokens(number) for number in range(200)] + [tokens(finish_reason=FinishReason.STOP)]
    await check_operator(lambda: Bundles(size), request=None, items=items)


@pytest.mark.parametrize(
    ("size", "found"),
    [(1, [[0], [1], [2], [3], [4], []]), (2, [[0, 1], [2, 3], [4]]), (7, [[0, 1, 2, 3, 4]]), (None, [[0, 1, 2, 3, 4]])],
)
async def test_items_have_so_many_tokens(size: int | None, found: list[list[int]]) -> None:
    script = [tokens(0), tokens(1, 2, 3), tokens(4), tokens(finish_reason=FinishReason.LENGTH)]
    items = await through(size, script)
    assert ids(items) == found
    assert [item.data.finish_reason for item in items] == [None] * (len(items) - 1) + [FinishReason.LENGTH]


async def test_choices_are_bundled_each_for_itself() -> None:
    script = [tokens(number, index=number % 2) for number in range(6)]
    assert ids(await through(None, script)) == [[0, 2, 4], [1, 3, 5]]


async def test_tokens_come_before_what_is_no_token() -> None:
    other = Annotated[Any].from_annotation("note", {})
    items = await through(
        None, [tokens(1), tokens(2), other, tokens(3), Annotated(LLMEngineOutput([4], engine_data=5))]
    )
    assert [item if item is other else item.data.token_ids for item in items] == [[1, 2], other, [3], [4]]
    assert items[-1].data.engine_data == 5


async def test_an_error_comes_behind_the_tokens_before_it() -> None:
    found: list[Any] = []
    stream = await bundled(ScriptedEngine([tokens(1), tokens(2), Fail(Disconnected("gone"))]), 7).generate(
        Context(None)
    )
    with pytest.raises(Disconnected):
        await _read(stream, found)
    assert ids(found) == [[1, 2]]


async def _read(stream: Any, found: list[Any]) -> None:
    async with stream:
        async for item in stream:
            found.append(item)


@pytest.mark.parametrize(("verb", "found"), [("stop", [[1, 2]]), ("kill", [])])
async def test_after_a_stop_what_was_held_comes_and_after_a_kill_nothing(verb: str, found: list[list[int]]) -> None:
    context, came = Context(None), list[Any]()
    async with anyio.create_task_group() as tasks:
        stream = await bundled(ScriptedEngine([tokens(1), tokens(2), Stall()]), None).generate(context)
        tasks.start_soon(_read, stream, came)
        await anyio.sleep(1)
        assert came == []
        getattr(context, verb)()
    assert ids(came) == found


async def test_texts_are_joined_and_not_split() -> None:
    script = [Annotated(BackendOutput([1], ["a"], "a")), Annotated(BackendOutput([2, 3], ["b", None], "b"))]
    (item,) = await through(None, script)
    assert (item.data.token_ids, item.data.tokens, item.data.text) == ([1, 2, 3], ["a", "b", None], "ab")
    assert ids(await through(1, script)) == [[1], [2, 3]]


@given(cuts=st.lists(st.integers(0, 5), min_size=1, max_size=8), size=st.sampled_from([1, 2, 7, None]))
async def test_the_answer_is_the_same(cuts: list[int], size: int | None) -> None:
    script, at = [], 0
    for cut in cuts:
        logprobs = [-float(token) for token in range(at, at + cut)]
        at += cut
        usage = CompletionUsage.of(3, at) if cut == 5 or at == cut else None
        script.append(
            tokens(*range(at - cut, at), log_probs=logprobs, cum_log_probs=float(-at), completion_usage=usage)
        )
    script.append(tokens(finish_reason=FinishReason.STOP, stop_reason="x", completion_usage=CompletionUsage.of(3, at)))
    items = [item.data for item in await through(size, script)]
    assert [token for item in items for token in item.token_ids] == list(range(at))
    assert [logprob for item in items for logprob in item.log_probs or ()] == [-float(token) for token in range(at)]
    assert [(item.finish_reason, item.stop_reason) for item in items if item.finish_reason] == [
        (FinishReason.STOP, "x")
    ]
    counted = 0
    for item in items:
        counted += len(item.token_ids)
        assert size is None or len(item.token_ids) <= size
        if item.completion_usage is not None:
            assert item.completion_usage.completion_tokens == counted


async def test_the_items_of_the_engine_are_not_changed() -> None:
    script = [tokens(1), tokens(2, 3)]
    await through(None, script)
    assert ids(script) == [[1], [2, 3]]
    with pytest.raises(ValueError, match="at least one"):
        Bundles(0)
