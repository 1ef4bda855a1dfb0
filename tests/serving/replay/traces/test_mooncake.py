"""The rows of Mooncake traces, and all problems of a line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay.traces import AGENTIC_FIELDS, read_row

PLAIN: dict[str, Any] = {"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def problems(value: Any, **kwargs: bool) -> list[str]:
    with pytest.raises(InvalidArgument) as caught:
        read_row(value, **kwargs)
    return str(caught.value).split("; ")


def test_a_row_has_lengths_ids_and_arrival() -> None:
    row = read_row(PLAIN)
    assert (list(row.turn.prompt.hash_ids), row.turn.prompt.tokens) == ([3, 4], 700)
    assert (row.turn.output_tokens, row.timestamp_ms) == (5, 27.0)


def test_aliases_are_the_names_themselves() -> None:
    aliased = {"created_time": 27, "input_tokens": 700, "output_tokens": 5, "hash_ids": [3, 4], "delay_ms": 2.5}
    assert read_row(aliased) == read_row({**PLAIN, "delay": 2.5})


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("timestamp", "created_time"),
        ("input_length", "input_tokens"),
        ("output_length", "output_tokens"),
        ("delay", "delay_ms"),
    ],
)
def test_a_name_and_its_alias_at_once_are_wrong(name: str, alias: str) -> None:
    assert problems({**PLAIN, name: 1, alias: 1}) == [f"{name} comes twice, also as {alias}"]


def test_null_is_the_same_as_absent() -> None:
    optional = ("input_length", "timestamp", "session_id", "delay", "priority", "output_token_ids", "wait_for")
    assert read_row({**PLAIN, "timestamp": None, "input_length": None} | dict.fromkeys(optional)) == read_row(
        {"output_length": 5, "hash_ids": [3, 4]}
    )


def test_router_hints_and_recorded_outputs_are_read() -> None:
    row = read_row(
        {
            **PLAIN,
            "priority": -2,
            "strict_priority": 3,
            "policy_class": "batch",
            "request_id": " r ",
            "output_length": 2,
            "output_token_ids": [8, 9],
        }
    )
    assert (row.turn.priority, row.turn.strict_priority, row.turn.policy_class) == (-2, 3, "batch")
    assert row.request_id == "r"
    assert row.turn.recorded is not None
    assert list(row.turn.recorded) == [8, 9]


def test_agentic_fields_are_read_where_they_belong() -> None:
    row = read_row(
        {**PLAIN, "request_id": "b", "wait_for": ["a"], "tool_wait_ms": 5, "branches": ["c"], "prefix_reset": True},
        agentic=True,
    )
    assert (row.turn.wait_for, row.tool_wait_ms) == (("a",), 5.0)


@pytest.mark.parametrize("name", AGENTIC_FIELDS)
def test_a_plain_row_with_an_agentic_field_is_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {"wait_for": ["a"], "branches": ["a"], "tool_wait_ms": 1, "prefix_reset": True}
    assert problems({**PLAIN, name: given[name]}) == [f"{name} is of the format agentic_mooncake"]
    assert read_row({**PLAIN, name: type(given[name])()}) == read_row(PLAIN)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hash_ids": None}, "hash_ids is missing"),
        ({"hash_ids": []}, "hash_ids is empty"),
        ({"hash_ids": 7}, "hash_ids is 7, not a list"),
        ({"hash_ids": [1, -1]}, "hash_ids[1] is -1, not a whole number between 0 and 4294967295"),
        ({"hash_ids": [2**32]}, "hash_ids[0] is 4294967296, not a whole number between 0 and 4294967295"),
        ({"hash_ids": [True]}, "hash_ids[0] is True, not a whole number between 0 and 4294967295"),
        (
            {"hash_ids": [0, 0.5, "x"]},
            "hash_ids[1] is 0.5, not a whole number between 0 and 4294967295, and 1 more are wrong",
        ),
        ({"output_length": None}, "output_length is missing"),
        ({"output_length": 1.5}, "output_length is 1.5, not a whole number between 0 and 4294967295"),
        ({"input_length": 0}, "input_length is 0, not a whole number between 1 and 4294967295"),
        ({"timestamp": -1}, "timestamp is -1, not a number from 0 on"),
        ({"timestamp": 10**400}, f"timestamp is {str(10**40)[:40]}..., not a number from 0 on"),
        ({"timestamp": float("inf")}, "timestamp is inf, not a number from 0 on"),
        ({"timestamp": "now"}, "timestamp is 'now', not a number from 0 on"),
        ({"timestamp": True}, "timestamp is True, not a number from 0 on"),
        ({"delay": float("nan")}, "delay is nan, not a number from 0 on"),
        ({"session_id": 5}, "session_id is 5, not a text"),
        ({"output_token_ids": [1]}, "output_length is 5, there are 1 output_token_ids"),
        ({"output_token_ids": []}, "output_token_ids is empty, a recorded output has at least one token"),
    ],
)
def test_an_invalid_field_is_reported(change: dict[str, Any], problem: str) -> None:
    assert problems({**PLAIN, **change}) == [problem]


def test_all_problems_of_a_line_are_reported_at_once() -> None:
    assert problems({"timestamp": -1, "hash_ids": [-1], "session_id": 4}) == [
        "hash_ids[0] is -1, not a whole number between 0 and 4294967295",
        "output_length is missing",
        "timestamp is -1, not a number from 0 on",
        "session_id is 4, not a text",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"request_id": None}, "request_id is missing"),
        ({"request_id": "a", "wait_for": ["a"]}, "it waits for itself"),
        ({"delay": 5}, "delay and tool_wait_ms are of rows that wait for others"),
        ({"wait_for": "a"}, "wait_for is not a list of names"),
        ({"prefix_reset": 1}, "prefix_reset is 1, not true or false"),
    ],
)
def test_an_invalid_field_of_an_agentic_row_is_reported(change: dict[str, Any], problem: str) -> None:
    assert problems({**PLAIN, "request_id": "r", **change}, agentic=True) == [problem]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists, max_leaves=4))
def test_a_value_that_is_not_an_object_is_refused(value: Any) -> None:
    (problem,) = problems(value)
    assert problem.startswith("it is ")


@given(st.dictionaries(st.sampled_from([*PLAIN, *AGENTIC_FIELDS, "delay"]), st.none() | st.integers() | st.text()))
def test_any_object_is_a_row_or_is_refused_with_its_problems(value: dict[str, Any]) -> None:
    for agentic in (False, True):
        try:
            outcome = bool(read_row(value, agentic=agentic).turn.prompt.hash_ids)
        except InvalidArgument as error:
            outcome = bool(str(error))
        assert outcome
