"""Environment variables are one table: what a program checks at its start, and what the docs list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serving.cli import commands
from serving.server import GRACE
from serving.variables import names, of_graphs, unread, unreadable

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\"((?:DYN|PENSTOCK)_[A-Z0-9_]*[A-Z0-9])\"")
DYNAMIC = {"DYN_ROUTER", "DYN_METRICS", "PENSTOCK"}
"""Parts of names, which are completed when they are read."""


def of_options() -> set[str]:
    return {one.variable for each in commands.values() for one in each.settings().values()}


def test_every_variable_that_the_product_names_is_in_the_table() -> None:
    written = {
        name
        for folder in ("pipeline", "operators", "engines", "serving")
        for path in (ROOT / folder).rglob("*.py")
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert written - DYNAMIC - names() - of_options() == set()
    assert len(written) > 50


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("DYN_HTTP_BODY_LIMIT_MB", "45MB", "a whole number from 1 to 1048576"),
        ("DYN_HTTP_SVC_CHAT_PATH", "chat", "a path that begins with /"),
        ("DYN_DISABLE_FRONTEND_NVEXT", "maybe", "true or false"),
        ("DYN_CANARY_WAIT_TIME", "0", "above 0"),
        ("DYN_RUNTIME_INHIBITED_DURATION_SECS", "-1", "a whole number from 0"),
        ("DYN_SYSTEM_STARTING_HEALTH_STATUS", "red", "one of ready, notready"),
        ("DYN_ROUTER_TEMPERATURE", "warm", "a number"),
        ("DYN_USE_KV_EVENTS", "perhaps", "true or false"),
        ("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS", "nan", "a number of at least 0"),
    ],
)
def test_a_text_that_cannot_be_read_is_a_problem_that_names_what_is_allowed(name: str, text: str, allowed: str) -> None:
    ((found, what),) = unreadable({name: text})
    assert found == name
    assert what.startswith("must be ")
    assert allowed in what
    assert repr(text) in what or what.endswith(f"got {text}")


def test_a_grace_of_zero_is_read_as_no_time_and_not_as_the_default() -> None:
    assert (GRACE.of({GRACE.name: "0"}), GRACE.of({})) == (0.0, 5.0)


def test_all_problems_are_found_at_once() -> None:
    environment = {"DYN_USE_KV_EVENTS": "x", "DYN_HTTP_BODY_LIMIT_MB": "x", "DYN_CANARY_WAIT_TIME": "x"}
    assert [name for name, _ in unreadable(environment)] == sorted(environment)


def test_blank_texts_and_variables_of_others_are_no_problem() -> None:
    assert unreadable({"DYN_HTTP_BODY_LIMIT_MB": " ", "HOME": "/root", "DYN_SYSTEM_PORT": "-1"}) == []


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_that_is() -> None:
    environment = {"PENSTOCK_PROT": "1", "DYN_LOG": "debug", "HOME": "/root", "DYN_METRICS_TTFT_SECONDS_MIN": "1"}
    assert unread(environment, names() | of_options()) == [
        "DYN_LOG is set and nothing reads it",
        "PENSTOCK_PROT is set and nothing reads it; did you mean PENSTOCK_PORT?",
    ]


def test_a_report_shows_the_variables_of_dynamo() -> None:
    assert of_graphs({"DYN_A": "1", "DYN_B": " ", "PENSTOCK_C": "1", "HOME": "/"}) == {"DYN_A": "1"}
