"""A report as JSON and as a table of text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from pipeline import InvalidArgument
from serving.replay import Limits, Report, Samples, make_report, report_text
from serving.replay.report import Distribution

STATISTICS = ("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std")


def report(**settings: Any) -> Report:
    samples = Samples()
    samples.worker_joined(0, 0)
    for at in range(5):
        sample = samples.arrived(f"r{at}", at * 100.0, input_tokens=64, session_id="s", turn_index=at)
        sample.routed(0, at * 100.0 + 1)
        for token in range(4):
            sample.tokens(at * 100.0 + 17.3 + token * 6.1)
        samples.ended(sample, at * 100.0 + 40)
    return make_report(samples, settings={"router": "kv", "workers": 1}, **settings)


def plain_series() -> dict[str, Any]:
    plain: dict[str, Any] = report().to_plain()["series"]
    return plain


def test_the_figures_stand_at_the_top_level_under_their_names() -> None:
    """Requests are null unless they are wanted."""
    plain = json.loads(report().to_json())
    for name in ("ttft", "ttst", "tpot", "itl", "e2e_latency"):
        assert {f"{figure}_{name}_ms" for figure in STATISTICS} <= plain.keys()
    assert {f"{figure}_output_token_throughput_per_user" for figure in STATISTICS} <= plain.keys()
    assert {
        "num_requests",
        "completed_requests",
        "total_input_tokens",
        "total_output_tokens",
        "duration_ms",
        "request_throughput_rps",
        "output_throughput_tok_s",
        "prefix_cache_reused_ratio",
        "first_admission_prefix_cache_reused_ratio",
        "worker_seconds",
        "gpu_hours",
        "processed_tokens",
        "load_balance_max_over_mean",
    } <= plain.keys()
    assert plain["max_itl_ms"] == report().itl.max
    assert plain["per_request"] is None
    assert plain["settings"] == {"router": "kv", "workers": 1}
    assert plain["workers"][0]["requests"] == 5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"per_request": True, "limits": Limits(ttft_ms=1e3), "wall_time_ms": 12.0},
        {"series": False},
    ],
)
def test_a_report_comes_back_from_its_json(settings: dict[str, Any]) -> None:
    made = report(**settings)
    again = Report.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()


def test_an_empty_report_comes_back_too() -> None:
    made = make_report(Samples())
    assert Report.from_json(made.to_json()) == made
    assert Report.from_json(Report().to_json()) == Report()


def test_the_same_replay_gives_the_same_bytes_and_no_time_on_the_wall() -> None:
    assert report().to_json() == report().to_json()
    assert b"wall" not in report().to_json()
    assert b'"goodput' not in report().to_json()
    assert json.loads(report(wall_time_ms=5.0).to_json())["wall_time_ms"] == 5.0


def test_every_figure_has_a_line() -> None:
    lines = report().to_json().decode().splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    assert all(json.loads("{" + line.rstrip(",") + "}") for line in lines[1:-1])


def test_a_figure_is_found_by_its_name() -> None:
    made = report()
    assert made.value("p99_ttft_ms") == made.ttft.p99
    assert made.value("prefix_cache_reused_ratio") == 0.0
    with pytest.raises(InvalidArgument, match="no figure 'p98_ttft_ms'"):
        made.value("p98_ttft_ms")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"mean_ttft_ms": "fast"}, "ttft.mean"),
        ({"num_requests": 1.5}, "num_requests"),
        ({"workers": [{}]}, "workers[0].worker"),
        ({"series": {"interval_ms": 1}}, "series.arrivals"),
        ({"series": {**plain_series(), "interval_ms": 0}}, "series.interval_ms"),
    ],
)
def test_an_invalid_report_is_refused_by_field(change: dict[str, Any], place: str) -> None:
    plain = {**json.loads(report().to_json()), **change}
    with pytest.raises(InvalidArgument) as caught:
        Report.from_json(json.dumps(plain))
    assert caught.value.field == place


def test_a_report_has_every_figure_but_may_have_more() -> None:
    plain = json.loads(report().to_json())
    assert Report.from_json(json.dumps({**plain, "tomorrow": 1})) == report()
    for key in ("p99_ttft_ms", "itl_samples", "load_balance_cv", "per_request", "duration_ms"):
        with pytest.raises(InvalidArgument, match=f"has no {key}"):
            Report.from_json(json.dumps({name: value for name, value in plain.items() if name != key}))
    for text in ("[]", "{", "5"):
        with pytest.raises(InvalidArgument):
            Report.from_json(text)


def test_the_table_has_our_title_thousands_separators_and_two_decimals() -> None:
    made = evolve(
        report(),
        ttft=Distribution.of([18.264]),
        request_throughput_rps=255.54,
        output_throughput_tok_s=10944.03,
        prefix_cache_reused_ratio=0.3587,
        first_admission_prefix_cache_reused_ratio=0.1234,
    )
    text = report_text(made)
    rows = {line.split("  ")[1].strip(): line.split()[-8:] for line in text.splitlines() if line.startswith("  ")}
    assert "Penstock replay" in text
    assert rows["figure"] == ["avg", "min", "max", "p99", "p90", "p75", "p50", "std"]
    assert rows["Time to first token (ms)"] == [*["18.26"] * 7, "0.00"]
    assert rows["Output tokens/s"] == ["10,944.03", *["N/A"] * 7]
    assert rows["Requests/s"] == ["255.54", *["N/A"] * 7]
    assert (rows["Prefix reuse"][0], rows["Prefix reuse, first admission"][0]) == ("0.36", "0.12")


def test_the_table_has_the_median() -> None:
    skewed = Distribution.of([1.0, 2.0, 3.0, 4.0, 100.0])
    text = report_text(evolve(report(), ttft=skewed))
    names = next(line for line in text.splitlines() if "figure" in line).split()
    cells = next(line for line in text.splitlines() if "first token" in line).split()
    assert cells[-len(names) + 1 :][names.index("p50") - 1] == "3.00"


@pytest.mark.parametrize("width", [80, 97, 100, 120, 200])
def test_a_narrow_table_has_fewer_columns_and_no_cut_ones(width: int) -> None:
    large = Distribution.of([123_456.78, 234_567.89])
    made = report()
    workers = [evolve(one, input_tokens=123_456_789, output_tokens=9_876_543) for one in made.workers]
    text = report_text(evolve(made, ttft=large, workers=workers), width)
    tables = [line for line in text.splitlines() if line.startswith("  ")]
    assert max(map(len, tables)) <= width
    assert "…" not in text
    assert {"avg", "p50", "p99"} <= set(next(line for line in tables if "figure" in line).split())
    assert ("p75" in text) == (width == 200)
    assert "Time to first token (ms)" in text
    assert "123,456,789" in text


def test_a_figure_without_samples_is_not_shown_as_0() -> None:
    text = report_text(make_report(Samples()))
    assert next(line for line in text.splitlines() if "first token" in line).split()[-8:] == ["N/A"] * 8
    assert "KV transfer" not in text
    assert "0 requests, 0 completed; 0 input" in text


def test_the_table_shows_failures_only_if_there_are_any() -> None:
    made = report(limits=Limits(ttft_ms=1))
    assert "5 requests, 5 completed; 320 input and 20 output tokens in 0.44 s" in report_text(made)
    assert "Good requests/s" in report_text(made)
    bad = report_text(evolve(made, migrations=1234, unsent_requests=2, wall_time_ms=1500.0))
    assert "2 never sent, 1,234 migrations" in bad
    assert "replayed in 1.50 s" in bad
