"""Reports as a page: its tables, and its charts by the figures they are drawn from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from serving.replay import Report, Samples, make_report
from serving.replay.page import report_page
from serving.replay.report import Distribution

from .worlds import ShownChart, ShownPage, cells, charts_of, made

NASTY = "<script>alert(\"1\")</script> & 'two' \x00\x0b\ud800 ]]> <b>%{x}</b>"
SHOWN = "<script>alert(\"1\")</script> & 'two' \ufffd\ufffd? ]]> <b>%{x}</b>"

CASES: dict[str, Callable[[], dict[str, Report]]] = {
    "no reports": dict,
    "an empty report": lambda: {"a": make_report(Samples())},
    "a report of nothing": lambda: {"a": Report()},
    "without series": lambda: {"a": evolve(made(), series=None)},
    "one request": lambda: {"a": made(requests=1, workers=1)},
    "with requests": lambda: {"a": made(requests=300, per_request=True), "b": made(per_request=True)},
    "8 workers": lambda: {"a": made(workers=8)},
    "64 workers": lambda: {"a": made(workers=64, requests=200)},
    "200 workers": lambda: {"a": made(workers=200)},
    "pools": lambda: {"a": made(workers=3, prefill=2)},
    "several": lambda: {f"run {at}": made(at, workers=at) for at in range(1, 11)},
    "33 runs": lambda: {f"router=kv workers={at} router_temperature=0.5": made(at, workers=2) for at in range(33)},
    "one of them empty": lambda: {"a": made(), "b": make_report(Samples()), "c": Report()},
    "empty ones": lambda: {"a": Report(), "b": Report()},
}


@cache
def reports_of(name: str) -> dict[str, Report]:
    """Return the reports of one of CASES, made once."""
    return CASES[name]()


@cache
def page_of(name: str) -> str:
    """Return the page of one of CASES, made once."""
    return report_page(reports_of(name))


@pytest.mark.parametrize("name", CASES)
def test_a_page_is_well_formed_and_needs_nothing_else(name: str) -> None:
    page = page_of(name)
    shown = ShownPage(page)
    assert not {"link", "img", "iframe", "object", "image", "use"} & set(shown.tags)
    assert not {one for _, one, _ in shown.attributes} & {"src", "href", "xlink:href", "srcset"}
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "url(" not in own
    assert "@import" not in own
    assert not re.search(r"\b(NaN|nan|Infinity|inf|None)\b", own)


@pytest.mark.parametrize("name", ["64 workers", "several", "33 runs"])
def test_the_same_reports_give_the_same_page(name: str) -> None:
    again = {run: Report.from_json(report.to_json()) for run, report in reports_of(name).items()}
    assert page_of(name) == report_page(again)


def test_another_process_gives_the_same_page() -> None:
    code = (
        "import sys; from serving.replay import Report; from serving.replay.page import report_page;"
        "sys.stdout.write(report_page([Report.from_json(sys.stdin.read())]))"
    )
    report = made()
    ran = subprocess.run([sys.executable, "-c", code], input=report.to_json(), capture_output=True, check=True)
    assert ran.stdout.decode() == report_page([report])


def test_a_page_without_charts_has_no_script() -> None:
    assert len(report_page({})) < 20_000
    assert "script" not in ShownPage(report_page({})).tags


def test_names_and_settings_are_shown_and_never_obeyed() -> None:
    report = evolve(made(), settings={"router": NASTY, NASTY: [NASTY]})
    page = report_page({NASTY: report, f"{NASTY}2": report})
    page.encode()
    shown = ShownPage(page)
    assert shown.of("th").count(SHOWN) > 0
    assert cells(page, "router")[0].startswith("&lt;script&gt;alert(&quot;1&quot;)")
    chart = shown.charts["Time to first token"]
    assert next(iter(chart.traces)) == SHOWN.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert not any("alert" in trace["hovertemplate"] for trace in chart.figure["data"]), "a template is no text"
    harmless = evolve(report, settings={"router": "a", "b": ["c"]})
    assert shown.tags == ShownPage(report_page({"d": harmless, "e": harmless})).tags


def test_reports_without_names_are_numbered() -> None:
    assert report_page([made(), made(2)]) == report_page({"run 1": made(), "run 2": made(2)})


def test_figures_have_thousands_separators() -> None:
    report = evolve(made(), completed_requests=12031, total_input_tokens=144793823, duration_ms=3_600_123.4)
    page = report_page([report])
    assert "12,031 of 60 requests completed, 144,793,823 input" in page
    assert "<dd>12,031</dd>" in page
    assert "<dd>3,600</dd>" in page


WITHOUT_PLOTLY = """
import sys

