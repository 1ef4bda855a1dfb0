"""CountingMeter shows what the SDK and its exporter show for the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock, Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from pipeline.telemetry import Instrument, Metrics
from serving.http.metrics.counting_meter import SERIES_MAX, BucketCounts, CountingMeter

ROWS = [
    Instrument("ended_total", "counter", "", "Requests that ended", ("model", "verdict")),
    Instrument("events_applied", "counter", "", "Events", ("model",), optional=("model",)),
    Instrument("open", "up_down", "", "Open requests", ("model",)),
    Instrument("duration_seconds", "histogram", "s", "How long", ("model",), (0.0, 1.0, 2.5)),
    Instrument("overhead_ms", "histogram", "ms", "Overhead", (), (0.5,)),
    Instrument("size", "histogram", "By", "Size", ("model",), (10.0, 100.0)),
]
MODELS = st.sampled_from(["m", "other", 'with "quotes"\\', ""])
NUMBERS = st.integers(0, 200) | st.floats(0, 200, allow_nan=False)


class Page:
    """The metrics of a program by the SDK alone, or with counting in between."""

    def __init__(self, *, counts: bool) -> None:
        self.registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self.registry)
        self.provider = MeterProvider([reader], shutdown_on_exit=False)
        self.meter: Any = self.provider.get_meter("penstock")
        if counts:
            self.meter = CountingMeter(self.meter)
            self.registry.register(self.meter)
        self.metrics = Metrics(self.meter, prefix="p", rows=ROWS)

    def families(self) -> list[list[str]]:
        """Return the lines of each family, in a fixed order."""
        found: list[list[str]] = []
        for line in generate_latest(self.registry).decode().splitlines():
            if line.startswith("# HELP"):
                found.append([])
            found[-1].append(line)
        return sorted([family[:2] + _sorted(family[2:]) for family in found])


def _sorted(lines: list[str]) -> list[str]:
    """Sort samples by their labels; the buckets of a series stay in their order."""
    return sorted(lines, key=lambda line: line.partition("le=")[0])


def both(apply: Callable[[Page], object]) -> list[list[list[str]]]:
    pages = [Page(counts=counts) for counts in (False, True)]
    for page in pages:
        apply(page)
    return [page.families() for page in pages]


@st.composite
def _recorded(draw: st.DrawFn) -> tuple[str, Mapping[str, str], float]:
    row = draw(st.sampled_from(ROWS))
    names = [name for name in row.labels if name not in row.optional or draw(st.booleans())]
    value: float = draw(NUMBERS)
    if row.kind == "up_down" and draw(st.booleans()):
        value = -value
    return row.name, {name: draw(MODELS) for name in names}, value


@given(st.lists(st.tuples(_recorded(), st.booleans()), max_size=30))
def test_the_page_is_that_of_the_sdk(values: list[tuple[tuple[str, Mapping[str, str], float], bool]]) -> None:
    def apply(page: Page) -> None:
        for (name, labels, value), is_bound in values:
            if is_bound:
                page.metrics.recorder(name, **labels)(value)
            elif name in ("duration_seconds", "overhead_ms", "size"):
                page.metrics.record(name, value, **labels)
            else:
                page.metrics.add(name, value, **labels)

    by_sdk, by_counting = both(apply)
    assert by_counting == by_sdk


@pytest.mark.parametrize("count", [255, 256, 257, 1000])
def test_many_values_of_a_histogram_are_those_of_the_sdk(count: int) -> None:
    def apply(page: Page) -> None:
        record = page.metrics.recorder("duration_seconds", model="m")
        for number in range(count):
            record(number % 7 / 2)

    by_sdk, by_counting = both(apply)
    assert by_counting == by_sdk


def test_instruments_and_labels_of_others_are_shown_as_by_the_sdk(caplog: pytest.LogCaptureFixture) -> None:
    def apply(page: Page) -> None:
        page.meter.create_counter("a.b", "1", "c").add(1, {"d.e": 1, "f": True})
        page.meter.create_up_down_counter("u", "ms").add(-1)
        page.meter.create_histogram("h", "s").record(7)
        page.meter.create_gauge("g").set(3, {"a": "b"})
        page.meter.create_observable_gauge("o", [lambda _: []])
        page.meter.create_counter("back_total").add(-1)
        page.meter.create_histogram("negative").record(-1)

    by_sdk, by_counting = both(apply)
    assert by_counting == by_sdk
    assert "cannot go back" in caplog.text


def test_instruments_of_one_name_share_their_series_and_kinds_exclude_each_other() -> None:
    page = Page(counts=True)
    for _ in range(2):
        Metrics(page.meter, prefix="p", rows=ROWS).add("open", model="m")
    assert page.families()[0][2] == 'p_open{model="m"} 2.0'
    with pytest.raises(ValueError, match="another kind"):
        page.meter.create_histogram("p_open")


def test_series_are_bounded_and_those_beyond_are_counted_together() -> None:
    page = Page(counts=True)
    for number in range(SERIES_MAX + 10):
        page.metrics.add("open", model=str(number))
    ((_, _, *lines),) = page.families()
    assert len(lines) == SERIES_MAX
    assert 'p_open{model="",otel_metric_overflow="true"} 11.0' in lines


def test_values_are_counted_in_the_bucket_that_holds_them() -> None:
    counts = BucketCounts([0.0, 1.0, 2.0], Lock())
    for value, times in ((0.0, 1), (0.5, 2), (1.0, 4), (1.5, 8), (9.0, 16)):
        counts.record(value, times)
    assert counts.counts == [1, 6, 8, 16]
    assert counts.sum == pytest.approx(0 + 1 + 4 + 12 + 144)
    assert counts.buckets() == [("0.0", 1), ("1.0", 7), ("2.0", 15), ("+Inf", 31)]


def test_values_of_several_threads_are_all_counted() -> None:
    page = Page(counts=True)
    add, record = page.metrics.recorder("open", model="m"), page.metrics.recorder("duration_seconds", model="m")

    def count() -> None:
        for _ in range(20_000):
            add(1)
            record(1)

    threads = [Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = generate_latest(page.registry).decode()
    assert 'p_open{model="m"} 80000.0' in text
    assert 'p_duration_seconds_count{model="m"} 80000.0' in text
