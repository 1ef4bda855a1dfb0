"""The table of instruments, bucket bounds, names, and what is recorded."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pipeline import InvalidArgument
from pipeline.telemetry import Buckets, Instrument, Metrics
from pipeline.telemetry.metrics import TABLE, Family, component_name, sanitize_label, sanitize_name

REQUEST: dict[str, Any] = {"model": "M", "endpoint": "chat_completions", "request_type": "unary"}


class Recorded:
    """A meter and what was recorded with it."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meter = MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test")

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: list(metric.data.data_points) for metric in metrics}


# -- buckets


def test_bounds_grow_evenly_and_are_rounded() -> None:
    assert Buckets(1, 512, 10).bounds() == (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)


@pytest.mark.parametrize(("count", "bounds"), [(0, ()), (1, (0,)), (2, (0, 9))])
def test_few_buckets(count: int, bounds: tuple[float, ...]) -> None:
    assert Buckets(1, 9, count).bounds() == bounds


def test_halves_are_rounded_up() -> None:
    assert Buckets(6.25, 100, 5).bounds() == (0, 13, 25, 50, 100)


def test_bounds_that_round_to_the_same_are_one() -> None:
    assert Buckets(1, 1.1, 20).bounds() == (0, 1, 1.1)


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 1e6), st.integers(2, 512))
def test_bounds_rise_from_zero(low: float, factor: float, count: int) -> None:
    bounds = Buckets(low, low * factor, count).bounds()
    assert bounds[0] == 0
    assert list(bounds) == sorted(set(bounds))
    assert len(bounds) <= count
    assert bounds[-1] == pytest.approx(low * factor, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Buckets(1, 512, 10)),
        ({"MIN": "2", "MAX": "8", "COUNT": "3"}, Buckets(2, 8, 3)),
        ({"COUNT": "0"}, Buckets(1, 512, 0)),
        ({"COUNT": "512"}, Buckets(1, 512, 512)),
        ({"COUNT": "513"}, Buckets(1, 512, 10)),
        ({"COUNT": "-1"}, Buckets(1, 512, 10)),
        ({"COUNT": "many", "MAX": "8"}, Buckets(1, 512, 10)),
        ({"MIN": "600"}, Buckets(1, 512, 10)),
        ({"MIN": "0"}, Buckets(1, 512, 10)),
        ({"MIN": "nan"}, Buckets(1, 512, 10)),
        ({"MAX": "inf"}, Buckets(1, 512, 10)),
        ({"MIN": "1e-300", "MAX": "1e300"}, Buckets(1, 512, 10)),
    ],
)
def test_the_environment_may_change_buckets_sensibly(changes: dict[str, str], expected: Buckets) -> None:
    environment = {f"DYN_METRICS_REQUEST_DURATION_SECONDS_{key}": value for key, value in changes.items()}
    assert Buckets(1, 512, 10).overridden("request_duration_seconds", environment) == expected
    assert Metrics(environment=environment).buckets("request_duration_seconds") == expected.bounds()


# -- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [("test metric", "dynamo_component_test_metric"), ("valid_name", "dynamo_component_valid_name")],
)
def test_a_component_metric_is_prefixed(name: str, expected: str) -> None:
    assert component_name(name) == expected


@pytest.mark.parametrize(
    ("name", "metric", "label"),
    [
        ("fine_1", "fine_1", "fine_1"),
        ("a:b", "a:b", "a_b"),
        ("a-b.c d", "a_b_c_d", "a_b_c_d"),
        ("1st", "_1st", "_1st"),
        ("__reserved", "__reserved", "reserved"),
        ("____deep", "____deep", "deep"),
        ("___odd", "___odd", "_odd"),
        ("__1", "__1", "_1"),
        ("é", None, None),
        ("", None, None),
        ("___", None, None),
    ],
)
def test_names_are_made_valid(name: str, metric: str | None, label: str | None) -> None:
    for sanitize, expected in ((sanitize_name, metric), (sanitize_label, label)):
        if expected is None:
            with pytest.raises(InvalidArgument):
                sanitize(name)
        else:
            assert sanitize(name) == expected