class NoPlotly:
    @staticmethod
    def find_spec(name, *others):
        if name == "plotly":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, NoPlotly)
"""


def test_a_page_needs_the_library_that_draws_and_names_the_extra_that_brings_it() -> None:
    code = WITHOUT_PLOTLY + "from serving.replay.page import report_page"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    error = "ModuleNotFoundError: serving.replay.page needs plotly: pip install 'penstock[report]'"
    assert ran.stderr.strip().splitlines()[-1] == error


def test_the_program_misses_the_library_before_it_replays_anything(tmp_path: Path) -> None:
    """Only a page needs it: without `--html` the same program replays."""
    code = (
        f"{WITHOUT_PLOTLY}from serving.__main__ import main\npage = sys.argv[-2:]\ndel sys.argv[-2:]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('-- with a page', flush=True)\nsys.argv += page\nmain()"
    )
    load = ["--input-tokens", "10", "--output-tokens", "2", "--requests", "1"]
    command = [sys.executable, "-c", code, "replay", *load, "--html", str(tmp_path / "page.html")]
    ran = subprocess.run(command, capture_output=True, text=True)
    replayed, _, shown = ran.stdout.partition("-- with a page\n")
    assert (ran.returncode, bool(replayed), shown) == (1, True, "")
    assert ran.stderr == "penstock: plotly is missing; install the program with: pip install 'penstock[serve,report]'\n"


# Comparison


def test_a_comparison_gives_differences_in_percent_and_marks_the_best() -> None:
    base = made()
    faster = evolve(base, ttft=evolve(base.ttft, mean=base.ttft.mean / 2), output_throughput_tok_s=1.0)
    page = report_page({"base": base, "faster": faster})
    first, second = cells(page, "Time to first token (ms), mean")
    assert "★" not in first
    assert second.startswith("★")
    assert second.endswith("-50.0 %")
    first, second = cells(page, "Output tokens/s")
    assert first.startswith("★")
    assert "★" not in second
    assert not any("★" in cell for cell in cells(page, "End to end (ms), mean")), "equal ones are all as good"
    assert cells(page, "End to end (ms), mean")[1].endswith(" =")


def test_a_run_without_tokens_is_not_the_fastest() -> None:
    page = report_page({"a": made(), "b": make_report(Samples()), "c": made(slow=2)})
    some, nothing, _ = cells(page, "Time to first token (ms), mean")
    assert some.startswith("★")
    assert nothing == "N/A"


def test_a_count_that_is_0_in_all_runs_has_no_row() -> None:
    quiet = evolve(made(), preemptions=0, migrations=0)
    assert "Preemptions" not in report_page([quiet])
    page = report_page({"a": quiet, "b": evolve(quiet, migrations=3)})
    assert cells(page, "Migrations") == ["★ 0", "3"]
    assert "Preemptions" not in page


def test_settings_that_differ_are_marked() -> None:
    page = report_page({"a": made(seed_of_run=1), "b": made(router="p2c", seed_of_run=1)})
    assert page.count("<mark>") == 2
    assert cells(page, "router") == ["kv", "p2c"]
    assert cells(page, "seed_of_run") == ["1", "1"]


def test_a_menu_switches_the_figure_that_is_shown_of_every_run() -> None:
    chart = charts_of(page_of("33 runs"))["One figure of every run"]
    buttons = chart.layout["updatemenus"][0]["buttons"]
    assert [one["label"] for one in buttons] == list(chart.traces)
    for at, (button, bars) in enumerate(zip(buttons, chart.figure["data"], strict=True)):
        assert [place for place, on in enumerate(button["args"][0]["visible"]) if on] == [at]
        assert bars["visible"] is (at == 0)
        assert len(bars["x"]) == len(set(bars["y"])) == 33
    values = [report.ttft.mean for report in reports_of("33 runs").values()]
    assert chart.traces["Time to first token (ms), mean"]["x"] == values
    best = [at for at, one in enumerate(chart.figure["data"][0]["marker"]["opacity"]) if one == 1.0]
    assert best == [values.index(min(values))]


def test_the_names_of_33_runs_have_room_beside_their_bars() -> None:
    chart = charts_of(page_of("33 runs"))["One figure of every run"]
    lines = [text.split("<br>") for text in chart.layout["yaxis"]["ticktext"]]
    assert lines[0] == ["router=kv workers=0", "router_temperature=0.5"]
    assert all(len(line) <= 26 for some in lines for line in some)
    assert chart.layout["height"] > sum(13 * len(some) for some in lines)


# Percentiles


def test_every_run_is_a_line_in_the_charts_of_latency() -> None:
    fast, slow = made(), made(slow=3)
    drawn = charts_of(report_page({"fast": fast, "slow": slow}))
    for title, name in (("Time to first token", "ttft"), ("Gap between tokens", "itl"), ("End to end", "e2e_latency")):
        traces = drawn[title].traces
        assert traces["fast"]["y"] == getattr(fast, name).percentiles
        assert traces["slow"]["y"] == getattr(slow, name).percentiles
        assert traces["slow"]["x"] == traces["fast"]["x"]
        assert traces["fast"]["customdata"][:2] == ["min", "p1"]
        assert drawn[title].note == "drawn from the samples at 101 percentiles"


def test_each_nine_has_the_same_room() -> None:
    axis = charts_of(report_page([made()]))["Time to first token"].layout["xaxis"]
    places = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    assert list(places) == ["min", "p50", "p75", "p90", "p95", "p99", "max"]
    assert places["min"] == 0
    assert places["p99"] - places["p90"] == pytest.approx(places["p90"])
    assert axis["range"] == [0, places["max"]]


def test_a_report_with_its_requests_is_drawn_from_every_sample() -> None:
    report = made(requests=300, per_request=True)
    assert report.per_request is not None
    chart = charts_of(report_page([report]))["Time to first token"]
    assert chart.note == "drawn from every request"
    samples = sorted(one.ttft_ms for one in report.per_request if one.status == "completed" and one.ttft_ms is not None)
    (line,) = chart.figure["data"]
    assert set(line["y"]) <= set(samples)
    assert line["y"][-20:] == samples[-20:], "the tail is whole"
    assert line["x"] == sorted(line["x"])
    assert charts_of(report_page([report]))["Gap between tokens"].note == "drawn from the samples at 101 percentiles"


def test_a_distribution_without_all_percentiles_is_drawn_by_those_it_has() -> None:
    report = evolve(make_report(Samples()), ttft=Distribution(9, 3.0, 1.0, 9.0, 3.0, 4.0, 5.0, 6.0, 8.0, 1.0))
    (line,) = charts_of(report_page([report]))["Time to first token"].figure["data"]
    assert line["y"] == [1.0, 3.0, 4.0, 5.0, 6.0, 8.0, 9.0]
    assert line["customdata"] == ["min", "p50", "p75", "p90", "p95", "p99", "max"]


def test_latency_over_many_magnitudes_has_a_logarithmic_axis() -> None:
    near = Distribution.of([10.0, 11.0, 12.0])
    far = Distribution.of([0.0, 1.0, 10.0, 1000.0])
    drawn = charts_of(report_page([evolve(make_report(Samples()), ttft=far, e2e_latency=near)]))
    assert drawn["Time to first token"].layout["yaxis"]["type"] == "log"
    assert drawn["Time to first token"].layout["yaxis"]["title"]["text"] == "ms, logarithmic"
    assert drawn["End to end"].layout["yaxis"]["rangemode"] == "tozero"


def look(trace: dict[str, object]) -> str:
    return json.dumps(trace["line"])


def test_33_lines_differ_and_their_legend_scrolls() -> None:
    chart = charts_of(page_of("33 runs"))["Time to first token"]
    assert len({look(trace) for trace in chart.figure["data"]}) == 33
    legend = chart.layout["legend"]
    assert chart.layout["showlegend"]
    assert 0 < legend["maxheight"] < chart.layout["height"] - 250
    assert chart.layout["hovermode"] == "closest", "one box for 33 lines would cover them"


# Over time


def test_series_are_drawn_over_the_time_of_the_replay() -> None:
    report = made(requests=100)
    assert report.series is not None
    drawn = charts_of(report_page([report]))
    assert list(drawn["Requests"].traces) == ["arrivals", "completions"]
    assert list(drawn["Time to first token, by arrival"].traces) == ["mean", "p99"]
    running = drawn["In flight"].traces["running"]
    assert running["y"][:9] == report.series.running[:9]
    assert running["x"][0] == pytest.approx(5 / 60 if "min" in unit_of(drawn["In flight"]) else 5)
    several = charts_of(report_page({"a": report, "b": made(2)}))
    assert {"Requests: arrivals", "Requests: completions", "In flight", "Output"} <= set(several)
    assert list(several["In flight"].traces) == ["a", "b"]
    assert several["In flight"].traces["a"]["y"] == running["y"]


def unit_of(chart: ShownChart) -> str:
    text: str = chart.layout["xaxis"]["title"]["text"]
    return text


@pytest.mark.parametrize(("seconds", "unit"), [(1, "ms"), (105, "s"), (1005, "min"), (10_005, "h")])
def test_time_ends_with_the_replay_in_a_unit_that_suits(seconds: int, unit: str) -> None:
    samples = Samples()
    sample = samples.arrived("r", 0.0, input_tokens=1)
    sample.tokens(seconds * 1000.0)
    samples.ended(sample, seconds * 1000.0)
    chart = charts_of(report_page([make_report(samples)]))["In flight"]
    assert unit_of(chart) == f"time of the replay, {unit}"
    of_unit = {"ms": 1000, "s": 1, "min": 1 / 60, "h": 1 / 3600}[unit]
    assert chart.layout["xaxis"]["range"] == [0, pytest.approx(seconds * of_unit)]


def test_a_moment_at_the_end_gives_no_towering_rate() -> None:
    samples = Samples(interval_ms=1000)
    for at in range(5):
        sample = samples.arrived("r", at * 1000.0, input_tokens=1)
        sample.tokens(at * 1000.0 + 5)
        samples.ended(sample, at * 1000.0 + 5)
    chart = charts_of(report_page([make_report(samples)]))["Requests"]
    assert chart.traces["completions"]["y"] == [1.0, 1.0, 1.0, 1.0]
    assert "completions: 1.00 to 1.00" in chart.label


def test_long_series_are_shortened_and_noted() -> None:
    samples = Samples(interval_ms=1)
    samples.worker_joined(0, 0)
    for at in range(0, 4000, 2):
        sample = samples.arrived("r", float(at), input_tokens=1)
        sample.routed(0, at)
        sample.tokens(at + 1.0)
        samples.ended(sample, at + 1.0)
    page = report_page([make_report(samples)])
    drawn = charts_of(page)
    assert drawn["Requests"].note == "a point is the greatest of 4 intervals"
    assert len(drawn["Requests"].traces["arrivals"]["y"]) == 1000
    assert drawn["Hit rate"].note == "a cell is the mean of 17 intervals"
    assert len(drawn["Hit rate"].figure["data"][0]["z"][0]) <= 240


# Workers


def test_each_worker_has_a_row_in_the_maps_and_a_bar_in_the_totals() -> None:
    report = made(workers=8)
    assert report.series is not None
    drawn = charts_of(report_page([report]))
    (heat,) = drawn["Load: requests running"].figure["data"]
    assert heat["y"] == [str(at) for at in range(8)]
    assert heat["z"][3] == pytest.approx(report.series.workers[3].load, rel=1e-3)
    (bars,) = drawn["Requests by worker"].figure["data"]
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {str(one.worker): one.requests for one in report.workers}


def test_a_cell_without_a_prompt_is_empty() -> None:
    (heat,) = charts_of(report_page([made(requests=5, workers=3)]))["Hit rate"].figure["data"]
    assert any(cell is None for row in heat["z"] for cell in row)
    assert (heat["zmin"], heat["zmax"]) == (0, 1)


def test_workers_of_both_roles_can_be_switched_and_one_without_prompts_has_no_hit_rate() -> None:
    traces = charts_of(report_page([made(workers=3, prefill=2)]))["Hit rate by worker"].traces
    assert traces["prefill"]["x"] == ["prefill 0", "prefill 1"]
    assert None not in traces["prefill"]["y"]
    assert traces["decode"]["y"] == [None, None, None]


def test_very_many_workers_share_rows_but_keep_their_bars() -> None:
    drawn = charts_of(report_page([made(workers=200)]))
    (heat,) = drawn["Load: requests running"].figure["data"]
    assert len(heat["z"]) == 50
    assert heat["y"][0] == "0 to 3"
    assert "a row is the mean of 4 workers" in drawn["Load: requests running"].note
    assert len(drawn["Running by worker, mean"].figure["data"][0]["y"]) == 200


def test_runs_have_the_same_scales() -> None:
    low, high = made(requests=20, workers=4), made(requests=400, workers=4)
    found: dict[str, list[object]] = {"Requests by worker": [], "Load: requests running": []}
    for runs in ({"low": low, "high": high}, {"high": high, "low": low}):
        drawn = charts_of(report_page(runs))
        found["Requests by worker"].append(drawn["Requests by worker"].layout["yaxis"]["range"])
        found["Load: requests running"].append(drawn["Load: requests running"].figure["data"][0]["zmax"])
    for first, second in found.values():
        assert first == second


def test_the_workers_of_many_runs_are_folded() -> None:
    assert report_page({f"run {at}": made(at) for at in range(4)}).count("<details open>") == 4
    assert "<details open>" not in report_page({f"run {at}": made(at) for at in range(5)})


def test_every_chart_is_described_in_words() -> None:
    drawn = charts_of(report_page({"a": made(), "b": made(2)}))
    labels = [chart.label for chart in drawn.values()]
    assert len(set(labels)) == len(labels)
    first = made().ttft
    assert re.match(rf"Time to first token\. a: {first.min:.2f} to [\d,.]+; b: ", drawn["Time to first token"].label)


def test_a_page_of_a_report_from_json_with_other_numbers_still_comes() -> None:
    plain = json.loads(made().to_json())
    plain |= {"wall_time_ms": 12.5, "goodput_completed_requests": 1}
    plain |= {"goodput_request_throughput_rps": 2.5, "goodput_output_throughput_tok_s": 3.5}
    page = report_page([Report.from_json(json.dumps(plain))])
    assert cells(page, "Good requests/s") == ["2.50"]
    assert cells(page, "Time of the machine (s)") == ["0.0125"]
