"""A worker from the start of its engine to its end: what it serves, and under which name."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engines import (
    DisaggregationMode,
    EchoEngine,
    EngineConfig,
    MetricsBindings,
    Worker,
    WorkerConfig,
    WorkerState,
)
from engines.worker.registration import worker_labels
from pipeline import (
    Context,
    StreamClosed,
)
from pipeline.network import EndpointId, Runtime
from pipeline.protocols import PreprocessedRequest
from pipeline.telemetry import Metrics
from pipeline.testing import OpenStreams
from tests.engines.worker.worlds import ALL_STEPS, BROKEN, TIMES, WHERE, ScriptedSteps, collect, hosted


async def test_a_worker_serves_its_engine_and_ends_in_order(open_streams: OpenStreams) -> None:
    engine = ScriptedSteps(start=4.0)
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            assert anyio.current_time() == pytest.approx(4)
            assert (worker.state, worker.engine_config) == (WorkerState.RUNNING, engine.config)
            assert engine.worker_id == worker.worker_id
            (model,) = await runtime.discovery.models(WHERE)
            assert (model.instance_id, model.card, model.card.display_name) == (worker.worker_id, worker.card, "m")
            assert await collect(worker) == [[0], [1], [2], []]
            left_s = anyio.current_time()
        assert engine.calls == ALL_STEPS
        assert engine.at_s["drain"] - left_s == pytest.approx(2), "the grace period"
        assert not await runtime.discovery.instances()
        assert not await runtime.discovery.models()
        assert worker.state is WorkerState.STOPPED
        assert runtime.served == {}


async def test_a_worker_without_a_runtime_has_one_of_its_own() -> None:
    async with hosted(EchoEngine()) as worker:
        assert await collect(worker) == [[1]]
    with pytest.raises(StreamClosed):
        await worker.runtime.serve(WHERE, EchoEngine())  # type: ignore[arg-type]


async def test_workers_of_one_runtime_have_ids_of_their_own_and_end_in_any_order() -> None:
    engines = [ScriptedSteps(), ScriptedSteps(), ScriptedSteps()]
    async with Runtime.in_process() as runtime, AsyncExitStack() as others:
        first = Worker(engines[0], runtime=runtime, environment={}, times=TIMES)
        await first.__aenter__()
        workers = [await others.enter_async_context(hosted(engine, runtime)) for engine in engines[1:]]
        ids = {worker.worker_id for worker in (first, *workers)}
        assert len(ids) == 3
        assert {i.instance_id for i in await runtime.discovery.instances(WHERE)} == ids

        async def leave() -> None:
            await first.__aexit__(None, None, None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
        assert engines[0].calls == ALL_STEPS
        for worker in workers:
            assert len(await collect(worker)) == 4


async def test_a_worker_may_be_given_its_id() -> None:
    async with hosted(engine := ScriptedSteps(), worker_id=26) as worker:
        assert worker.worker_id == engine.worker_id == 26
        assert str(worker) == "ScriptedSteps at dynamo/backend/generate/1a"


async def test_a_worker_is_used_once() -> None:
    async with hosted(ScriptedSteps()) as worker:
        with pytest.raises(StreamClosed):
            await worker.__aenter__()
    with pytest.raises(StreamClosed):
        await worker.run()


async def test_the_mode_of_the_worker_holds_for_its_requests() -> None:
    config = WorkerConfig(disaggregation_mode=DisaggregationMode.PREFILL)
    async with hosted(EchoEngine(), config=config) as worker:
        assert worker.endpoint == EndpointId("dynamo", "prefill", "generate")
        assert await collect(worker, Context(PreprocessedRequest([1, 2, 3]))) == [[1]]


async def test_a_folder_gives_the_card_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 7}))
    config = WorkerConfig(model_name=str(tmp_path), served_model_name="shown")
    async with hosted(ScriptedSteps(), config=config) as worker:
        assert worker.card is not None
        assert (worker.card.display_name, worker.card.context_length) == ("shown", 7)


def test_the_process_environment_counts_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0.25")
    assert Worker(EchoEngine()).times.grace_s == 0.25
    assert Worker(EchoEngine(), environment={}).times.grace_s == 5.0


# -- metrics


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