@given(st.text())
def test_a_sanitized_name_is_valid_and_stays(name: str) -> None:
    for sanitize, valid in ((sanitize_name, r"[A-Za-z_:][A-Za-z0-9_:]*"), (sanitize_label, r"[A-Za-z_][A-Za-z0-9_]*")):
        try:
            cleaned = sanitize(name)
        except InvalidArgument:
            continue
        assert re.fullmatch(valid, cleaned)
        assert sanitize(cleaned) == cleaned
        assert sanitize is sanitize_name or not cleaned.startswith("__")


# -- the table

ROWS = [(family, row) for family in get_args(Family) for row in TABLE[family]]


@pytest.mark.parametrize(("family", "row"), ROWS, ids=[f"{family}-{row.name}" for family, row in ROWS])
def test_a_row_is_consistent(family: Family, row: Instrument) -> None:
    assert sanitize_name(row.name) == row.name
    assert all(sanitize_label(label) == label for label in row.labels)
    assert row.description
    assert bool(row.bounds({})) == (row.kind == "histogram")
    assert row.name.endswith("_total") == (row.kind == "counter")
    assert row.name.endswith("_seconds") == (row.unit == "s")
    assert [other.name for other in TABLE[family]].count(row.name) == 1


@pytest.mark.parametrize(("family", "row"), ROWS, ids=[f"{family}-{row.name}" for family, row in ROWS])
def test_every_row_can_be_recorded(family: Family, row: Instrument) -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter, family=family)
    assert recorded.points() == {}
    labels = dict.fromkeys(row.labels, "Value")
    for _ in range(2):
        {"histogram": metrics.record, "gauge": metrics.set}.get(row.kind, metrics.add)(row.name, 3, **labels)
    ((name, (point,)),) = recorded.points().items()
    assert name == f"dynamo_{family}_{row.name}" == metrics.full_name(row.name)
    assert dict(point.attributes) == labels
    if row.kind == "histogram":
        assert (point.count, point.sum) == (2, 6)
        assert tuple(point.explicit_bounds) == metrics.buckets(row.name)
    else:
        assert point.value == (3 if row.kind == "gauge" else 6)


# -- recording


def test_a_gauge_goes_down_again() -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter)
    metrics.add("inflight_requests", model="m")
    metrics.add("inflight_requests", -1, model="m")
    assert recorded.points()["dynamo_frontend_inflight_requests"][0].value == 0


@pytest.mark.parametrize(
    ("method", "name", "labels"),
    [
        ("add", "no_such_metric", {}),
        ("record", "requests_started_total", REQUEST),
        ("add", "request_duration_seconds", {"model": "m"}),
        ("add", "requests_started_total", {"model": "m"}),
        ("add", "requests_started_total", REQUEST | {"more": "x"}),
    ],
)
def test_what_is_not_in_the_table_is_an_error_at_once(method: str, name: str, labels: dict[str, str]) -> None:
    recorded = Recorded()
    with pytest.raises(ValueError, match=name):
        getattr(Metrics(recorded.meter), method)(name, 1, **labels)
    assert recorded.points() == {}


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [(None, "dynamo_frontend"), ("", "dynamo_frontend"), ("  ", "dynamo_frontend"), ("my service", "my_service")],
)
def test_the_prefix_may_be_another(prefix: str | None, expected: str) -> None:
    recorded = Recorded()
    Metrics(recorded.meter, prefix=prefix).add("requests_started_total", **REQUEST)
    assert list(recorded.points()) == [f"{expected}_requests_started_total"]


def test_without_a_meter_nothing_needs_to_be_configured() -> None:
    Metrics().add("requests_started_total", **REQUEST)


# -- gauges


def test_a_gauge_shows_what_was_set_last_and_may_lack_optional_labels() -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter, family="component")
    labels = {"dynamo_namespace": "n", "dynamo_component": "c", "dynamo_endpoint": "e", "worker_id": "a"}
    metrics.set("total_blocks", 5, **labels, dp_rank="0")
    metrics.set("total_blocks", 3, **labels, dp_rank="0")
    metrics.set("total_blocks", 7, **labels, dp_rank="1", model="m")
    points = recorded.points()["dynamo_component_total_blocks"]
    assert [(point.value, point.attributes.get("model")) for point in points] == [(3, None), (7, "m")]


