"""A worker from the start of its engine to its end: what it serves, and under which name."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from engines import (
    DisaggregationMode,
    EchoEngine,
    Worker,
    WorkerConfig,
    WorkerState,
)
from pipeline import (
    Context,
    StreamClosed,
)
from pipeline.network import EndpointId, Runtime
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import OpenStreams
from tests.engines.worker.worlds import ALL_STEPS, TIMES, WHERE, ScriptedSteps, collect, hosted


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
