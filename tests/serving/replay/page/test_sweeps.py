"""The pages of many runs: which no other beats, what a parameter does, and cost by workers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.deployment import GraphConfig
from serving.replay import Report, Sweep, SweepRun, sweep_runs
from serving.replay.page import pareto_page, scaling_page, sweep_page
from serving.replay.page.pareto import Point, front_of
from serving.replay.report import Distribution, WorkerReport
from serving.replay.sweeping import SweepResult

from .worlds import ShownChart, ShownPage, charts_of

TTFT, REUSE, WORKERS = "Time to first token (ms), mean", "Prefix reuse", "Workers"


def run(
    router: str, workers: int, ttft: float, rate: float, *, wall_ms: float | None = None, completed: int = 0
) -> Report:
    each = [WorkerReport(at, "decode", 1, 1, 0, 1, 0.0, 1.0, 0, 1.0) for at in range(workers)]
    return Report(
        settings={"router": router, "count": workers, "trace": "t.jsonl"},
        num_requests=10,
        completed_requests=completed,
        ttft=Distribution.of([ttft]),
        output_throughput_tok_s=rate,
        prefix_cache_reused_ratio=ttft / 1000,
        workers=each,
        wall_time_ms=wall_ms,
    )


RUNS = {
    "rr 4": run("rr", 4, 500, 1000, wall_ms=20),
    "kv 4": run("kv", 4, 400, 1100, wall_ms=30),
    "rr 8": run("rr", 8, 300, 1050, wall_ms=40),
    "kv 8": run("kv", 8, 200, 1050, wall_ms=90),
}
PAIR = f"Output tokens/s over {TTFT}"


def dots(chart: ShownChart, *, front: bool) -> dict[str, tuple[float, float, str]]:
    """Return the points by their runs, each with its text."""
    found = {}
    for trace in chart.figure["data"]:
        if trace["mode"] != "lines" and ("text" in trace["mode"]) is front:
            texts = trace.get("text") or [""] * len(trace["x"])
            for label, x, y, text in zip(trace["customdata"], trace["x"], trace["y"], texts, strict=True):
                found[label] = x, y, text
    return found


def test_the_front_is_drawn_numbered_and_described() -> None:
    charts = charts_of(pareto_page(RUNS))
    first, second = charts[PAIR], charts["Prefix reuse over Time to first token (ms), p99"]
    assert first.label.endswith("4 runs; none is beaten by another: kv 8, kv 4")
    assert dots(first, front=True) == {"kv 8": (200, 1050, "1"), "kv 4": (400, 1100, "2")}
    assert dots(first, front=False) == {"rr 8": (300, 1050, ""), "rr 4": (500, 1000, "")}
    assert len(dots(second, front=True)) == 4, "more reuse has a longer tail here"
    assert first.note.endswith("better is up and to the left")


def test_each_router_is_one_series_of_the_legend() -> None:
    chart = charts_of(pareto_page(RUNS))[PAIR]
    listed = [one["name"] for one in chart.figure["data"] if one.get("showlegend") is not False]
    assert listed == ["rr", "kv"]
    assert {one.get("legendgroup") for one in chart.figure["data"] if one["mode"] != "lines"} == {"rr", "kv"}


def test_a_stair_joins_the_front() -> None:
    chart = charts_of(pareto_page(RUNS))[PAIR]
    (stair,) = (one for one in chart.figure["data"] if one["mode"] == "lines")
    assert (stair["x"], stair["y"], stair["line"]["shape"]) == ([200, 400], [1050, 1100], "hv")


def test_a_report_without_a_list_of_workers_has_no_count_of_them_and_wins_nothing_by_it() -> None:
    """It would stand at none, which no other beats."""
    runs = RUNS | {"live": run("live", 0, 600, 900)}
    page = charts_of(pareto_page(runs, pairs=[("worker_count", "mean_ttft_ms"), ("num_requests", "mean_ttft_ms")]))
    counted, others = page[f"{TTFT} over {WORKERS}"], page[f"{TTFT} over Requests"]
    assert {*dots(counted, front=True), *dots(counted, front=False)} == {*RUNS}
    assert "live" in {*dots(others, front=True), *dots(others, front=False)}


def test_the_table_has_the_front_first_and_the_settings_that_differ() -> None:
    page = pareto_page(RUNS)
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    assert [name for name, _ in rows[:4]] == ["kv 8", "kv 4", "rr 8", "rr 4"]
    cells = re.findall("<td>(.*?)</td>", rows[0][1])
    assert [re.sub("<[^>]+>", "", cell) for cell in cells] == ["1", "200.0", "1,050", "kv", "8"]
    assert '<th scope="col">trace</th>' not in page


Box = tuple[float, float, float, float]


def drawn_boxes(chart: ShownChart, width: float) -> tuple[list[Box], list[Box]]:
    """Return what points and what texts cover in a plot of that width, and 330 pixels of height."""
    (left, right), (low, high) = chart.layout["xaxis"]["range"], chart.layout["yaxis"]["range"]
    points: set[Box] = set()
    texts = []
    for trace in chart.figure["data"]:
        sides = trace.get("textposition") or [""] * len(trace["x"])
        given_texts = trace.get("text") or [""] * len(trace["x"])
        for x, y, text, side in zip(trace["x"], trace["y"], given_texts, sides, strict=True):
            at, up = (x - left) / (right - left) * width, (y - low) / (high - low) * 330
            points.add((at - 4, up - 4, at + 4, up + 4))
            if text:
                vertical, _, horizontal = side.partition(" ")
                wide = 7.0 * len(text)
                middle = up + {"top": 15, "middle": 0, "bottom": -15}[vertical]
                start = at + {"left": -wide - 6, "center": -wide / 2, "right": 6}[horizontal]
                texts.append((start, middle - 6, start + wide, middle + 6))
    return sorted(points), texts


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@settings(max_examples=2 * settings().max_examples // 5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=33),
    st.sampled_from([380.0, 900.0, 1250.0]),
)
def test_no_text_covers_a_point_or_another_text(places: list[tuple[int, int]], width: float) -> None:
    runs = {f"run {at}": run("kv", 4, x * 10, y * 100) for at, (x, y) in enumerate(places)}
    chart = charts_of(pareto_page(runs, pairs=[("mean_ttft_ms", "output_throughput_tok_s")]))[PAIR]
    points, texts = drawn_boxes(chart, width)
    assert texts
    for at, text in enumerate(texts):
        assert not any(meet(text, other) for other in [*points, *texts[:at]])


def test_points_in_one_place_share_a_text() -> None:
    same = {f"kv {at}": run("kv", 4, 400, 1100) for at in range(3)}
    chart = charts_of(pareto_page(same))[PAIR]
    assert [text for *_, text in dots(chart, front=True).values()] == ["1 to 3", "", ""]


def test_cost_is_drawn_by_workers_for_each_router() -> None:
    chart = charts_of(pareto_page(RUNS))["ms of the machine a request by workers"]
    lines = {name: list(zip(one["x"], one["y"], strict=True)) for name, one in chart.traces.items()}
    assert lines == {"rr": [(4, 2.0), (8, 4.0)], "kv": [(4, 3.0), (8, 9.0)]}
    assert (chart.layout["xaxis"]["type"], chart.layout["yaxis"]["type"]) == ("log", "log")


def test_a_page_of_cost_has_a_line_for_each_name() -> None:
    page = scaling_page({"kv": [(1000, 4.0), (8, 0.5)], "<rr>": []}, "µs a choice")
    (chart,) = charts_of(page).values()
    (line,) = chart.figure["data"]
    assert (line["x"], line["y"]) == ([8, 1000], [0.5, 4.0])
    assert chart.layout["xaxis"]["ticktext"] == ["8", "1,000"]
    assert "µs a choice by workers" in page
    assert page == scaling_page({"kv": [(1000, 4.0), (8, 0.5)], "<rr>": []}, "µs a choice")


def test_worker_counts_are_written_as_far_as_they_stand_apart() -> None:
    page = scaling_page({"kv": [(8, 1.0), (9, 1.0), (512, 1.0), (1000, 1.0)]}, "cost")
    (chart,) = charts_of(page).values()
    assert chart.layout["xaxis"]["ticktext"] == ["8", "512", "1,000"]


def test_runs_that_were_not_timed_have_no_cost() -> None:
    page = pareto_page({name: evolve(report, wall_time_ms=None) for name, report in RUNS.items()})
    assert "Cost by workers" not in page


def test_any_figures_can_be_drawn_but_they_must_exist() -> None:
    page = pareto_page(RUNS, pairs=[("p90_ttst_ms", "gpu_hours"), ("mean_ttft_ms", "num_requests")])
    assert f"Requests over {TTFT}" in charts_of(page)
    with pytest.raises(InvalidArgument, match="no run has a figure 'speed'"):
        pareto_page(RUNS, pairs=[("mean_ttft_ms", "speed")])


def test_a_run_without_a_figure_is_left_out() -> None:
    page = pareto_page({**RUNS, "dead": Report()}, pairs=[("mean_ttft_ms", "output_throughput_tok_s")])
    chart = charts_of(page)[PAIR]
    assert {*dots(chart, front=True), *dots(chart, front=False)} == {*RUNS}


@pytest.mark.parametrize("runs", [{}, {"one": RUNS["kv 4"]}, {"a <b>": RUNS["kv 4"], "a & b": RUNS["kv 4"]}])
def test_a_page_comes_of_however_few_runs(runs: dict[str, Report]) -> None:
    page = pareto_page(runs)
    assert page == pareto_page(runs)
    shown = ShownPage(page)
    assert "b" not in shown.tags
    assert bool(shown.charts) is bool(runs)


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)
BETTER = {"mean_ttft_ms": -1, "output_throughput_tok_s": 1}


@given(points, st.sampled_from([*BETTER]), st.sampled_from([*BETTER]))
def test_the_front_is_all_points_that_no_other_beats(places: list[tuple[int, int]], x: str, y: str) -> None:
    made = [Point(str(at), *place) for at, place in enumerate(places)]
    good = [(across * BETTER[x], up * BETTER[y]) for across, up in places]
    unbeaten = {
        at
        for at, one in enumerate(good)
        if not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in good)
    }
    front = front_of(made, x, y)
    assert set(front) == unbeaten
    assert len(front) == len(unbeaten)
    assert [good[at][0] for at in front] == sorted((good[at][0] for at in front), reverse=True)


# Sweeps

VARY: dict[str, list[Any]] = {"router": ["round-robin", "kv"], "workers": [4, 8], "router_temperature": [0.0, 1.0]}
SWEEP_RUNS = sweep_runs(GraphConfig(engine="mocker"), VARY)
FIGURES = [(500, 0.1), (300, 0.1), (400, 0.2), (450, 0.3), (200, 0.4), (200, 0.1)]


def result(of: SweepRun, ttft: float, reuse: float, completed: int = 10) -> SweepResult:
    report = run(of.config.router, of.workers, ttft, 1000, completed=completed)
    return SweepResult(of, evolve(report, prefix_cache_reused_ratio=reuse, tpot=Distribution.of([5.0])))


RESULTS = [result(one, *figures) for one, figures in zip(SWEEP_RUNS, FIGURES, strict=True)]


def lines_of(chart: ShownChart) -> dict[str, list[tuple[str, float]]]:
    return {name: list(zip(one["x"], one["y"], strict=True)) for name, one in chart.traces.items()}


def test_the_page_of_a_sweep_has_the_fronts_over_workers_and_what_each_parameter_does() -> None:
    page = sweep_page(Sweep.of(SWEEP_RUNS, reversed(RESULTS)))
    charts = charts_of(page)
    front = charts[f"{TTFT} over {WORKERS}"]
    assert front.label.endswith(f"by another: {', '.join(SWEEP_RUNS[at].name for at in (2, 4, 5))}")
    assert (front.layout["xaxis"]["tickvals"], front.layout["xaxis"]["ticktext"]) == ([4, 8], ["4", "8"])
    assert "By router<" not in page
    by_temperature = lines_of(charts[f"{TTFT} by router_temperature"])
    assert by_temperature["round-robin 4 workers"] == [("0.0", 500), ("1.0", 500)], "it has no temperature"
    assert by_temperature["kv 8 workers"] == [("0.0", 200), ("1.0", 200)]
    assert lines_of(charts["Prefix reuse by workers"])["round-robin"] == [("4", 0.1), ("8", 0.1)]


def test_a_page_has_charts_for_each_load_and_other_ones_where_workers_are_the_same() -> None:
    runs = sweep_runs(GraphConfig(engine="mocker"), {"router": ["round-robin", "p2c"], "speed_up": [2, 1]})
    charts = charts_of(sweep_page(Sweep(runs, [result(one, 100, 0.1) for one in runs])))
    assert "Prefix reuse over Time to first token (ms), p99, speed_up=1" in charts
    assert "Prefix reuse over Time to first token (ms), p99, speed_up=2" in charts
    by_speed = charts[f"{TTFT} by speed_up"]
    assert lines_of(by_speed)["p2c"] == [("1", 100), ("2", 100)]
    assert by_speed.layout["xaxis"]["categoryarray"] == ["1", "2"]


def test_a_page_numbers_a_worse_run_that_completed_more() -> None:
    few, many = SWEEP_RUNS[:2]
    done = [result(few, 5, 0.9, completed=9), result(many, 500, 0.1)]
    front = charts_of(sweep_page(Sweep(SWEEP_RUNS, done)))[f"{TTFT} over {WORKERS}"]
    assert front.label.endswith(f"by another: {few.name}, {many.name}")


def test_a_page_comes_of_whatever_a_sweep_has() -> None:
    failed = SweepResult(SWEEP_RUNS[0], problem="<no> card")
    for results in ([], [failed], [failed, RESULTS[1]]):
        page = sweep_page(Sweep(SWEEP_RUNS, results))
        assert page == sweep_page(Sweep(SWEEP_RUNS, results))
        assert "no" not in ShownPage(page).tags
    assert "&lt;no&gt; card" in page
