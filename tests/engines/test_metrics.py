"""The metrics of a hosted engine, and the snapshots of its ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engines import ComponentSnapshot, SnapshotPublisher
from engines.publishing import EngineMetrics
from pipeline.protocols.kv import ActiveLoad
from pipeline.telemetry import Metrics

WORKER = {
    "dynamo_namespace": "dynamo",
    "dynamo_component": "backend",
    "dynamo_endpoint": "generate",
    "worker_id": "7",
    "model": "m",
    "model_name": "s",
}


class Gauges:
    """Return a meter and a function for its values, by name and rank."""

    def __init__(self, **labels: str) -> None:
        self._reader = InMemoryMetricReader()
        meter = MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test")
        self.engine = EngineMetrics(Metrics(meter, family="component"), {**WORKER, **labels})

    @property
    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name.removeprefix("dynamo_component_"): list(metric.data.data_points) for metric in metrics}

    @property
    def ranks(self) -> dict[tuple[str, str], float]:
        return {
            (name, point.attributes["dp_rank"]): point.value
            for name, points in self.points.items()
            for point in points
            if "dp_rank" in point.attributes
        }


def full(used: int, rate: float | None = None) -> ComponentSnapshot:
    return ComponentSnapshot(used, 100, used / 100, rate)


def test_the_named_ranks_are_shown_as_empty_from_the_start_but_for_their_hit_rate() -> None:
    gauges = Gauges()
    publisher = SnapshotPublisher(7, (0, 3), gauges.engine, lambda load: None)
    assert publisher.dp_ranks == [0, 3]
    assert gauges.ranks == {
        (name, rank): 0 for name in ("total_blocks", "gpu_cache_usage_percent") for rank in ("0", "3")
    }


def test_a_snapshot_is_shown_and_its_load_sent() -> None:
    gauges, sent = Gauges(), list[ActiveLoad]()
    publisher = SnapshotPublisher(7, [3], gauges.engine, sent.append)
    publisher.publish(3, full(25, 0.5))
    assert gauges.ranks == {
        ("total_blocks", "3"): 100,
        ("gpu_cache_usage_percent", "3"): 0.25,
        ("kv_cache_hit_rate", "3"): 0.5,
    }
    assert sent == [ActiveLoad(7, 3, kv_used_blocks=25)]


def test_an_unknown_hit_rate_leaves_the_last_one_and_zero_is_one() -> None:
    gauges = Gauges()
    publisher = SnapshotPublisher(7, [0], gauges.engine, lambda load: None)
    shown = []
    for rate in (0.5, None, 0.0):
        publisher.publish(0, full(1, rate))
        shown.append(gauges.ranks["kv_cache_hit_rate", "0"])
    assert shown == [0.5, 0.5, 0.0]


def test_a_rank_that_was_not_named_is_passed_over() -> None:
    gauges, sent = Gauges(), list[ActiveLoad]()
    publisher = SnapshotPublisher(7, [0], gauges.engine, sent.append)
    before = gauges.ranks
    publisher.publish(9, full(25, 0.5))
    assert gauges.ranks == before
    assert sent == []


def test_a_load_that_cannot_be_sent_warns_once_a_rank_and_is_shown_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "engines")

    def refuse(load: ActiveLoad) -> None:
        raise ConnectionError

    gauges = Gauges()
    publisher = SnapshotPublisher(7, [0, 1], gauges.engine, refuse)
    for rank in (0, 0, 1, 0):
        publisher.publish(rank, full(25))
    warning, debug = logging.WARNING, logging.DEBUG
    assert [record.levelno for record in caplog.records] == [warning, debug, warning, debug]
    assert gauges.ranks["gpu_cache_usage_percent", "0"] == 0.25


def test_empty_labels_are_left_out() -> None:
    gauges = Gauges(model="")
    gauges.engine.took("model_load", 1.5)
    (point,) = gauges.points["model_load_time_seconds"]
    assert point.value == 1.5
    assert dict(point.attributes) == {name: text for name, text in WORKER.items() if name != "model"}


@pytest.mark.parametrize("step", ["model_load", "drain", "cleanup"])
def test_each_step_of_an_engines_life_is_measured(step: Any) -> None:
    gauges = Gauges()
    gauges.engine.took(step, 2.0)
    assert [point.value for point in gauges.points[f"{step}_time_seconds"]] == [2.0]


def test_without_a_meter_nothing_is_recorded_and_the_load_is_sent_still() -> None:
    sent: list[ActiveLoad] = []
    metrics = EngineMetrics()
    metrics.took("drain", 1.0)
    SnapshotPublisher(7, [0], metrics, sent.append).publish(0, full(25, 0.5))
    assert [load.kv_used_blocks for load in sent] == [25]
