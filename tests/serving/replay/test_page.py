"""Reports as a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
from attrs import evolve

from serving.replay import Distribution, Report, Samples, Status, make_report
from serving.replay.page import report_page

VOID = {"meta", "br"}
NASTY = "<script>alert(\"1\")</script> & 'two' \x00\x0b\ud800 ]]>"


class Reader(HTMLParser):
    """Notes the text and the attributes of a page, and fails where an element is not closed as it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.append((self.open[-1], data.strip()))

    def of(self, tag: str) -> list[str]:
        return [text for its_tag, text in self.texts if its_tag == tag]


def made(
    seed: int = 1, *, requests: int = 60, workers: int = 2, prefill: int = 0, slow: float = 1.0, **settings: Any
) -> Report:
    random, samples = Random(seed), Samples()
    for worker in range(workers):
        samples.worker_joined(worker, 0)
    for worker in range(prefill):
        samples.worker_joined(worker, 0, "prefill")
    now = 0.0
    for at in range(requests):
        now += random.expovariate(1 / 1500)
        sample = samples.arrived(f"r{at}", now, input_tokens=random.randrange(1, 9000))
        if prefill:
            sample.routed(random.randrange(prefill), now, "prefill")
        sample.routed(random.randrange(workers), now + 2)
        sample.cached_tokens = sample.input_tokens // random.randrange(1, 9)
        token = now + 2 + slow * (sample.input_tokens - sample.cached_tokens) * 0.05
        for _ in range(random.randrange(1, 40)):
            sample.tokens(token)
            token += slow * random.lognormvariate(2, 0.4)
        samples.ended(sample, token, Status.FAILED if at % 29 == 28 else Status.COMPLETED)
    return make_report(samples, settings={"router": "kv", "workers": workers, **settings})


def cells(page: str, row: str) -> list[str]:
    """The text of the cells of the first row with this heading."""
    found = re.search(rf'<th scope="row">{re.escape(row)}</th>(.*?)</tr>', page)
    assert found is not None, row
    return [re.sub("<[^>]+>", "", cell) for cell in re.findall("<td>(.*?)</td>", found[1])]


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL)]


def charts(page: str) -> dict[str, ElementTree.Element]:
    """By title. Every chart says in words what it shows."""
    found: dict[str, ElementTree.Element] = {}
    said: set[str] = set()
    for figure in re.findall(r"<figure>.*?</figure>", page, re.DOTALL):
        title = re.search("<strong>(.*?)</strong>", figure)
        svg = next(one for one in pictures(figure) if one.get("role") == "img")
        assert title is not None
        assert (svg.get("aria-label") or "") not in said, "each says something of its own"
        said.add(svg.get("aria-label") or "")
        assert (svg.get("aria-label") or "").strip()
        found[title[1]] = svg
    return found


def marks(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in svg.iter() if kind in (one.get("class") or "").split()]


def numbers_of(svg: ElementTree.Element) -> list[float]:
    """Every coordinate of every mark."""
    paths = " ".join(one.get("d") or "" for one in svg.iter())
    return [float(part) for part in re.findall(r"-?[\d.]+(?:e-?\d+)?", paths)]


CASES = {
    "no reports": {},
    "an empty report": {"a": make_report(Samples())},
    "a report of nothing": {"a": Report()},
    "without series": {"a": evolve(made(), series=None)},
    "one request": {"a": made(requests=1, workers=1)},
    "8 workers": {"a": made(workers=8)},
    "64 workers": {"a": made(workers=64, requests=200)},
    "200 workers": {"a": made(workers=200)},
    "pools": {"a": made(workers=3, prefill=2)},
    "several": {f"run {at}": made(at, workers=at) for at in range(1, 11)},
    "one of them empty": {"a": made(), "b": make_report(Samples()), "c": Report()},
    "empty ones": {"a": Report(), "b": Report()},
}


@pytest.mark.parametrize("name", CASES)
def test_a_page_is_well_formed_and_needs_nothing_else(name: str) -> None:
    page = report_page(CASES[name])
    reader = Reader(page)
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(reader.tags)
    assert not {one for _, one, _ in reader.attributes} & {"src", "href", "xlink:href", "srcset", "style"}
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"\b(nan|inf|None)\b", page)
    for svg in charts(page).values():
        _, _, width, height = map(float, (svg.get("viewBox") or "").split())
        assert all(0 <= number <= max(width, height) for number in numbers_of(svg))


