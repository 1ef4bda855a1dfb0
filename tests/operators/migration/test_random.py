"""Random failures: the answer is that of an undisturbed run, and nothing stays open however the request ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import Detokenize, Migration, Model
from pipeline import (
    Annotated,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResponseStream,
    StreamIncomplete,
    link,
)
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import (
    Fail,
    Fault,
    Faults,
    ScriptedEngine,
    Stall,
    Wait,
    check_engine,
    check_operator,
    run_in_virtual_time,
    watch_streams,
)
from tests.operators.endings import BACKENDS, ENDINGS, all_closed, ended, read

PROMPT = [65, 66, 67]


class RandomWorker(ScriptedEngine):
    """Generate `answer` from where the prompt leaves off, in chunks that a seed cuts; fail as planned.

    `plan` has an entry for each attempt: after how many chunks it fails and how, or None. Later attempts do not fail.
    """

    def __init__(self, answer: Sequence[int], seed: int, plan: Sequence[tuple[int, str] | None]) -> None:
        super().__init__(self.script)
        self._answer, self._rng, self._plan = list(answer), Random(seed), list(plan)
        self.attempts = 0

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.attempts += 1
        self._fault = self._plan.pop(0) if self._plan else None
        if self._fault is not None and self._fault[1] == "refuses":
            raise CannotConnect("not now")
        return await super().generate(request)

    def script(self, payload: PreprocessedRequest) -> list[Any]:
        rest = self._answer[len(payload.token_ids) - len(PROMPT) :]
        assert payload.token_ids == PROMPT + self._answer[: len(self._answer) - len(rest)]
        assert payload.stop_conditions.max_tokens == len(rest)
        chunks: list[LLMEngineOutput] = []
        for token_id in rest:
            if not chunks or self._rng.random() < 0.6:
                chunks.append(LLMEngineOutput([], log_probs=[]))
            chunks[-1].token_ids.append(token_id)
            chunks[-1].log_probs = [-float(n) for n in chunks[-1].token_ids]
        for chunk, count in zip(chunks, accumulate(len(c.token_ids) for c in chunks), strict=True):
            chunk.cum_log_probs = -float(sum(rest[:count]))
        last = chunks[-1] if self._rng.random() < 0.5 else LLMEngineOutput([])
        last.finish_reason = FinishReason.LENGTH
        last.completion_usage = CompletionUsage.of(len(payload.token_ids), len(rest))
        items: list[Any] = [Annotated(chunk) for chunk in chunks]
        if last is not chunks[-1]:
            items.append(Annotated(last))
        for place in range(len(items), 0, -1):
            if self._rng.random() < 0.2:
                items.insert(place, Wait(self._rng.random()))
        return self._broken(items)

    def _broken(self, items: list[Any]) -> list[Any]:
        if self._fault is None:
            return items
        after, how = self._fault
        ends = {"raises": Fail(Disconnected("gone")), "error item": Annotated[Any].from_error(StreamIncomplete("gone"))}
        return [*items[:after], ends.get(how, Stall())]


faults = st.none() | st.tuples(st.integers(0, 6), st.sampled_from(["raises", "error item", "refuses"]))
plans = st.lists(faults, max_size=5)
answers = st.lists(st.integers(97, 122), min_size=1, max_size=12)


def request_for(answer: Sequence[int]) -> PreprocessedRequest:
    return PreprocessedRequest(list(PROMPT), stop_conditions=StopConditions(max_tokens=len(answer)))


def breaks(plan: Sequence[tuple[int, str] | None]) -> int:
    """How many attempts fail at most: those before the first that does not fail."""
    return next((count for count, fault in enumerate(plan) if fault is None), len(plan))


@given(answer=answers, seed=st.integers(0, 1000), plan=plans, with_text=st.booleans(), backend=BACKENDS)
@settings(max_examples=3 * settings().max_examples // 5)
def test_the_answer_is_that_of_an_undisturbed_run(
    answer: list[int], seed: int, plan: list[Any], with_text: bool, backend: Any
) -> None:
    async def run() -> list[Any]:
        engine = RandomWorker(answer, seed, plan)
        stages = [Migration(5), Detokenize(Model.byte_level())] if with_text else [Migration(5)]
        with watch_streams() as streams:
            stream = await link(*stages, engine).generate(Context(request_for(answer)))
            items = await stream.collect()
        assert (streams.open, engine.open) == ([], 0)
        assert engine.attempts <= breaks(plan) + 1
        return [item.data for item in items]

    seen = run_in_virtual_time(run, backend=backend)
    delivered = [token_id for data in seen for token_id in data.token_ids]
    assert delivered == answer
    assert [n for data in seen for n in data.log_probs or ()] == [-float(n) for n in answer]
    assert [data.cum_log_probs for data in seen if data.token_ids][-1] == -float(sum(answer))
    assert [data.finish_reason for data in seen if data.finish_reason] == [FinishReason.LENGTH]
    assert seen[-1].finish_reason == FinishReason.LENGTH
    assert seen[-1].completion_usage in (None, CompletionUsage.of(3, len(answer)))
    if with_text:
        assert "".join(data.text or "" for data in seen) == bytes(answer).decode()


@given(answer=answers, seed=st.integers(0, 1000), plan=plans, limit=st.integers(0, 3), backend=BACKENDS)
@settings(max_examples=40)
def test_with_too_few_attempts_the_caller_sees_a_beginning_and_one_error(
    answer: list[int], seed: int, plan: list[Any], limit: int, backend: Any
) -> None:
    async def run() -> tuple[list[Any], Exception | None, int]:
        engine, items = RandomWorker(answer, seed, plan), []
        raised: Exception | None = None
        try:
            async with await (Migration(limit) >> engine).generate(Context(request_for(answer))) as stream:
                async for item in stream:
                    items.append(item)
        except PenstockError as error:
            raised = error
        return items, raised, engine.attempts

    items, raised, attempts = run_in_virtual_time(run, backend=backend)
    outputs = [item.data for item in items if item.data is not None]
    delivered = [token_id for data in outputs for token_id in data.token_ids]
    errors = [item for item in items if item.is_error]
    assert delivered == answer[: len(delivered)]
    assert attempts <= limit + 1
    if errors or raised:
        assert len(errors) + (raised is not None) == 1
        assert limit == 0 or attempts == limit + 1
        assert not errors or items[-1] is errors[0]
    else:
        assert (delivered, outputs[-1].finish_reason) == (answer, FinishReason.LENGTH)


def one_holds(stops: list[str]) -> bool:
    """Whether one stop string contains another: after a failure behind the shorter one, that one ends the answer."""
    return any(one is not other and one in other for one in stops for other in stops)


letters = st.lists(st.sampled_from([97, 98]), min_size=1, max_size=12)


@given(
    answer=letters,
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=2).filter(lambda s: not one_holds(s)),
    include=st.booleans(),
    least=st.integers(0, 6),
    seed=st.integers(0, 1000),
    plan=plans,
    backend=BACKENDS,
)
def test_the_text_up_to_a_stop_string_is_that_of_an_undisturbed_run(
    answer: list[int], stops: list[str], include: bool, least: int, seed: int, plan: list[Any], backend: Any
) -> None:
    """No part of a stop string is shown, and none ends the answer that began before `min_tokens`."""

    async def run(plan: list[Any]) -> list[Any]:
        request = request_for(answer)
        request.stop_conditions.stop, request.sampling_options.include_stop_str_in_output = stops, include
        request.stop_conditions.min_tokens = least
        stages = [Migration(5), Detokenize(Model.byte_level()), RandomWorker(answer, seed, plan)]
        return [item.data for item in await (await link(*stages).generate(Context(request))).collect()]

    def text(outputs: list[Any]) -> str:
        return "".join(data.text or "" for data in outputs)

    expected = run_in_virtual_time(lambda: run([]), backend=backend)
    seen = run_in_virtual_time(lambda: run(plan), backend=backend)
    tokens = [[token_id for data in outputs for token_id in data.token_ids] for outputs in (expected, seen)]
    assert tokens[0] == tokens[1]
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == (expected[-1].finish_reason, expected[-1].stop_reason)
    assert text(seen) == text(expected)


async def one(engine: Any, answer: Sequence[int], ending: str, seed: int, delivered: list[int]) -> None:
    """Send one request, end it in that way at a random point, and note the tokens that were delivered."""
    request, rng = Context(request_for(answer)), Random(seed)
    by_reader = ending in ("stop", "kill")
    async with ended(request, "read" if by_reader else ending, 0, rng.random() * 3):
        stream = await engine.generate(request)
        await read(stream, ending, rng.randrange(6), request, lambda item: delivered.extend(tokens_of(item)))


def tokens_of(item: Annotated[LLMEngineOutput]) -> list[int]:
    return [] if item.data is None else item.data.token_ids


@given(
    answer=answers,
    seed=st.integers(0, 1000),
    plan=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["raises", "error item", "refuses", "stalls"])), max_size=5
    ),
    ending=st.sampled_from(ENDINGS),
    backend=BACKENDS,
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
def test_however_a_request_ends_nothing_stays_open_and_no_token_is_repeated(
    answer: list[int], seed: int, plan: list[Any], ending: str, backend: Any
) -> None:
    async def run() -> list[int]:
        engine = RandomWorker(answer, seed, plan)
        delivered: list[int] = []
        async with all_closed() as tasks:
            tasks.start_soon(one, Migration(3) >> engine, answer, ending, seed, delivered)
        assert engine.open == 0
        return delivered

    delivered = run_in_virtual_time(run, backend=backend)
    assert delivered == answer[: len(delivered)]


# -- the contracts

ITEMS: list[Any] = [Annotated(LLMEngineOutput([n])) for n in range(40)]


async def test_the_operator_contract_without_retries() -> None:
    await check_operator(lambda: Migration(0), request=PreprocessedRequest([1]), items=ITEMS)


async def test_the_operator_contract_with_retries() -> None:
    await check_operator(lambda: Migration(3), request=PreprocessedRequest([1]), items=ITEMS)


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("how", ["disconnect_after", "error_after", "fail_to_connect"])
async def test_the_engine_contract_holds_across_a_migration(how: str, after: int) -> None:
    def fault(context: Context[PreprocessedRequest]) -> Fault | None:
        payload = context.payload
        if len(payload.token_ids) > 1 or payload.migration_state is None or context.id in seen:
            return None
        seen.add(context.id)
        if how == "fail_to_connect":
            return Fault(fail_to_connect=True)
        facts: dict[str, Any] = {how: after, "error": StreamIncomplete("gone")}
        return Fault(**facts)

    def script(payload: PreprocessedRequest) -> list[Any]:
        if payload.model == "wrong":
            return [Fail(InvalidArgument("wrong"))]
        return ITEMS[len(payload.token_ids) - 1 :]

    seen: set[str] = set()
    await check_engine(
        lambda: link(Migration(3), Faults(plan=fault), ScriptedEngine(script)),
        request=PreprocessedRequest([1]),
        expected=ITEMS,
        bad_request=PreprocessedRequest([1], model="wrong"),
        open_count=lambda graph: graph.stages[-1].open,
    )
    assert seen
