"""The page of a sweep."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Distribution, Report, WorkerReport
from serving.replay.page_figures import HIGHER, LOWER
from serving.replay.page_pareto import SweepPoint, pareto_front, sweep_points
from serving.replay.page_sweep import pareto_page


def run(router: str, workers: int, ttft: float, rate: float, *, wall_ms: float | None = None) -> Report:
    each = [WorkerReport(at, "decode", 1, 1, 0, 1, 0.0, 1.0, 0, 1.0) for at in range(workers)]
    return Report(
        settings={"router": router, "count": workers, "trace": "t.jsonl"},
        num_requests=10,
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


def pictures(page: str) -> list[ElementTree.Element]:
    found = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    return [svg for svg in map(ElementTree.fromstring, found) if svg.get("role") == "img"]


def dots(svg: ElementTree.Element, kind: str) -> list[str]:
    found = [one for one in svg.iter() if kind in (one.get("class") or "").split()]
    return [title.text or "" for one in found for title in one]


def test_the_front_is_drawn_numbered_and_said() -> None:
    first, second, *_ = pictures(pareto_page(RUNS))
    assert "none is beaten by another: kv 8, kv 4" in (first.get("aria-label") or "")
    assert [text.split(":")[0] for text in dots(first, "front")] == ["kv 8", "kv 4"]
    assert len(dots(first, "dot")) == 4
    pins = [one.text for one in first.iter() if one.get("class") == "pin"]
    assert pins == ["1", "2"]
    assert len(dots(second, "front")) == 4, "more reuse has a longer tail here"


def test_a_server_that_does_not_tell_its_workers_has_no_count_of_them_and_wins_nothing_by_it() -> None:
    """It would stand at none, which no other beats."""
    runs = RUNS | {"live": run("live", 0, 600, 900)}
    assert [point.label for point in sweep_points(runs, "worker_count", "mean_ttft_ms", "router")] == [*RUNS]
    assert "live" in [point.label for point in sweep_points(runs, "output_throughput_tok_s", "mean_ttft_ms", "router")]


def test_the_table_has_the_front_first_and_the_settings_that_differ() -> None:
    page = pareto_page(RUNS)
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    assert [name for name, _ in rows[:4]] == ["kv 8", "kv 4", "rr 8", "rr 4"]
    cells = re.findall("<td>(.*?)</td>", rows[0][1])
    assert [re.sub("<[^>]+>", "", cell) for cell in cells] == [
        "1",
        "200.0",
        "1,050",
        "kv",
        "8",
    ]
    assert '<th scope="col">trace</th>' not in page


def test_cost_is_drawn_by_workers_for_each_router() -> None:
    page = pareto_page(RUNS)
    label = pictures(page)[-1].get("aria-label") or ""
    assert "rr: 2.00 at 4, 4.00 at 8; kv: 3.00 at 4, 9.00 at 8" in label
    given_lines = pareto_page(RUNS, scaling={"kv": [(1000, 4.0), (8, 0.5)]}, cost_label="µs a choice")
    assert "kv: 0.500 at 8, 4.00 at 1,000" in (pictures(given_lines)[-1].get("aria-label") or "")
    assert "µs a choice by workers" in given_lines


def test_runs_that_were_not_timed_have_no_cost() -> None:
    page = pareto_page({name: evolve(report, wall_time_ms=None) for name, report in RUNS.items()})
    assert "Cost by workers" not in page


def test_any_figures_can_be_drawn_but_they_must_exist() -> None:
    page = pareto_page(RUNS, pairs=[("p90_ttst_ms", "gpu_hours"), ("mean_ttft_ms", "num_requests")])
    assert "num_requests over Time to first token, mean, ms" in page
    with pytest.raises(InvalidArgument, match="no run has a figure 'speed'"):
        pareto_page(RUNS, pairs=[("mean_ttft_ms", "speed")])


def test_a_run_without_a_figure_is_left_out() -> None:
    page = pareto_page({**RUNS, "dead": Report()}, pairs=[("mean_ttft_ms", "output_throughput_tok_s")])
    assert len(dots(pictures(page)[0], "dot")) == 4


@pytest.mark.parametrize("runs", [{}, {"one": RUNS["kv 4"]}, {"a <b>": RUNS["kv 4"], "a & b": RUNS["kv 4"]}])
def test_a_page_comes_of_however_few_runs(runs: dict[str, Report]) -> None:
    page = pareto_page(runs)
    assert page == pareto_page(runs)
    assert "<b>" not in page
    assert pictures(page)


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(points, st.sampled_from([LOWER, HIGHER]), st.sampled_from([LOWER, HIGHER]))
def test_the_front_is_all_points_that_no_other_beats(
    places: list[tuple[int, int]], x_better: int, y_better: int
) -> None:
    made = [SweepPoint(str(at), x, y) for at, (x, y) in enumerate(places)]
    good = [(x * x_better, y * y_better) for x, y in places]
    unbeaten = {
        at
        for at, one in enumerate(good)
        if not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in good)
    }
    front = pareto_front(made, x_better, y_better)
    assert set(front) == unbeaten
    assert len(front) == len(unbeaten)
    assert [good[at][0] for at in front] == sorted((good[at][0] for at in front), reverse=True)
