"""From the lines of a file to sessions of turns."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker import RecordedOutputs
from pipeline import InvalidArgument
from serving.replay import Prompt, Trace, Turn, first_requests, read_trace
from serving.replay.driver import recorded_outputs
from serving.replay.traces import TraceFormat

from ..worlds import TraceOf, row


def turns(trace: Trace) -> list[Turn]:
    return [turn for session in trace.sessions for turn in session.turns]


def test_a_line_without_session_is_a_session_named_after_it(trace_of: TraceOf) -> None:
    trace = trace_of(row(timestamp=5), row(timestamp=7, session_id="a"), row(timestamp=9))
    assert [session.session_id for session in trace.sessions] == ["request_1", "a", "request_3"]
    assert [session.arrival_ms for session in trace.sessions] == [5.0, 7.0, 9.0]


def test_a_session_without_name_is_never_one_with_a_name(trace_of: TraceOf) -> None:
    trace = trace_of(row(timestamp=1), row(timestamp=2, session_id="request_1"))
    assert [session.session_id for session in trace.sessions] == ["request_1_", "request_1"]


def test_lines_of_a_session_are_its_turns_and_their_distance_is_the_think_time(trace_of: TraceOf) -> None:
    (session,) = trace_of(row(session_id="s", timestamp=0), row(session_id="s", timestamp=100)).sessions
    assert [turn.delay_ms for turn in session.turns] == [0.0, 100.0]


def test_a_think_time_that_is_given_counts_more_than_timestamps(trace_of: TraceOf) -> None:
    (session,) = trace_of(
        row(session_id="s", timestamp=10),
        row(session_id="s", timestamp=100, delay=7),
        row(session_id="s"),
        row(session_id="s", timestamp=150),
    ).sessions
    assert session.arrival_ms == 10.0
    assert [turn.delay_ms for turn in session.turns] == [0.0, 7.0, 0.0, 50.0]


def test_a_first_turn_has_no_think_time(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument, match="line 1: delay is not allowed on the first turn of a session"):
        trace_of(row(session_id="s", timestamp=1, delay=5))
    assert trace_of(row(session_id="s", timestamp=1, delay=0)).requests == 1


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ({"timestamp": 60}, "timestamp 50 is before that of the turn before it"),
        ({}, "no turn before it has a timestamp, so its delay is not known"),
    ],
)
def test_a_turn_comes_after_the_one_before(trace_of: TraceOf, first: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"line 2: {problem}"):
        trace_of(row(session_id="s", **first), row(session_id="s", timestamp=50))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40), st.integers(1, 8))
def test_a_prompt_is_copies_of_its_ids_and_no_longer_than_they_cover(
    first: int, blocks: int, wanted: int, block_size: int
) -> None:
    ids = array("I", [(first + at) % 2**32 for at in range(blocks)])
    prompt = Prompt.of(ids, block_size, wanted)
    tokens = prompt.token_ids()
    assert len(tokens) == prompt.tokens == min(wanted, blocks * block_size)
    assert tokens == [ids[at // block_size] for at in range(len(tokens))]
    assert len(Prompt.of(ids, block_size).token_ids()) == blocks * block_size


def test_the_trace_block_size_defaults_to_512(trace_of: TraceOf) -> None:
    assert trace_of(row(input_length=1000, hash_ids=[1, 2])).input_tokens == 1000
    assert trace_of(row(input_length=1000, hash_ids=[1])).input_tokens == 512
    assert trace_of(row(input_length=1000, hash_ids=[1, 2]), trace_block_size=16).input_tokens == 32
    with pytest.raises(InvalidArgument, match="at least one token"):
        trace_of(row(), trace_block_size=0)


def test_every_bad_line_is_named_with_all_that_is_wrong(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument) as caught:
        trace_of(row(), "{", row(timestamp=-1, output_length=None), "", "[]")
    text = str(caught.value)
    assert "line 2: invalid JSON: " in text
    assert "line 3: output_length is missing; timestamp is -1" in text
    assert "line 5: it is [], not an object" in text
    assert "line 1" not in text
    assert caught.value.field == "trace"


def test_of_many_bad_lines_the_first_are_named(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument) as caught:
        trace_of(*["?"] * 30)
    assert "line 20:" in str(caught.value)
    assert "line 21:" not in str(caught.value)
    assert str(caught.value).endswith("and 10 more bad lines")


def test_bad_lines_are_skipped_and_counted_on_request(trace_of: TraceOf) -> None:
    trace = trace_of("?", row(session_id="s", timestamp=1), row(session_id="s", delay=-1), skip_bad=True)
    assert trace.requests == 1
    assert [str(bad) for bad in trace.skipped] == [
        "line 1: invalid JSON: invalid character (byte 0)",
        "line 3: delay is -1, not a number from 0 on",
    ]


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_an_error(trace_of: TraceOf, lines: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"there is no request$"):
        trace_of(*lines)


def test_a_file_of_bad_lines_only_is_an_error(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument, match="there is no request, 2 bad lines were left out"):
        trace_of("?", "!", skip_bad=True)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path, "a\0b"):
        with pytest.raises(InvalidArgument, match=r"cannot read|is no path"):
            read_trace(path)


def test_names_are_the_request_id_else_session_and_turn_else_the_line(trace_of: TraceOf) -> None:
    trace = trace_of(
        row(session_id="s", timestamp=0),
        row(session_id="s", delay=1, request_id="mine"),
        row(session_id="s", delay=1),
        row(timestamp=3),
    )
    assert [turn.name for turn in turns(trace)] == ["s:0", "mine", "s:2", "line:3"]
    assert [turn.line for turn in turns(trace)] == [1, 2, 3, 4]


@pytest.mark.parametrize("other", [{"request_id": "a"}, {"request_id": "s:0"}, {"request_id": "line:1"}])
def test_no_two_requests_have_one_name(trace_of: TraceOf, other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"line 4: '.*' is the name of line \d already"):
        trace_of(row(request_id="a"), row(), row(session_id="s", timestamp=0), row(**other))


def test_recorded_outputs_are_found_by_the_names_of_the_turns(trace_of: TraceOf, tmp_path: Path) -> None:
    """The request id, else session and turn, else the line."""
    recorded = [
        row(output_token_ids=[1, 2]),
        row(session_id="s", timestamp=0),
        row(session_id="s", delay=1, output_token_ids=[3, 4]),
        row(request_id="r", output_token_ids=[5, 6]),
        "",
        row(output_token_ids=[7, 8]),
    ]
    trace = trace_of(*recorded)
    outputs = RecordedOutputs.load(tmp_path / "trace.jsonl").by_name
    known = {turn.name: list(turn.recorded) for turn in turns(trace) if turn.recorded is not None}
    assert known == {name: list(tokens) for name, tokens in outputs.items()}
    assert recorded_outputs(trace) is not None
    assert recorded_outputs(trace_of(row())) is None


def test_turns_keep_their_numbers_when_a_line_between_is_left_out(trace_of: TraceOf) -> None:
    trace = trace_of(
        row(session_id="s", timestamp=0), row(session_id="s", delay=-1), row(session_id="s", delay=1), skip_bad=True
    )
    assert [turn.name for turn in turns(trace)] == ["s:0", "s:2"]


def test_formats_that_are_not_known_are_refused_by_name(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument, match=r"must be one of mooncake, mooncake-delta, .*, got 'csv'"):
        trace_of(row(), trace_format="csv")
    with pytest.raises(InvalidArgument, match="has its own prefixes"):
        trace_of(row(), shared_prefix_ratio=0.5)


def test_a_delta_trace_has_the_same_rows(trace_of: TraceOf) -> None:
    assert trace_of(row(), trace_format="mooncake-delta").format is TraceFormat.MOONCAKE_DELTA


def test_a_trace_can_be_cut_to_its_first_requests(trace_of: TraceOf) -> None:
    trace = trace_of(row(session_id="s", timestamp=0), row(timestamp=1), row(session_id="s", delay=1), row(timestamp=2))
    assert [turn.name for turn in turns(first_requests(trace, 3))] == ["s:0", "s:1", "line:1"]
    assert first_requests(trace, 10) == trace
    assert first_requests(trace, 0).requests == 0
