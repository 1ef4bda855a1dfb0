"""The chunks an engine may yield, and the errors it becomes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from engines.chunks import ChunkContract, engine_error, extract_logprobs, is_cancellation
from pipeline import Cancelled, ContractViolation, Disconnected, EngineShutdown, InvalidArgument, StreamIncomplete
from pipeline.errors import BackendCancelled, BackendInvalidArgument, BackendUnknown, blames_worker, may_migrate
from pipeline.protocols import FinishReason, LLMEngineOutput, TopLogprob


def chunk(index: int | None = None, finish: FinishReason | None = None) -> LLMEngineOutput:
    return LLMEngineOutput([1], index=index, finish_reason=finish)


def last(index: int | None = None) -> LLMEngineOutput:
    return chunk(index, FinishReason.STOP)


def test_one_choice_ends_with_its_terminal_chunk() -> None:
    rules = ChunkContract()
    assert rules.is_single
    assert [rules.admit(each) for each in (chunk(), chunk(), last())] == [False, False, True]


def test_several_choices_end_one_by_one() -> None:
    rules = ChunkContract(3)
    assert not rules.is_single
    assert [rules.admit(each) for each in (chunk(0), last(1), chunk(0), last(0), chunk(2), last(2))] == [False] * 5 + [
        True
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12), st.integers(1, 4))
def test_a_choice_that_has_ended_yields_nothing_more(steps: list[tuple[int, bool]], choices: int) -> None:
    rules, ended = ChunkContract(choices), set[int]()
    for index, ends in ((index % choices, ends) for index, ends in steps):
        each = last(index) if ends else chunk(index)
        if index in ended:
            with pytest.raises(ContractViolation, match="L1") as caught:
                rules.admit(each)
            assert caught.value.rule == "L1"
            return
        if ends:
            ended.add(index)
        assert rules.admit(each) is (len(ended) == choices and ends)
        if len(ended) == choices:
            return


@pytest.mark.parametrize(("choices", "index"), [(1, 1), (2, 2), (2, -1)])
def test_a_choice_beyond_the_requested_ones_is_refused(choices: int, index: int) -> None:
    with pytest.raises(ContractViolation, match="L1: a chunk of choice"):
        ChunkContract(choices).admit(chunk(index))


def test_no_index_counts_as_the_first_choice() -> None:
    rules = ChunkContract(2)
    rules.admit(last())
    with pytest.raises(ContractViolation, match="choice 0"):
        rules.admit(chunk(0))


@pytest.mark.parametrize("item", [None, 7, {"token_ids": [1]}])
def test_a_value_that_is_not_a_chunk_is_refused(item: Any) -> None:
    with pytest.raises(ContractViolation, match=type(item).__name__):
        ChunkContract().admit(item)


@pytest.mark.parametrize(
    ("finish", "result", "is_fine"),
    [
        (FinishReason.STOP, {}, True),
        (FinishReason.STOP, {"a": 1}, True),
        (FinishReason.STOP, None, False),
        (FinishReason.LENGTH, [], False),
        (FinishReason.CANCELLED, None, True),
        (FinishReason.error("x"), None, True),
    ],
)
def test_an_encode_worker_ends_with_its_result(finish: FinishReason, result: Any, is_fine: bool) -> None:
    ended = LLMEngineOutput([], finish_reason=finish, encoder_result=result)
    assert ChunkContract().admit(ended)
    if is_fine:
        assert ChunkContract(encodes=True).admit(ended)
    else:
        with pytest.raises(ContractViolation, match="encoder_result"):
            ChunkContract(encodes=True).admit(ended)


def test_a_stream_that_just_ends_is_incomplete_and_may_go_on_elsewhere() -> None:
    with pytest.raises(StreamIncomplete) as caught:
        ChunkContract().cut_short(stopped=False)
    assert isinstance(caught.value.__cause__, ContractViolation)
    assert may_migrate(caught.value)
    assert blames_worker(caught.value)


def test_an_engine_that_is_done_with_fewer_choices_would_be_no_better_elsewhere() -> None:
    rules = ChunkContract(3)
    rules.admit(chunk(1))
    rules.admit(last(1))
    with pytest.raises(ContractViolation, match="1 of 3 choices") as caught:
        rules.cut_short(stopped=False)
    assert not may_migrate(caught.value)
    assert not blames_worker(caught.value)
    rules.admit(chunk(0))
    with pytest.raises(StreamIncomplete):
        rules.cut_short(stopped=False)


def test_after_a_stop_a_stream_that_just_ends_is_cancelled() -> None:
    assert ChunkContract().cut_short(stopped=True) == LLMEngineOutput.cancelled()


def test_one_cancelled_choice_ends_all_choices_after_a_stop() -> None:
    rules = ChunkContract(2)
    assert not rules.admit(chunk(0, FinishReason.CANCELLED))
    assert rules.cut_short(stopped=True) is None
    rules = ChunkContract(2)
    rules.admit(last(0))
    assert rules.cut_short(stopped=True) == LLMEngineOutput.cancelled()


@pytest.mark.parametrize("error", [InvalidArgument("no"), EngineShutdown("gone"), Disconnected("lost")])
def test_an_error_of_ours_stays_as_it_is(error: Any) -> None:
    assert engine_error(error) is error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no such tool"), BackendInvalidArgument, "no such tool"),
        (TypeError("not a list"), BackendInvalidArgument, "not a list"),
        (KeyError("slot"), BackendUnknown, "'slot'"),
        (OSError(), BackendUnknown, "OSError"),
    ],
)
def test_a_foreign_error_becomes_a_backend_error_with_it_as_cause(error: Exception, kind: type, text: str) -> None:
    found = engine_error(error)
    assert (type(found), str(found)) == (kind, text)
    assert found.__cause__ is error


def test_an_engine_may_report_a_request_as_cancelled() -> None:
    assert is_cancellation(Cancelled())
    assert is_cancellation(BackendCancelled())
    assert not is_cancellation(EngineShutdown())


# -- log probabilities


@frozen
class Info:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@frozen
class Bare:
    logprob: float


POSITIONS = [{7: Info(-0.5, 2, "a"), 8: Info(-0.1, 1, "b")}, {9: Info(-1, 1)}]


def test_each_token_has_its_own_log_probability_and_its_candidates_by_likelihood() -> None:
    chosen, top = extract_logprobs(POSITIONS, [7, 9])
    assert chosen == [-0.5, -1.0]
    assert top == [[TopLogprob(1, 8, -0.1, "b"), TopLogprob(2, 7, -0.5, "a")], [TopLogprob(1, 9, -1.0)]]


def test_tokens_emitted_before_are_left_out() -> None:
    assert extract_logprobs(POSITIONS, [7, 9], emitted_tokens=1) == ([-1.0], [[TopLogprob(1, 9, -1.0)]])


@pytest.mark.parametrize(
    ("positions", "token_ids"),
    [
        (POSITIONS, [7, 5]),
        (POSITIONS, [5, 9]),
        ([POSITIONS[0], None], [7, 9]),
        ([POSITIONS[0], -0.5], [7, 9]),
        (POSITIONS[:1], [7, 9]),
        (POSITIONS, [7]),
        ([-0.5], [7, 9]),
        ([], []),
        (None, [7]),
    ],
)
def test_one_missing_log_probability_drops_them_all(positions: Any, token_ids: list[int]) -> None:
    assert extract_logprobs(positions, token_ids) == (None, None)


def test_plain_numbers_have_no_candidates() -> None:
    assert extract_logprobs([-0.5, -1], [7, 9]) == ([-0.5, -1.0], None)


def test_a_rank_that_is_not_given_is_the_place_by_likelihood() -> None:
    _, top = extract_logprobs([{1: Bare(-3.0), 2: Bare(-1.0), 3: Bare(-2.0)}], [1])
    assert top == [[TopLogprob(1, 2, -1.0), TopLogprob(2, 3, -2.0), TopLogprob(3, 1, -3.0)]]


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3))), max_size=6), st.integers(0, 6))
def test_there_is_one_entry_for_each_new_token_or_nothing(steps: list[tuple[int, set[int]]], emitted: int) -> None:
    tokens = [token for token, _ in steps]
    chosen, top = extract_logprobs([{t: Bare(-float(t)) for t in known} for _, known in steps], tokens, emitted)
    new = steps[emitted:]
    if new and all(token in known for token, known in new):
        assert chosen == [-float(token) for token, _ in new]
        assert top is not None
        assert [{candidate.token_id for candidate in entry} for entry in top] == [known for _, known in new]
    else:
        assert (chosen, top) == (None, None)
