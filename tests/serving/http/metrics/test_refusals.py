"""What a limit refuses is in the answer, in a metric, and in messages that stay few."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from operators.kv.errors import QueueRejected
from pipeline.errors import ExceededLimit, InvalidArgument
from pipeline.protocols.limits import RequestLimits
from pipeline.testing import Fail, ScriptedEngine, Wait
from pipeline.wire.errors import error_from_plain, error_to_plain
from serving.http import HttpOptions, Telemetry, app
from serving.http.metrics.refusals import LIMITS_MAX, Refusals
from serving.log_format import JsonLines
from serving.problems import Problem
from tests.serving.worlds import chat, token

Lines = Callable[[], list[dict[str, Any]]]
"""Returns the messages about refusals so far, as JSON."""

PROBLEM = Problem(400, "m", "validation", exceeded=ExceededLimit("max_tools", 2000, 1536))


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.WARNING)
    return lambda: [
        json.loads(JsonLines().format(r)) for r in caplog.records if r.name == "serving.http.metrics.refusals"
    ]


def counted(telemetry: Telemetry) -> dict[str, float]:
    found = re.findall(r'^dynamo_frontend_refused_requests_total{limit="(.*?)"} (.*)$', telemetry.text().decode(), re.M)
    return {name: float(value) for name, value in found}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_refusal_names_its_limit_in_metric_and_message(telemetry: Telemetry, written: Lines) -> None:
    telemetry.refusals.report(PROBLEM, "r1", "10.0.0.1")
    assert counted(telemetry) == {"max_tools": 1}
    (line,) = written()
    del line["time"]
    assert line == {
        "level": "WARNING",
        "logger": "serving.http.metrics.refusals",
        "message": "refused with 400 by max_tools: 2000, at most 1536, from 10.0.0.1",
        "request": "r1",
        "caller": "10.0.0.1",
        "status": 400,
        "limit": "max_tools",
        "value": 2000,
        "threshold": 1536,
    }


@pytest.mark.parametrize("value", [2_129_920, 5_000_000, 0.125])
def test_figures_are_written_as_they_are(telemetry: Telemetry, written: Lines, value: float) -> None:
    """Of a long prompt the message had 2.12992e+06 tokens."""
    problem = evolve(PROBLEM, exceeded=ExceededLimit("max_prompt_tokens", value, 2_097_152))
    telemetry.refusals.report(problem, "r1", "10.0.0.1")
    assert f" max_prompt_tokens: {value}, at most 2097152, from " in written()[0]["message"]
    text = f"max_prompt_tokens; value={value}; threshold=2097152"
    assert problem.headers() == [(b"x-penstock-limit", text.encode())]


def test_what_no_limit_refused_is_passed_over(telemetry: Telemetry, written: Lines) -> None:
    telemetry.refusals.report(evolve(PROBLEM, exceeded=None), "r1", "10.0.0.1")
    assert (counted(telemetry), written()) == ({}, [])


def test_a_flood_of_refusals_is_a_message_a_second_for_each_limit(telemetry: Telemetry, written: Lines) -> None:
    clock = Clock()
    refusals = Refusals(telemetry.metrics, clock)
    other = evolve(PROBLEM, exceeded=ExceededLimit("max_connections", 2, 1))
    for tick in range(2500):  # over two and a half seconds
        clock.now_s = 100 + tick / 1000
        refusals.report(PROBLEM)
        refusals.report(other)
    logged = [(line["limit"], line.get("left_out")) for line in written()]
    assert logged == [(name, left) for left in (None, 999, 999) for name in ("max_tools", "max_connections")]
    assert counted(telemetry) == {"max_tools": 2500, "max_connections": 2500}


def test_names_of_limits_are_bounded(telemetry: Telemetry, written: Lines) -> None:
    refusals = Refusals(telemetry.metrics, Clock())
    for number in range(1000):
        refusals.report(evolve(PROBLEM, exceeded=ExceededLimit(f"limit_{number}", 2, 1)))
    for name in ("a b", "x" * 65, "", "a\nb"):
        refusals.report(evolve(PROBLEM, exceeded=ExceededLimit(name, 2, 1)))
    assert len(counted(telemetry)) == LIMITS_MAX + 1
    assert counted(telemetry)["other"] == 1000 - LIMITS_MAX + 4
    assert len(written()) == LIMITS_MAX + 1


async def test_a_refused_request_is_counted_and_logged_with_its_id(telemetry: Telemetry, written: Lines) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(3)]
    failing = ScriptedEngine([Fail(InvalidArgument("too many", exceeded=ExceededLimit("max_tools", 3, 2)))])
    options = HttpOptions(request_limits=RequestLimits(max_tools=2))
    answer = await chat(app({"m": failing}, telemetry=telemetry, options=options), tools=tools).run()
    assert answer.status == 400
    assert answer.json["limit"] == {"name": "max_tools", "value": 3, "threshold": 2}
    assert answer.response_headers["x-penstock-limit"] == "max_tools; value=3; threshold=2"
    (line,) = written()
    assert (line["request"], line["caller"]) == (answer.json["request_id"], "127.0.0.1")
    assert counted(telemetry) == {"max_tools": 1}


async def test_a_refusal_before_there_is_a_model_is_counted_too(telemetry: Telemetry, written: Lines) -> None:
    headers = {f"x-dynamo-meta-{n}": "a" for n in range(65)}
    answer = await chat(app({"m": ScriptedEngine([])}, telemetry=telemetry), headers=headers).run()
    assert (answer.status, counted(telemetry)) == (431, {"max_metadata_entries": 1})
    assert len(written()) == 1


async def test_a_refusal_in_the_middle_of_a_stream_names_its_limit_in_the_frame(
    telemetry: Telemetry, written: Lines
) -> None:
    """Also one that came from another process."""
    error = error_from_plain(error_to_plain(InvalidArgument("late", exceeded=ExceededLimit("max_tools", 3, 2))))
    engine = ScriptedEngine([token("a"), Wait(1), Fail(error)])
    answer = await chat(app({"m": engine}, telemetry=telemetry), stream=True).run()
    assert answer.chunks[-1]["error"]["limit"] == {"name": "max_tools", "value": 3, "threshold": 2}
    assert counted(telemetry) == {"max_tools": 1}
    assert len(written()) == 1


async def test_a_full_queue_of_the_router_is_a_limit_too(telemetry: Telemetry) -> None:
    error = QueueRejected(policy_class="default", limit_kind="cached_tokens", current=11, limit=10)
    engine = ScriptedEngine([], fails=error)
    answer = await chat(app({"m": engine}, telemetry=telemetry)).run()
    assert (answer.status, answer.json["limit"]["name"]) == (529, "router_queue_cached_tokens")
    assert counted(telemetry) == {"router_queue_cached_tokens": 1}
    text = telemetry.text().decode()
    assert 'model_rejection_total{endpoint="chat_completions",model="m"} 1.0' in text
