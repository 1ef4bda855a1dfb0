"""What a sweep says it will take, before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from serving.deployment import GraphConfig
from serving.replay import SweepRun, SyntheticLoad, Trace, sweep, sweep_runs
from serving.replay.sweeping import estimate
from serving.replay.sweeping.estimate import SweepPlan, estimate_cpu_s

LATER = 1.2
"""How much longer later requests take."""
START_S = 1.5
"""Until the processes have begun."""
LOAD = SyntheticLoad(input_tokens=40, output_tokens=2, request_count=400, arrival_interval_ms=1).make()
RUNS = sweep_runs(GraphConfig(engine="mocker"), {"router": ["random", "p2c"], "workers": [1, 2, 3]})


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU time so far, for a test to spend."""
    clock = [0.0]
    monkeypatch.setattr(estimate, "process_time", lambda: clock[0])
    monkeypatch.setattr(estimate, "WORTH_REQUESTS", 1000)
    return clock


def test_each_router_is_tried_once_and_its_runs_take_as_long_by_their_load(spent: list[float]) -> None:
    tried: list[tuple[str, int]] = []

    def replay(run: SweepRun, head: Trace) -> None:
        tried.append((run.config.router, head.requests))
        spent[0] += 1.0 + head.requests * (0.01 if run.config.router == "random" else 0.02)

    runs_s = estimate_cpu_s([(run, LOAD) for run in RUNS], replay)
    assert runs_s == pytest.approx([400 * LATER * (0.01 if run.config.router == "random" else 0.02) for run in RUNS])
    assert sorted(tried) == [("p2c", 50), ("p2c", 250), ("random", 50), ("random", 250)]


def test_there_is_no_estimate_for_little_or_for_what_fails(spent: list[float]) -> None:
    def fail(run: SweepRun, head: Trace) -> None:
        raise OSError("no such card")

    assert estimate_cpu_s([(RUNS[0], LOAD)], fail) is None
    assert estimate_cpu_s([(run, LOAD) for run in RUNS], fail) is None


def test_no_other_engine_is_started_for_it(spent: list[float]) -> None:
    runs = sweep_runs(GraphConfig(engine="echo"), {"workers": [1, 2, 3]})
    tried: list[Any] = []
    assert estimate_cpu_s([(run, LOAD) for run in runs], lambda *given: tried.append(given)) is None
    assert not tried


def test_the_plan_comes_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "WORTH_REQUESTS", 1000)
    seen: list[Any] = []
    sweep(RUNS[:3], LOAD, jobs=1, on_plan=seen.append, on_result=seen.append)
    plan, *results = seen
    assert len(results) == 3
    assert (plan.runs, plan.requests, plan.jobs) == (3, 1200, 1)
    assert plan.cpu_s is not None
    assert plan.cpu_s >= 0


def test_a_sweep_lasts_until_its_last_run_has_ended() -> None:
    plan = SweepPlan.of(500, 2, 5, [40.0, 40.0, 40.0, 20.0, 20.0])
    assert (plan.runs, plan.requests, plan.jobs, plan.cpu_s) == (5, 500, 2, 160.0)
    assert plan.wall_s == 80.0 + START_S
    assert SweepPlan.of(500, 1, 2, [40.0, 20.0]).wall_s == 60.0


@pytest.mark.parametrize(
    ("wall_s", "text"),
    [
        (None, "8 runs of 96,248 requests in all, 2 at a time"),
        (45.0, "8 runs of 96,248 requests in all, 2 at a time: about 45 s"),
        (300.0, "8 runs of 96,248 requests in all, 2 at a time: about 5 min"),
    ],
)
def test_the_plan_is_one_line(wall_s: float | None, text: str) -> None:
    assert SweepPlan(8, 96_248, 2, wall_s, wall_s).text == text
