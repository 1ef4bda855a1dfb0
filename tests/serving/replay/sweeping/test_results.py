"""A sweep as a table and as JSON, and the runs that no other beats."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.deployment import GraphConfig
from serving.replay import Report, Sweep, SweepRun, sweep_json, sweep_runs, sweep_text
from serving.replay.report import Distribution, WorkerReport
from serving.replay.sweeping import SweepResult, unbeaten, unbeaten_in

MOCKER = GraphConfig(engine="mocker")


def report_of(run: SweepRun, ttft: float, reuse: float, completed: int = 10) -> Report:
    workers = [WorkerReport(at, "decode", 1, 1, 0, 1, 0.0, 1.0, 0, 1.0) for at in range(run.workers)]
    return Report(
        settings={"router": run.config.router},
        num_requests=10,
        completed_requests=completed,
        ttft=Distribution.of([ttft] if completed else []),
        tpot=Distribution.of([5.0]),
        prefix_cache_reused_ratio=reuse,
        output_throughput_tok_s=1000,
        workers=workers,
    )


VARY: dict[str, list[Any]] = {"router": ["round-robin", "kv"], "workers": [4, 8], "router_temperature": [0.0, 1.0]}
RUNS = sweep_runs(MOCKER, VARY)
FIGURES = [(500, 0.1), (300, 0.1), (400, 0.2), (450, 0.3), (200, 0.4), (200, 0.1)]
RESULTS = [SweepResult(run, report_of(run, *figures)) for run, figures in zip(RUNS, FIGURES, strict=True)]
REPORTS = {one.run.name: one.report for one in RESULTS if one.report is not None}
BY_NAME = {run.name: run for run in RUNS}

costs = st.lists(st.one_of(st.none(), st.tuples(*[st.integers(0, 3).map(float)] * 3)), max_size=9)


@given(costs)
def test_a_cost_is_unbeaten_if_none_is_as_low_in_all_and_lower_in_one(found: list[Any]) -> None:
    known = [cost for cost in found if cost is not None]
    for cost, is_unbeaten in zip(found, unbeaten(found), strict=True):
        beaten = cost is None or any(
            all(a <= b for a, b in zip(other, cost, strict=True)) and other != cost for other in known
        )
        assert is_unbeaten is not beaten


def test_a_run_is_marked_for_each_figure_in_which_no_cheaper_one_is_as_good() -> None:
    assert list(unbeaten_in(RUNS, REPORTS).values()) == [
        [],
        [],
        ["mean", "p99"],
        ["reuse"],
        ["mean", "p99", "reuse"],
        ["mean", "p99"],
    ]


def test_a_run_that_completes_less_does_not_beat_one_that_completes_more() -> None:
    few, many = RUNS[0], RUNS[1]
    reports = {few.name: report_of(few, 5, 0.9, completed=9), many.name: report_of(many, 500, 0.1)}
    assert all(len(marks) == 3 for marks in unbeaten_in(RUNS, reports).values())
    reports[few.name] = report_of(few, 5, 0.9, completed=0)
    assert list(unbeaten_in(RUNS, reports).values()) == [[], ["mean", "p99", "reuse"]]


def test_runs_under_different_load_are_not_compared() -> None:
    slow, fast = sweep_runs(MOCKER, {"speed_up": [1, 2]})
    reports = {slow.name: report_of(slow, 5, 0.9), fast.name: report_of(fast, 500, 0.1)}
    assert all(len(marks) == 3 for marks in unbeaten_in([slow, fast], reports).values())


def test_the_table_has_a_row_for_each_run_in_order() -> None:
    failed = SweepResult(RUNS[2], problem="no such card")
    lines = sweep_text(Sweep.of(RUNS, [RESULTS[5], failed, *RESULTS[:2]])).splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines if line.strip()]
    names = [row[0] for row in rows if row[0] in BY_NAME]
    assert names == [run.name for run in RUNS]
    assert ["round-robin 4 workers", "10", "500.0", "500.0", "5.00", "0.100", "1,000", "mean, p99, reuse"] in rows
    assert ["kv 4 workers router_temperature=0.0", "failed"] in rows
    assert ["kv 4 workers router_temperature=1.0", "not run"] in rows


def test_the_json_is_a_list_of_flat_runs() -> None:
    failed = SweepResult(RUNS[2], problem="no such card")
    found = json.loads(sweep_json(Sweep.of(RUNS, [failed, *RESULTS[:2], RESULTS[5]])))
    assert [one["name"] for one in found] == [RUNS[at].name for at in (0, 1, 2, 5)]
    assert found[2] == {
        "name": RUNS[2].name,
        "parameters": {"router": "kv", "workers": 4, "router_temperature": 0.0},
        "error": "no such card",
    }
    last = found[3]
    assert (last["error"], last["worker_count"], last["mean_ttft_ms"]) == (None, 8, 200)
    assert last["unbeaten_in"] == ["mean_ttft_ms", "p99_ttft_ms"]
    assert not any(name in last for name in ("series", "workers", "per_request", "ttft_percentiles"))
    assert json.loads(sweep_json(Sweep([], []))) == []
