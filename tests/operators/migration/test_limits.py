"""Limits of Migration: attempts, length, and the requests, errors and answers that are not continued."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from attrs import evolve

from operators import Migration
from pipeline import (
    Annotated,
    AsyncEngine,
    CannotConnect,
    Context,
    ContractViolation,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    ResponseStream,
    StreamIncomplete,
)
from pipeline.errors import BackendUnknown, chain
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    GuidedDecodingOptions,
    LLMEngineOutput,
    RoutingHints,
    SamplingOptions,
)
from pipeline.testing import Fail, Fault, ScriptedEngine
from tests.operators.migration.worlds import ALL, GONE, REFUSED, World, broken, healthy, make_request, output, receive

BUG = BackendUnknown("bug")


# -- limits


async def test_a_dispatch_that_always_fails_raises_the_last_error() -> None:
    world = World(REFUSED)
    seen = await world.collect()
    assert isinstance(seen.raised, CannotConnect)
    assert (len(world.attempts), world.recorded.counts()) == (4, (4, 0))
    assert world.recorded.durations() == {("new_request", "failure"): 1}


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        pytest.param([REFUSED], "fails after 0 tokens and 4 attempts: CannotConnect", id="never taken"),
        pytest.param([broken(3), REFUSED], "fails after 3 tokens and 4 attempts: CannotConnect", id="not continued"),
        pytest.param([broken(1)] * 4, "fails after 4 tokens and 4 attempts: Disconnected", id="always broken"),
        pytest.param([broken(1), broken(1), broken(1), None], None, id="saved by the last attempt"),
        pytest.param([Fault(error_after=2, error=BUG)], None, id="no attempt would help"),
    ],
)
async def test_a_request_that_has_used_all_attempts_is_logged_once(
    faults: list[Fault | None], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    await World(*faults).collect()
    found = [one.message for one in caplog.records if "attempts" in one.message]
    assert [line in one for one in found if line is not None] == ([True] if line else [])
    assert line is not None or not found


async def test_an_answer_no_worker_continues_ends_with_the_error_that_broke_it() -> None:
    world = World(broken(3), REFUSED)
    seen = await world.collect()
    assert seen.tokens == ALL[:3]
    assert isinstance(seen.raised, Disconnected)
    assert [type(link) for link in chain(seen.raised)] == [Disconnected, CannotConnect]
    assert (len(world.attempts), world.recorded.counts()) == (4, (3, 1))
    assert world.recorded.durations() == {("ongoing_request", "failure"): 1}


async def test_an_error_item_no_worker_continues_stays_an_item_with_the_reason() -> None:
    error = StreamIncomplete("gone")
    world = World(Fault(error_after=3, error=error), REFUSED)
    seen = await world.collect()
    assert (seen.tokens, seen.raised, seen.items[-1].event) == (ALL[:3], None, "error")
    assert [type(link) for link in chain(seen.items[-1].error)] == [StreamIncomplete, CannotConnect]
    assert error.__cause__ is None


async def test_the_limit_counts_attempts_of_the_request_in_total() -> None:
    world = World(broken(3), broken(0))
    seen = await world.collect()
    assert (seen.tokens, type(seen.raised), len(world.attempts)) == (ALL[:3], Disconnected, 4)
    assert world.recorded.counts() == (0, 3)
    assert world.recorded.durations() == {("ongoing_request", "success"): 3}


async def test_the_largest_limit_does_not_overflow() -> None:
    world = World(limit=2**32 - 1, script=[output(101)])
    assert ((await world.collect()).tokens, len(world.attempts)) == ([101], 1)


async def test_limit_0_hands_on_the_next_stage_s_own_stream() -> None:
    below = ScriptedEngine(healthy)
    made: list[ResponseStream[Any]] = []

    class Kept(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            made.append(await below.generate(request))
            return made[-1]

    async with await (Migration(0) >> Kept()).generate(Context(make_request())) as stream:
        assert stream is made[0]


async def test_limit_0_moves_nothing() -> None:
    world = World(broken(3), None, limit=0)
    seen = await world.collect()
    assert (seen.tokens, type(seen.raised), world.recorded.counts()) == (ALL[:3], Disconnected, (0, 0))


async def test_limit_0_counts_a_refused_dispatch_as_the_last_of_any_limit_does() -> None:
    world = World(REFUSED, limit=0)
    assert isinstance((await world.collect()).raised, CannotConnect)
    assert (world.recorded.counts(), world.recorded.durations()) == ((1, 0), {("new_request", "failure"): 1})
    wrong = World(limit=0)
    assert (await receive(wrong.migration >> ScriptedEngine([], fails=BUG), Context(make_request()))).raised is BUG
    assert (wrong.recorded.counts(), wrong.recorded.durations()) == ((0, 0), {})


@pytest.mark.parametrize("limit", [-1, 2**32])
def test_a_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Migration(limit)
    assert caught.value.field == "limit"


@pytest.mark.parametrize("length", [0, 2**32])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Migration(3, max_seq_len_tokens=length)
    assert caught.value.field == "max_seq_len_tokens"


@pytest.mark.parametrize(("cap", "moves", "too_long"), [(5, False, 1), (6, True, 1), (2, False, 1), (13, True, 0)])
async def test_a_sequence_longer_than_the_cap_stays_where_it_is(cap: int, moves: bool, too_long: int) -> None:
    world = World(broken(3), None, max_seq_len_tokens=cap)
    seen = await world.collect()
    assert seen.tokens == (ALL if moves else ALL[:3])
    assert isinstance(seen.raised, Disconnected) is not moves
    assert (world.recorded.too_long(), world.recorded.counts()) == (too_long, (0, int(moves)))


async def test_a_request_that_has_no_attempt_left_is_not_counted_as_too_long() -> None:
    world = World(broken(3), None, limit=1, max_seq_len_tokens=6)
    assert ((await world.collect()).tokens, world.recorded.too_long()) == (ALL, 0)


async def test_a_request_that_is_closed_when_it_has_grown_too_long_is_counted() -> None:
    world = World(max_seq_len_tokens=5)
    async with await world.graph.generate(Context(make_request())) as stream:
        for _ in range(3):
            await anext(stream)
    assert world.recorded.too_long() == 1


async def test_a_prompt_over_the_cap_may_still_be_dispatched_again() -> None:
    world = World(REFUSED, None, max_seq_len_tokens=2)
    assert (await world.collect()).tokens == ALL
    assert world.recorded.too_long() == 1


# -- what may not move


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_options": SamplingOptions(guided_decoding=GuidedDecodingOptions(regex="a*"))},
        {"sampling_options": SamplingOptions(n=2)},
        {"prompt_embeds": "AAAA"},
    ],
)
@pytest.mark.parametrize("fault", [broken(3), broken(0), REFUSED])
async def test_requests_that_cannot_be_continued_fail_with_their_worker(
    fields: dict[str, Any], fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """Guided decoding, several choices and prompt embeddings cannot be continued."""
    world = World(fault, None)
    seen = await world.collect(make_request(**fields))
    assert isinstance(seen.raised, CannotConnect if fault is REFUSED else Disconnected)
    assert (len(world.attempts), world.recorded.counts()) == (1, (int(fault is REFUSED), 0))
    assert [(one.levelname, "will not migrate" in one.message) for one in caplog.records] == [("WARNING", True)]


async def test_each_reason_not_to_migrate_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """With `n` above 1 there was a line for every request."""
    caplog.set_level(logging.DEBUG, logger="operators.migration.operator")
    world = World(None)
    for _ in range(3):
        await world.collect(make_request(sampling_options=SamplingOptions(n=2)))
        await world.collect(make_request(prompt_embeds="AAAA"))
    lines = [(one.levelname, "choices" in one.message) for one in caplog.records if "will not migrate" in one.message]
    assert lines == [("WARNING", True), ("WARNING", False), *[("DEBUG", True), ("DEBUG", False)] * 2]


@pytest.mark.parametrize("fault", [broken(3), REFUSED])
async def test_a_pinned_request_fails_with_its_worker(fault: Fault) -> None:
    world = World(fault, None)
    seen = await world.collect(make_request(routing=RoutingHints(backend_instance_id=7)))
    assert (len(world.attempts), world.recorded.counts()) == (1, (0, 0))
    assert isinstance(seen.raised, CannotConnect | Disconnected)


@pytest.mark.parametrize("error", [BackendUnknown("bug"), ResourceExhausted("busy"), InvalidArgument("no")])
async def test_errors_another_worker_would_make_too_go_to_the_caller_as_they_are(error: PenstockError) -> None:
    raised = await World(script=[output(101), Fail(error)]).collect()
    assert (raised.tokens, raised.raised) == ([101], error)
    world = World(Fault(error_after=1, error=error))
    seen = await world.collect()
    assert (seen.items[-1].error, len(world.attempts), world.recorded.durations()) == (error, 1, {})


async def test_an_error_finish_is_delivered_and_is_the_end() -> None:
    failed = Annotated(LLMEngineOutput.error("boom"))
    world = World(script=[output(101), failed])
    seen = await world.collect()
    assert (seen.items[-1], len(world.attempts)) == (failed, 1)


async def test_an_error_finish_with_a_typed_error_is_an_error_item() -> None:
    failed = evolve(Annotated(LLMEngineOutput.error("boom")), error=GONE)
    world = World(script=lambda payload: [output(101), failed] if len(payload.token_ids) == 3 else healthy(payload))
    assert (await world.collect()).tokens == ALL


async def test_a_break_behind_the_finish_reason_is_not_shown() -> None:
    world = World(script=[output(101, finish_reason=FinishReason.STOP), Fail(GONE)])
    seen = await world.collect()
    assert (seen.tokens, seen.finish, seen.raised, len(world.attempts)) == ([101], FinishReason.STOP, None, 1)
    apart = World(script=[output(101), Annotated(LLMEngineOutput.stop()), Fail(GONE)])
    assert ((await apart.collect()).raised, len(apart.attempts)) == (None, 1)


@pytest.mark.parametrize("fields", [{"text": "hello"}, {"disaggregated_params": {"a": 1}}])
async def test_an_answer_without_tokens_cannot_be_continued(fields: dict[str, Any]) -> None:
    world = World(script=[Annotated(LLMEngineOutput([], **fields)), Fail(GONE)])
    seen = await world.collect()
    assert (len(seen.items), type(seen.raised), len(world.attempts)) == (1, Disconnected, 1)


async def test_all_tokens_delivered_ends_with_length_instead_of_a_retry() -> None:
    world = World(script=[*(output(i, index=0) for i in ALL), Fail(GONE)])
    seen = await world.collect()
    assert (seen.tokens, seen.finish, seen.raised, len(world.attempts)) == (ALL, FinishReason.LENGTH, None, 1)
    assert type(seen.items[-1].data) is LLMEngineOutput
    assert (seen.items[-1].data.index, seen.items[-1].data.completion_usage) == (0, CompletionUsage.of(3, 10))


async def test_what_is_no_engine_output_is_named() -> None:
    seen = await World(script=[Annotated("text")]).collect()
    assert isinstance(seen.raised, ContractViolation)