@pytest.mark.parametrize("name", ["64 workers", "several"])
def test_the_same_reports_give_the_same_page(name: str) -> None:
    again = {run: Report.from_json(report.to_json()) for run, report in CASES[name].items()}
    assert report_page(CASES[name]) == report_page(again)


def test_names_and_settings_are_shown_and_never_obeyed() -> None:
    report = evolve(made(), settings={"router": NASTY, NASTY: [NASTY]})
    page = report_page({NASTY: report, f"{NASTY}2": report})
    reader = Reader(page)
    assert "script" not in reader.tags
    page.encode()
    shown = "<script>alert(\"1\")</script> & 'two' \ufffd\ufffd? ]]>"
    assert shown in reader.of("th")
    assert cells(page, "router")[0].startswith("&lt;script&gt;alert(&quot;1&quot;)")


def test_reports_without_names_are_numbered() -> None:
    assert report_page([made(), made(2)]) == report_page({"run 1": made(), "run 2": made(2)})


def test_figures_have_thousands_separators() -> None:
    report = evolve(made(), completed_requests=12031, total_input_tokens=144793823, duration_ms=3_600_123.4)
    page = report_page([report])
    assert "12,031 of 60 requests completed, 144,793,823 input" in page
    assert "<dd>12,031</dd>" in page
    assert "<dd>3,600</dd>" in page


def test_a_comparison_gives_differences_in_percent_and_marks_the_best() -> None:
    base = made()
    faster = evolve(base, ttft=evolve(base.ttft, mean=base.ttft.mean / 2), output_throughput_tok_s=1.0)
    page = report_page({"base": base, "faster": faster})
    first, second = cells(page, "Time to first token, mean, ms")
    assert "★" not in first
    assert second.startswith("★")
    assert second.endswith("\N{MINUS SIGN}50.0 %")
    first, second = cells(page, "Output tokens/s")
    assert first.startswith("★")
    assert "★" not in second
    assert not any("★" in cell for cell in cells(page, "End to end, mean, ms")), "equal ones are all as good"
    assert "±0 %" in cells(page, "End to end, mean, ms")[1]


def test_a_run_without_tokens_is_not_the_fastest() -> None:
    page = report_page({"a": made(), "b": make_report(Samples()), "c": made(slow=2)})
    some, nothing, _ = cells(page, "Time to first token, mean, ms")
    assert some.startswith("★")
    assert nothing == "\N{EN DASH}"


def test_what_did_not_happen_in_any_run_has_no_row() -> None:
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


def test_every_run_is_a_line_in_the_charts_of_latency_on_one_scale() -> None:
    fast, slow = made(), made(slow=3)
    drawn = charts(report_page({"fast": fast, "slow": slow}))
    for title in ("Time to first token", "Gap between tokens", "End to end"):
        low, high = (numbers_of_line(line) for line in marks(drawn[title], "line"))
        assert len(low) == len(high) == 101
        assert all(above[1] <= below[1] for above, below in zip(high, low, strict=True)), "upwards is less in SVG"
        assert any(above[1] < below[1] for above, below in zip(high, low, strict=True))


def numbers_of_line(line: ElementTree.Element) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split())) for point in (line.get("d") or "").removeprefix("M").split("L")]


def test_a_distribution_without_all_percentiles_is_drawn_by_those_it_has() -> None:
    report = evolve(make_report(Samples()), ttft=Distribution(9, 3.0, 1.0, 9.0, 3.0, 4.0, 5.0, 6.0, 8.0, 1.0))
    drawn = charts(report_page([report]))
    (line,) = marks(drawn["Time to first token"], "line")
    assert len(numbers_of_line(line)) == 7


def test_latency_over_many_magnitudes_has_a_logarithmic_axis() -> None:
    near = Distribution.of([10.0, 11.0, 12.0])
    far = Distribution.of([0.0, 1.0, 10.0, 1000.0])
    page = report_page([evolve(make_report(Samples()), ttft=far, e2e_latency=near)])
    drawn = charts(page)
    assert "ms, logarithmic" in [text.text for text in marks(drawn["Time to first token"], "name")]
    assert "ms" in [text.text for text in marks(drawn["End to end"], "name")]