def test_a_gauge_wants_its_other_labels() -> None:
    metrics = Metrics(Recorded().meter, family="component")
    with pytest.raises(ValueError, match="labels"):
        metrics.set("total_blocks", 5, dp_rank="0")
    with pytest.raises(ValueError, match="is a gauge"):
        metrics.add("total_blocks", 5, dp_rank="0")


# -- rows of one's own

OWN = [
    Instrument("done_total", "counter", "", "What is done", ("pool",)),
    Instrument("size", "histogram", "", "How large it was", ("pool",), (1.0, 2.0)),
    Instrument("waiting", "observed", "", "Waiting requests", ("pool", "rank"), optional=("rank",)),
]


def test_rows_of_ones_own_replace_the_familys() -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter, prefix="mine", rows=OWN)
    metrics.add("done_total", pool="a")
    assert list(recorded.points()) == ["mine_done_total"]
    with pytest.raises(ValueError, match="requests_started_total"):
        metrics.add("requests_started_total", **REQUEST)


def test_a_recorder_adds_or_records_for_its_labels() -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter, rows=OWN)
    for name in ("done_total", "size"):
        record = metrics.recorder(name, pool="a")
        record(1)
        record(3)
    points = {name: points[0] for name, points in recorded.points().items()}
    assert points["dynamo_frontend_done_total"].value == 4
    assert (points["dynamo_frontend_size"].count, points["dynamo_frontend_size"].sum) == (2, 4)
    assert {str(dict(point.attributes)) for point in points.values()} == {"{'pool': 'a'}"}


@pytest.mark.parametrize(("name", "labels"), [("done_total", {}), ("done_total", {"rank": "0"}), ("waiting", {})])
def test_a_recorder_is_refused_at_once(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=name):
        Metrics(Recorded().meter, rows=OWN).recorder(name, **labels)


def test_an_observed_gauge_shows_the_values_of_the_moment_and_no_series_that_is_gone() -> None:
    recorded, waiting = Recorded(), {"a": 1, "b": 2}
    metrics = Metrics(recorded.meter, rows=OWN)
    forget = metrics.observe("waiting", lambda: [({"pool": pool}, count) for pool, count in waiting.items()])
    assert _by_pool(recorded) == {"a": 1, "b": 2}
    del waiting["a"]
    waiting["b"] = 5
    assert _by_pool(recorded) == {"b": 5}
    forget()
    forget()
    assert _by_pool(recorded) == {}


def test_several_may_observe_one_instrument_of_a_meter() -> None:
    """A meter takes callbacks only with an instrument's first creation."""
    recorded = Recorded()
    meter = Metrics(recorded.meter).meter
    forget = [
        Metrics(meter, rows=OWN).observe("waiting", lambda pool=pool: [({"pool": pool}, 1)])  # type: ignore[misc]
        for pool in "ab"
    ]
    assert _by_pool(recorded) == {"a": 1, "b": 1}
    forget[0]()
    assert _by_pool(recorded) == {"b": 1}


def test_a_failing_observation_is_logged_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded()
    metrics = Metrics(recorded.meter, rows=OWN)
    metrics.observe("waiting", lambda: [({"pool": "a"}, 1 // 0)])
    metrics.observe("waiting", lambda: [({"pole": "a"}, 1)])
    metrics.observe("waiting", lambda: [({"pool": "b", "rank": "0"}, 2)])
    assert _by_pool(recorded) == {"b": 2}
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_only_an_observed_gauge_is_observed() -> None:
    with pytest.raises(ValueError, match="done_total is a counter"):
        Metrics(Recorded().meter, rows=OWN).observe("done_total", list)


def test_a_gauge_may_be_observed_before_anything_is_configured() -> None:
    Metrics(rows=OWN).observe("waiting", list)()


def _by_pool(recorded: Recorded) -> dict[str, Any]:
    points = recorded.points().get("dynamo_frontend_waiting", [])
    return {point.attributes["pool"]: point.value for point in points}
