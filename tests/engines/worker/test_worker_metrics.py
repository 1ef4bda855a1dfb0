"""The metrics of a worker: the steps of its engine's life, and the engine's own under the worker's labels."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engines import (
    EngineConfig,
    MetricsBindings,
    Worker,
    WorkerConfig,
)
from engines.worker.registration import worker_labels
from pipeline.network import EndpointId
from pipeline.telemetry import Metrics
from tests.engines.worker.worlds import BROKEN, TIMES, ScriptedSteps, collect, hosted


def test_empty_labels_are_left_out_and_the_id_is_hexadecimal() -> None:
    assert worker_labels(EndpointId("n", "c", "e"), 0xAB, model="", model_name="s") == {
        "dynamo_namespace": "n",
        "dynamo_component": "c",
        "dynamo_endpoint": "e",
        "worker_id": "ab",
        "model_name": "s",
    }


async def test_the_steps_and_ranks_of_an_engine_are_measured_under_the_workers_labels() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"), family="component")
    engine = ScriptedSteps(start=4.0, drain=3.0, cleanup=BROKEN, config=EngineConfig(model="m", served_model_name="s"))
    engine.bindings = MetricsBindings(dp_ranks=[2])
    async with hosted(engine, metrics=metrics, worker_id=26) as worker:
        await collect(worker)
    context = engine.metrics_context
    assert context is not None
    assert (context.model, context.component) == ("m", "backend")
    assert context.model_load_time_s == pytest.approx(4)
    found = reader.get_metrics_data()
    assert found is not None
    points: dict[str, Any] = {
        metric.name.removeprefix("dynamo_component_"): metric.data.data_points[0]
        for metric in found.resource_metrics[0].scope_metrics[0].metrics
    }
    times = {name: points[f"{name}_time_seconds"].value for name in ("model_load", "drain", "cleanup")}
    assert times == pytest.approx({"model_load": 4, "drain": 3, "cleanup": 0})
    where = {"dynamo_namespace": "dynamo", "dynamo_component": "backend", "dynamo_endpoint": "generate"}
    assert dict(points["drain_time_seconds"].attributes) == where | {"worker_id": "1a", "model": "m", "model_name": "s"}
    assert points["total_blocks"].attributes["dp_rank"] == "2"
    assert dict(points["requests_total"].attributes) == where | {"worker_id": "1a"}, "requests agree on the id"


async def test_the_engines_own_metrics_get_the_workers_labels() -> None:
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(native_text=lambda: 'up{worker_id="own"} 1\n')
    config = WorkerConfig(metrics_labels=[("team", "a"), ("model", "mine")])
    worker = Worker(engine, config, environment={}, times=TIMES)
    assert worker.native_metrics() == ""
    async with worker:
        assert worker.native_metrics() == (
            'up{worker_id="own",team="a",model="m",dynamo_namespace="dynamo",dynamo_component="backend",'
            'dynamo_endpoint="generate",model_name="m"} 1\n'
        )


@pytest.mark.parametrize("text", ["up 1", "up 1\n"])
async def test_the_engines_own_metrics_are_whole_lines(text: str) -> None:
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(native_text=lambda: text)
    async with hosted(engine) as worker:
        (line,) = worker.native_metrics().splitlines(keepends=True)
        assert line.endswith("} 1\n")


async def test_an_engine_that_fails_to_give_its_metrics_has_none(caplog: pytest.LogCaptureFixture) -> None:
    """The metrics of other workers are shown all the same."""
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(native_text=lambda: str(1 / 0))
    async with hosted(engine) as worker:
        assert worker.native_metrics() == ""
    assert "ZeroDivisionError" in caplog.text