def test_series_are_drawn_over_the_time_of_the_replay() -> None:
    report = made(requests=100)
    assert report.series is not None
    drawn = charts(report_page([report]))
    assert len(marks(drawn["Requests"], "line")) == 2
    assert len(marks(drawn["Time to first token, by arrival"], "line")) == 2
    said = [title.text or "" for title in drawn["In flight"].iter() if title.tag.endswith("title")]
    assert said[0] == f"5.00 s: running {report.series.running[0]:#.3g}"
    several = charts(report_page({"a": report, "b": made(2)}))
    assert {"Requests: arrivals", "Requests: completions", "In flight", "Output"} <= set(several)
    assert len(marks(several["In flight"], "line")) == 2


def test_a_moment_at_the_end_gives_no_towering_rate() -> None:
    samples = Samples(interval_ms=1000)
    for at in range(5):
        sample = samples.arrived("r", at * 1000.0, input_tokens=1)
        sample.tokens(at * 1000.0 + 5)
        samples.ended(sample, at * 1000.0 + 5)
    label = charts(report_page([make_report(samples)]))["Requests"].get("aria-label") or ""
    assert "completions: 1.00 to 1.00 requests/s" in label


def test_long_series_are_shortened_and_say_so() -> None:
    samples = Samples(interval_ms=1)
    samples.worker_joined(0, 0)
    for at in range(0, 4000, 2):
        sample = samples.arrived("r", float(at), input_tokens=1)
        sample.routed(0, at)
        sample.tokens(at + 1.0)
        samples.ended(sample, at + 1.0)
    page = report_page([make_report(samples)])
    assert "a point is the greatest of 10 intervals" in page
    assert "a cell is the mean of 34 intervals" in page
    assert len(page) < 300_000


def test_each_worker_has_a_row_in_the_maps_and_a_column_in_the_totals() -> None:
    report = made(workers=8)
    drawn = charts(report_page([report]))
    said = [title.text or "" for title in drawn["Load: requests running"].iter() if title.tag.endswith("title")]
    assert [text.split(":")[0] for text in said] == [f"worker {at}" for at in range(8)]
    columns = marks(drawn["Requests by worker"], "bar")
    assert len(columns) == 8
    tips = [title.text for column in columns for title in column]
    assert tips == [f"worker {one.worker}: {one.requests}" for one in report.workers]


def test_a_worker_without_prompts_has_no_hit_rate() -> None:
    report = made(workers=3, prefill=2)
    drawn = charts(report_page([report]))
    names = [title.text or "" for bar in marks(drawn["Hit rate by worker"], "bar") for title in bar]
    assert [name.split(":")[0] for name in names] == ["worker prefill 0", "worker prefill 1"]


def test_very_many_workers_share_rows_but_keep_their_columns() -> None:
    page = report_page([made(workers=200)])
    drawn = charts(page)
    said = [title.text or "" for title in drawn["Load: requests running"].iter() if title.tag.endswith("title")]
    assert len(said) == 50
    assert said[0].startswith("worker 0 to 3:")
    assert "a row is the mean of 4 workers" in page
    assert len(marks(drawn["Running by worker, mean"], "bar")) == 200


def test_runs_have_the_same_scales() -> None:
    low, high = made(requests=20, workers=4), made(requests=400, workers=4)
    page = report_page({"low": low, "high": high})
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    both = [
        re.findall(r"<text [^>]*>([^<]*)</text>", one)
        for one in figures
        if "<strong>Requests by worker</strong>" in one
    ]
    assert len(both) == 2
    assert both[0] == both[1]


def test_a_page_of_a_report_from_json_with_other_numbers_still_comes() -> None:
    plain = json.loads(made().to_json())
    plain |= {"wall_time_ms": 12.5, "goodput_completed_requests": 1}
    plain |= {"goodput_request_throughput_rps": 2.5, "goodput_output_throughput_tok_s": 3.5}
    page = report_page([Report.from_json(json.dumps(plain))])
    assert cells(page, "Good requests/s") == ["2.50"]
    assert cells(page, "Took the machine, s") == ["0.0125"]
