"""Dependencies of requests with agent context in a trace of Dynamo's front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline import InvalidArgument
from serving.replay import Schedule, Trace

Read = Callable[..., Trace]
SCHEMA = "dynamo.request.trace.v1"


def request(name: str, start: int, end: int, session: str | None, parent: str | None = None) -> dict[str, Any]:
    replay = {"trace_block_size": 2, "input_length": 2, "input_sequence_hashes": [1]}
    request = {"request_id": name, "request_received_ms": start, "output_tokens": 5, "replay": replay}
    record = {"schema": SCHEMA, "event_type": "request_end", "event_time_unix_ms": end, "request": request}
    return record | {"agent_context": session and {"session_id": session, "parent_session_id": parent}}


def tool(session: str, source: str, consumer: str | None, child: str, mode: str = "blocking") -> dict[str, Any]:
    claude = {"source_request_id": source, "consumer_request_id": consumer, "child_session_id": child}
    record = {"schema": SCHEMA, "event_type": "tool_end", "event_time_unix_ms": 9}
    called = {"tool_call_id": "call", "tool_class": "Agent", "claude": claude | {"execution_mode": mode}}
    return record | {"agent_context": {"session_id": session}, "tool": called}


@pytest.fixture
def read(trace_of: Read) -> Read:
    return lambda *rows, **settings: trace_of(*rows, trace_format="dynamo", **settings)


def waits(trace: Trace) -> dict[str, tuple[tuple[str, ...], float]]:
    turns = [turn for session in trace.sessions for turn in session.turns]
    return {turn.name: (turn.wait_for, turn.delay_ms) for turn in turns if turn.wait_for}


def test_requests_of_a_session_follow_each_other_with_their_distance(read: Read) -> None:
    trace = read(
        request("b", 1_300, 1_400, "s"),
        request("a", 1_000, 1_100, "s"),
        request("c", 1_350, 1_500, "s"),
        request("z", 1_200, 1_300, "t"),
    )
    assert waits(trace) == {"b": (("a",), 200.0), "c": (("b",), 0.0)}
    assert [(one.session_id, one.arrival_ms) for one in trace.sessions] == [
        ("s", 0.0),
        ("t", 200.0),
        ("s", None),
        ("s", None),
    ]


def test_a_child_waits_for_its_caller_and_its_parent_waits_for_it(read: Read) -> None:
    trace = read(
        request("parent 1", 1_000, 1_100, "root"),
        request("child 1", 1_200, 1_300, "child", "root"),
        request("parent 2", 1_500, 1_600, "root"),
    )
    assert waits(trace) == {"child 1": (("parent 1",), 100.0), "parent 2": (("parent 1", "child 1"), 200.0)}


def test_a_parent_waits_for_the_child_that_ends_last(read: Read) -> None:
    trace = read(
        request("parent 1", 1_000, 1_100, "root"),
        request("slow", 1_200, 1_900, "child", "root"),
        request("fast", 1_300, 1_400, "child", "root"),
        request("parent 2", 1_500, 1_600, "root"),
        request("parent 3", 2_000, 2_100, "root"),
    )
    assert waits(trace)["parent 2"][0] == ("parent 1",)
    assert waits(trace)["parent 3"] == (("parent 2", "slow"), 100.0)


def test_a_child_whose_parent_is_not_in_the_trace_begins_when_it_did(read: Read) -> None:
    trace = read(request("a", 10, 20, "x"), request("b", 50, 60, "child", "elsewhere"))
    assert [one.arrival_ms for one in trace.sessions] == [0.0, 40.0]


def test_a_tool_names_the_caller_of_a_child_and_the_consumer_of_its_result(read: Read) -> None:
    """The parent continues meanwhile."""
    rows = (
        request("parent 1", 1_000, 1_100, "root"),
        request("child 1", 1_350, 1_700, "child", "root"),
        request("parent 2", 1_300, 1_400, "root"),
        request("parent 3", 1_720, 1_800, "root"),
        request("parent 4", 1_850, 1_950, "root"),
    )
    assert waits(read(*rows))["child 1"][0] == ("parent 2",)
    found = waits(read(*rows, tool("root", "parent 1", "parent 4", "child", "background")))
    assert found["child 1"] == (("parent 1",), 250.0)
    assert found["parent 3"][0] == ("parent 2",)
    assert found["parent 4"] == (("parent 3", "child 1"), 50.0)
    without_end = waits(read(*rows, tool("root", "parent 1", None, "child", "background")))
    assert without_end["parent 4"][0] == ("parent 3",)
    assert waits(read(*rows, tool("root", "parent 1", "parent 2", "not in the trace"))) == waits(read(*rows))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (tool("root", "nobody", None, "child"), "'nobody' is no request of this trace"),
        (tool("root", "p1", "nobody", "child"), "'nobody' is no request of this trace"),
        (tool("root", "c1", None, "child"), "request 'c1' is of session 'child', not of 'root'"),
        (tool("child", "c1", None, "child"), "session 'child' is of 'root'"),
        (tool("root", "p2", None, "child"), "another tool has begun session 'child' already"),
    ],
)
def test_an_invalid_tool_is_a_bad_line(read: Read, wrong: dict[str, Any], problem: str) -> None:
    rows = (
        request("p1", 1_000, 1_100, "root"),
        request("c1", 1_200, 1_300, "child", "root"),
        request("p2", 1_500, 1_600, "root"),
        tool("root", "p1", "p2", "child"),
    )
    with pytest.raises(InvalidArgument, match=f"line 5: {problem}"):
        read(*rows, wrong)
    assert read(*rows, wrong, skip_bad=True).sessions == read(*rows).sessions


def test_a_session_has_one_parent(read: Read) -> None:
    child = request("b", 0, 1, "child", "other")
    with pytest.raises(InvalidArgument, match="line 2: parent_session_id is 'other', that of its session is 'root'"):
        read(request("a", 0, 1, "child", "root"), child)


def test_requests_that_wait_in_a_circle_are_bad_lines(read: Read) -> None:
    rows = (
        request("p1", 1_000, 1_100, "root"),
        request("c1", 1_200, 1_300, "child", "root"),
        request("p2", 1_400, 1_500, "root"),
        tool("root", "p2", "p1", "child"),
        request("other", 1_000, 1_100, "other"),
    )
    with pytest.raises(InvalidArgument) as caught:
        read(*rows)
    for line in (1, 2, 3):
        assert f"line {line}: it waits in a circle, or for one that does" in str(caught.value)
    assert [one.session_id for one in read(*rows, skip_bad=True).sessions] == ["other"]


def test_agents_have_an_order_already_and_others_may_come_so_many_at_a_time(read: Read) -> None:
    agents = read(request("a", 0, 1, "s"), request("b", 5, 6, "s"))
    with pytest.raises(InvalidArgument, match="have an order already"):
        Schedule.closed_loop(agents, 1)
    assert Schedule.closed_loop(read(request("a", 0, 1, None)), 1).next_due_ms() == 0.0
