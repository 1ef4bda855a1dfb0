"""What is said of a sweep: the marks, the table, the JSON and the page."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from serving.deployment import GraphConfig
from serving.replay import Distribution, Report, Sweep, SweepRun, WorkerReport, sweep_runs
from serving.replay.page_axes import counts
from serving.replay.sweeping import SweepResult
from serving.replay.unbeaten import unbeaten, unbeaten_in

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
def test_unbeaten_is_what_nothing_is_as_good_as_and_better_in_something(found: list[Any]) -> None:
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


def test_who_completes_less_does_not_beat_who_completes_more() -> None:
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
    lines = Sweep.of(RUNS, [RESULTS[5], failed, *RESULTS[:2]]).table().splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines if line.strip()]
    names = [row[0] for row in rows if row[0] in BY_NAME]
    assert names == [run.name for run in RUNS]
    assert ["round-robin 4 workers", "10", "500.0", "500.0", "5.00", "0.100", "1,000", "mean, p99, reuse"] in rows
    assert ["kv 4 workers router_temperature=0.0", "failed"] in rows
    assert ["kv 4 workers router_temperature=1.0", "not run"] in rows


def test_the_json_is_a_list_of_flat_runs() -> None:
    failed = SweepResult(RUNS[2], problem="no such card")
    found = json.loads(Sweep.of(RUNS, [failed, *RESULTS[:2], RESULTS[5]]).to_json())
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
    assert json.loads(Sweep([], []).to_json()) == []


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg viewBox[^>]*role="img".*?</svg>', page, re.DOTALL)]


def said(page: str) -> dict[str, str]:
    """What each chart says, by its title."""
    labels = [svg.get("aria-label") or "" for svg in pictures(page)]
    return {title: text for title, _, text in (label.partition(". ") for label in labels)}


def test_the_page_has_the_fronts_over_workers_and_what_each_parameter_does() -> None:
    page = Sweep.of(RUNS, reversed(RESULTS)).page()
    charts = said(page)
    front = charts["Time to first token, mean, ms over Workers"]
    assert front.endswith(f"by another: {', '.join(RUNS[at].name for at in (2, 4, 5))}")
    assert "By router<" not in page
    by_temperature = charts["Time to first token, mean, ms by router_temperature"]
    assert "round-robin 4 workers: 500.0 at 0.0, 500.0 at 1.0" in by_temperature, "it has no temperature"
    assert "kv 8 workers: 200.0 at 0.0, 200.0 at 1.0" in by_temperature
    assert "round-robin: 0.100 at 4, 0.100 at 8" in charts["Prefix reuse by workers"]


def test_a_page_has_charts_for_each_load_and_other_ones_where_workers_are_the_same() -> None:
    runs = sweep_runs(MOCKER, {"router": ["round-robin", "p2c"], "speed_up": [2, 1]})
    charts = said(Sweep(runs, [SweepResult(run, report_of(run, 100, 0.1)) for run in runs]).page())
    assert "Prefix reuse over Time to first token, p99, ms, speed_up=1" in charts
    assert "Prefix reuse over Time to first token, p99, ms, speed_up=2" in charts
    assert "p2c: 100.0 at 1, 100.0 at 2" in charts["Time to first token, mean, ms by speed_up"]


def test_a_page_numbers_who_is_worse_but_completed_more() -> None:
    few, many = RUNS[:2]
    done = [SweepResult(few, report_of(few, 5, 0.9, completed=9)), SweepResult(many, report_of(many, 500, 0.1))]
    front = said(Sweep(RUNS, done).page())["Time to first token, mean, ms over Workers"]
    assert front.endswith(f"by another: {few.name}, {many.name}")


def test_worker_counts_are_written_as_far_as_they_stand_apart() -> None:
    axis = counts([8, 1000, 512, 8, 9], "Workers")
    assert [text for _, text in axis.ticks] == ["8", "512", "1,000"]
    assert 0 < axis.part(8) < axis.part(9) < axis.part(1000) < 1


def test_a_page_comes_of_whatever_there_is() -> None:
    failed = SweepResult(RUNS[0], problem="<no> card")
    for results in ([], [failed], [failed, RESULTS[1]]):
        page = Sweep(RUNS, results).page()
        assert page == Sweep(RUNS, results).page()
        assert "<no>" not in page
    assert "&lt;no&gt; card" in page
