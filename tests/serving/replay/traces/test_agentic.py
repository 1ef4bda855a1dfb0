"""Rows that wait for each other, and sessions that are given by their lengths."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import InvalidArgument
from serving.replay import first_requests

from ..worlds import TraceOf


def row(name: str, *wait_for: str, **fields: Any) -> dict[str, Any]:
    return {"request_id": name, "hash_ids": [1], "output_length": 2, "wait_for": list(wait_for), **fields}


def test_each_row_is_a_session_of_one_turn_with_both_its_delays(trace_of: TraceOf) -> None:
    trace = trace_of(
        row("a", timestamp=9, session_id="s"),
        row("b", "a", "a", delay=3, tool_wait_ms=4, session_id="s"),
        row("c"),
        trace_format="agentic_mooncake",
    )
    a, b, c = trace.sessions
    assert (a.session_id, a.arrival_ms, b.session_id, b.arrival_ms) == ("s", 9.0, "s", None)
    assert (b.turns[0].wait_for, b.turns[0].delay_ms) == (("a",), 7.0)
    assert (c.session_id, c.arrival_ms) == ("request_3", 0.0)


def test_rows_may_wait_for_later_ones(trace_of: TraceOf) -> None:
    assert trace_of(row("a", "b"), row("b"), trace_format="agentic_mooncake").requests == 2


def test_rows_that_can_never_begin_are_bad_lines(trace_of: TraceOf) -> None:
    rows = [row("a"), row("b", "c"), row("c", "b"), row("d", "nobody"), row("e", "d")]
    with pytest.raises(InvalidArgument) as caught:
        trace_of(*rows, trace_format="agentic_mooncake")
    text = str(caught.value)
    assert "line 2: it waits for 'c' of line 3, which never ends" in text
    assert "line 3: it waits for 'b' of line 2, which never ends" in text
    assert "line 4: it waits for 'nobody', which is no request of this trace" in text
    assert "line 5: it waits for 'd' of line 4, which never ends" in text
    trace = trace_of(*rows, trace_format="agentic_mooncake", skip_bad=True)
    assert [session.turns[0].name for session in trace.sessions] == ["a"]
    assert [bad.line for bad in trace.skipped] == [2, 3, 4, 5]
    trace = trace_of(row("a"), row("b", "c"), "?", trace_format="agentic_mooncake", skip_bad=True)
    assert [bad.line for bad in trace.skipped] == [2, 3]


def test_a_chain_of_ten_thousand_is_no_problem(trace_of: TraceOf) -> None:
    rows = [row("0"), *(row(str(at), str(at - 1)) for at in range(1, 10_000))]
    assert trace_of(*rows, trace_format="agentic_mooncake").requests == 10_000


APPLIED: dict[str, Any] = {
    "num_turns": 2,
    "input_prompt_length": 10,
    "assistant_response_length": [3, 4],
    "tool_call_output_length": [5, 6],
    "tool_call_latency": [0.5, 2],
    "final_assistant_response_length": 7,
}


def test_a_line_of_lengths_is_a_session_whose_prompts_grow(trace_of: TraceOf) -> None:
    trace = trace_of(APPLIED, trace_format="applied_compute_agentic", trace_block_size=4)
    (session,) = trace.sessions
    assert session.arrival_ms is None
    assert [(turn.prompt.tokens, turn.output_tokens, turn.delay_ms) for turn in session.turns] == [
        (10, 3, 0.0),
        (18, 4, 500.0),
        (28, 7, 2000.0),
    ]
    prompts = [turn.prompt.token_ids() for turn in session.turns]
    assert prompts[1][:8] == prompts[0][:8]
    assert prompts[2][:16] == prompts[1][:16]


def test_sessions_share_the_first_part_of_their_first_prompt_within_a_group(trace_of: TraceOf) -> None:
    settings = {"trace_format": "applied_compute_agentic", "trace_block_size": 2}
    trace = trace_of(*[APPLIED] * 4, **settings, shared_prefix_ratio=0.5, num_prefix_groups=2)
    ids = [list(session.turns[-1].prompt.hash_ids) for session in trace.sessions]
    assert ids[0][:3] == ids[2][:3]
    assert ids[1][:3] == ids[3][:3]
    assert len({one for each in ids for one in each}) == 4 * 14 - 2 * 3


def test_all_problems_of_a_line_of_lengths_are_reported(trace_of: TraceOf) -> None:
    bad = {**APPLIED, "num_turns": 1, "tool_call_latency": [-1], "final_assistant_response_length": None}
    with pytest.raises(InvalidArgument) as caught:
        trace_of(bad, trace_format="applied_compute_agentic")
    assert str(caught.value).partition("line 1: ")[2].split("; ") == [
        "final_assistant_response_length is missing",
        "tool_call_latency is not a list of numbers from 0 on",
        "assistant_response_length has 2 items, num_turns is 1",
        "tool_call_output_length has 2 items, num_turns is 1",
    ]
    with pytest.raises(InvalidArgument, match="line 1: it is 5, not an object"):
        trace_of("5", trace_format="applied_compute_agentic")


def test_a_cut_trace_leaves_out_requests_that_wait_for_a_cut_one(trace_of: TraceOf) -> None:
    trace = trace_of(row("a", "b"), row("b"), row("c", "d"), row("d"), row("e", "c"), trace_format="agentic_mooncake")
    names = [session.turns[0].name for session in first_requests(trace, 3).sessions]
    assert names == ["a", "b"]
    assert first_requests(trace, 5) == trace
