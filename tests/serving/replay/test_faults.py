"""Fault scripts: sentences and files, and the plan of their faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Action, Fault, Role, RollingRestart, parse_faults, plan_faults
from serving.replay.faults import parse_fault, read_faults

DIES, LEAVES, RETURNS = Action.DIES, Action.LEAVES, Action.RETURNS
_WORDS = ("worker", "3", "all", "dies", "restarts", "at", "120", "s", "every", "down", ",", "prefill", "5ms")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker 3 dies at 120 s, returns at 300 s", [(120_000, 3, DIES), (300_000, 3, RETURNS)]),
        ("3 dies 120", [(120_000, 3, DIES)]),
        ("kill worker 3 at 120", [(120_000, 3, DIES)]),
        ("Kill worker 3 at 2m and start at 300", [(120_000, 3, DIES), (300_000, 3, RETURNS)]),
        ("drain 0 at 250ms", [(250, 0, LEAVES)]),
        ("worker 1 leaves after 0.5 h", [(1_800_000, 1, LEAVES)]),
        ("1 restarts at 60, down 5 s", [(60_000, 1, LEAVES), (65_000, 1, RETURNS)]),
        ("1 restarts at 60", [(60_000, 1, LEAVES), (70_000, 1, RETURNS)]),
        (
            "worker 1 restarts at 60, restarts at 600, down 1",
            [(60_000, 1, LEAVES), (600_000, 1, LEAVES), (61_000, 1, RETURNS), (601_000, 1, RETURNS)],
        ),
        ("kill worker 1 at 5, kill worker 2 at 6", [(5000, 1, DIES), (6000, 2, DIES)]),
    ],
)
def test_a_sentence_describes_the_faults_of_a_worker(text: str, expected: list[tuple[float, int, Action]]) -> None:
    assert parse_fault(text) == [Fault(*one) for one in expected]


def test_a_worker_may_be_one_that_prefills() -> None:
    for text in ("prefill worker 2 dies at 1", "kill prefill 2 at 1"):
        assert parse_fault(text) == [Fault(1000, 2, DIES, "prefill")]


def test_all_workers_restart_one_after_the_other() -> None:
    for text in ("all restart at 600 s every 30 s down 5 s", "restart all at 10 m, every 30, down 5"):
        (rolling,) = parse_fault(text)
        assert rolling == RollingRestart(600_000, 30_000, 5000)
    assert plan_faults([rolling], workers=2) == (
        Fault(600_000, 0, LEAVES),
        Fault(605_000, 0, RETURNS),
        Fault(630_000, 1, LEAVES),
        Fault(635_000, 1, RETURNS),
    )
    (rolling,) = parse_fault("all prefill workers restart at 1 every 1")
    assert rolling == RollingRestart(1000, 1000, 10_000, "prefill")
    assert plan_faults([rolling], workers=2) == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is empty"),
        ("worker 3", "nothing happens"),
        ("worker 3 dies", "'dies' needs one time, there are 0"),
        ("worker 3 dies at 1 2", "'dies' needs one time, there are 2"),
        ("worker 3 explodes at 1", "'explodes' says nothing"),
        ("worker 3 dies at 1 parsec", "'parsec' says nothing"),
        ("worker 3 dies at -1", "'-1' says nothing"),
        ("dies at 1 s", "no worker is named"),
        ("all die at 1", "all can only restart, not 'die'"),
        ("all restart at 1", "it does not say how long after each other they restart ('every 30 s')"),
        ("3 dies at 1 every 5", "'every' is for all workers"),
        ("3 dies at 1, down 5", "'down' is for a restart"),
    ],
)
def test_an_invalid_sentence_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_fault(text, "fault 7")
    assert str(caught.value).startswith(f"fault 7: {problem}; write it as ")
    assert caught.value.field == "fault"


@given(st.text(max_size=30) | st.lists(st.sampled_from(_WORDS)).map(" ".join))
def test_any_text_is_faults_or_an_error_that_names_it(text: str) -> None:
    try:
        found = bool(parse_fault(text, "here"))
    except InvalidArgument as error:
        found = str(error).startswith("here: ")
    assert found


def test_a_script_is_a_sentence_a_line(tmp_path: Path) -> None:
    script = tmp_path / "faults.txt"
    script.write_text("# a bad day\n\n3 dies 120  # first\nprefill 0 leaves at 5\n")
    assert read_faults(script) == [Fault(120_000, 3, DIES), Fault(5000, 0, LEAVES, "prefill")]
    script.write_text("3 dies 120\n3 sleeps 5\n")
    with pytest.raises(InvalidArgument, match=f"{re.escape(str(script))} line 2: 'sleeps' says nothing"):
        read_faults(script)
    with pytest.raises(InvalidArgument, match=r"none\.txt: cannot be read"):
        read_faults(tmp_path / "none.txt")


def test_a_script_may_be_tables(tmp_path: Path) -> None:
    script = tmp_path / "faults.toml"
    script.write_text(
        "[[fault]]\nworker = 3\ndies = 120\nreturns = '5 m'\n\n"
        "[[fault]]\nworker = 'all'\nrole = 'prefill'\nrestarts = 600\nevery = 30.5\ndown = 5\n"
    )
    assert read_faults(script) == [
        Fault(120_000, 3, DIES),
        Fault(300_000, 3, RETURNS),
        RollingRestart(600_000, 30_500, 5000, "prefill"),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[fault]]\ndies = 1", "fault 1: worker is a number from 0 on or 'all', not None"),
        ("[[fault]]\nworker = -1\ndies = 1", "fault 1: worker is a number from 0 on or 'all', not -1"),
        ("[[fault]]\nworker = 1\ndies = [1]", "fault 1: [1] is no time"),
        ("[[fault]]\nworker = 1\ndies = '1, 2'", "fault 1: '1, 2' is no time"),
        ("[[fault]]\nworker = 1\n", "fault 1: nothing happens"),
        ("[[fault]]\nworker = 1\ndies = 'soon'", "fault 1: 'soon' says nothing"),
        ("[[fault]]\nworker = 1\nrole = 'cook'\ndies = 1", "fault 1: 'cook' says nothing"),
        ("[[fault]]\nworker = 1\nsleeps = 1", "fault 1: 'sleeps' is not one of "),
        ("fault = 1", "has other things than tables named [[fault]]"),
        ("fault = [1]", "fault 1: is not a table"),
        ("[other]", "has other things than tables named [[fault]]"),
        ("[[fault]", "is no TOML"),
    ],
)
def test_an_invalid_table_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    script = tmp_path / "faults.toml"
    script.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_faults(script)
    assert problem in str(caught.value)
    assert str(script) in str(caught.value)


def test_sentences_and_files_can_be_mixed(tmp_path: Path) -> None:
    script = tmp_path / "faults.txt"
    script.write_text("3 dies 120")
    assert parse_faults(["0 dies 1", f"@{script}"]) == [Fault(1000, 0, DIES), Fault(120_000, 3, DIES)]
    with pytest.raises(InvalidArgument, match=r"fault 2 \('x'\): 'x' says nothing"):
        parse_faults(["0 dies 1", "x"])


def test_a_plan_is_in_order_and_as_written_where_times_are_equal() -> None:
    script = [Fault(9, 0, DIES), Fault(5, 1, LEAVES), Fault(9, 0, RETURNS)]
    assert plan_faults(script, workers=2) == (script[1], script[0], script[2])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2 dies 1", "there is no worker 2: they are numbered from 0 to 1"),
        ("prefill 0 dies 1", "there is no prefill worker 0"),
        ("1 dies 1, dies 2", "worker 1 dies at 2 s, but is gone already"),
        ("1 returns 2", "worker 1 returns at 2 s, but is there"),
        ("1 dies 1, returns 2, returns 3", "worker 1 returns at 3 s, but is there"),
    ],
)
def test_an_invalid_plan_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan_faults(parse_faults([text]), workers=2)
    assert str(caught.value) == f"fault 1 ({text!r}): {problem}"


def test_a_fault_that_no_one_wrote_has_no_place() -> None:
    with pytest.raises(InvalidArgument, match=r"^inf s is no time of a replay$"):
        plan_faults([Fault(float("inf"), 0, DIES)], workers=1)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20), st.integers(0, 2), st.sampled_from([*Action]), st.sampled_from(["prefill", "decode"])
        )
    )
)
def test_in_a_plan_workers_go_and_return_in_turn(script: list[tuple[float, int, Action, Role]]) -> None:
    faults = [Fault(*one) for one in script]
    try:
        plan = plan_faults(faults, workers=3, prefill_workers=2)
    except InvalidArgument:
        return
    assert sorted(map(repr, plan)) == sorted(map(repr, faults))
    assert [fault.at_ms for fault in plan] == sorted(fault.at_ms for fault in faults)
    for place in {(fault.role, fault.worker) for fault in plan}:
        actions = [fault.action is RETURNS for fault in plan if (fault.role, fault.worker) == place]
        assert actions == [at % 2 == 1 for at in range(len(actions))]
