"""A worker that cannot start, or is shut down before it is registered."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import (
    EngineConfig,
    Worker,
    WorkerConfig,
    WorkerState,
)
from pipeline import (
    ContractViolation,
    InvalidArgument,
    PenstockError,
)
from pipeline.errors import BackendUnknown
from pipeline.network import Runtime
from pipeline.testing import OpenStreams
from tests.engines.worker.worlds import ALL_STEPS, BROKEN, HANG, TIMES, ScriptedSteps, hosted


@pytest.mark.parametrize("changes", [{"model_input": "Text"}, {"endpoint_types": ""}, {"namespace": "No Name"}])
async def test_a_wrong_config_is_refused_before_anything_starts(changes: dict[str, Any]) -> None:
    engine = ScriptedSteps()
    worker = Worker(engine, WorkerConfig(**changes), environment={})
    with pytest.raises(InvalidArgument):
        await worker.__aenter__()
    with pytest.raises(InvalidArgument):
        await worker.run()
    assert (engine.calls, worker.state) == ([], WorkerState.INIT)


@pytest.mark.parametrize(
    ("step", "error", "raised"),
    [
        ("start", InvalidArgument("no such model"), InvalidArgument),
        ("start", BROKEN, BackendUnknown),
        ("setup_metrics", BROKEN, BackendUnknown),
        ("kv_event_sources", InvalidArgument("no such ranks"), InvalidArgument),
    ],
)
async def test_what_fails_before_registering_cleans_up_once_and_is_raised(
    step: str, error: Exception, raised: type[PenstockError]
) -> None:
    """The hooks after the start are cancelled in the same way."""
    steps: dict[str, Any] = {step: error}
    engine = ScriptedSteps(**steps)
    async with Runtime.in_process() as runtime:
        worker = Worker(engine, runtime=runtime, environment={}, times=TIMES)
        with pytest.raises(raised, match=str(error)):
            await worker.__aenter__()
        assert engine.calls == [*ALL_STEPS[: ALL_STEPS.index(step) + 1], "cleanup"]
        assert anyio.current_time() == pytest.approx(0), "there is no request to wait for"
        assert await runtime.discovery.instances() == []
    assert (worker.state, worker.served) == (WorkerState.STOPPED, None)


async def test_a_cleanup_that_fails_too_leaves_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedSteps(start=BROKEN, cleanup=RuntimeError("worse"))
    with pytest.raises(BackendUnknown, match="broken"):
        await Worker(engine, environment={}).__aenter__()
    assert "worse" in caplog.text


async def test_a_start_that_is_cancelled_cleans_up() -> None:
    engine = ScriptedSteps(start=HANG, cleanup=1.0)
    with anyio.move_on_after(3) as scope:
        await Worker(engine, environment={}).__aenter__()
    assert scope.cancelled_caught
    assert engine.calls == ["start", "cleanup"]
    assert anyio.current_time() == pytest.approx(4), "the cleanup is not cut short by it"


async def test_a_card_that_cannot_be_registered_ends_the_worker(open_streams: OpenStreams) -> None:
    engine = ScriptedSteps(config=EngineConfig(model="another"))
    async with Runtime.in_process() as runtime, hosted(ScriptedSteps(), runtime) as first:
        with pytest.raises(InvalidArgument, match="cannot serve 'another'"):
            await Worker(engine, runtime=runtime, environment={}, times=TIMES).__aenter__()
        assert engine.calls == ALL_STEPS
        assert [i.instance_id for i in await runtime.discovery.instances()] == [first.worker_id]


async def test_an_id_that_is_taken_is_refused() -> None:
    async with Runtime.in_process() as runtime, hosted(ScriptedSteps(), runtime, worker_id=5):
        with pytest.raises(InvalidArgument, match="is served already"):
            await Worker(ScriptedSteps(), runtime=runtime, worker_id=5, environment={}).__aenter__()


async def test_an_engine_without_a_name_is_refused() -> None:
    engine = ScriptedSteps(config=EngineConfig(model=""))
    with pytest.raises(InvalidArgument) as refused:
        await Worker(engine, environment={}).__aenter__()
    assert (refused.value.field, engine.calls[-1]) == ("model", "cleanup")


async def test_an_engine_that_returns_no_config_breaks_the_contract() -> None:
    engine = ScriptedSteps(config="m")
    with pytest.raises(ContractViolation):
        await Worker(engine, environment={}).__aenter__()
    assert engine.calls == ["start", "cleanup"]


async def test_an_engine_may_return_no_metrics_bindings() -> None:
    engine = ScriptedSteps()
    engine.bindings = None  # type: ignore[assignment]
    async with hosted(engine) as worker:
        assert worker.native_metrics() == ""


async def test_a_worker_shut_down_before_its_start_never_starts() -> None:
    worker = Worker(engine := ScriptedSteps(), environment={}, times=TIMES)
    worker.shutdown()
    async with worker:
        await worker.wait()
        assert worker.served is None
    assert (engine.calls, worker.state) == ([], WorkerState.STOPPED)
    assert anyio.current_time() == pytest.approx(0)


async def test_a_worker_that_is_ended_while_it_starts_is_not_registered() -> None:
    worker = Worker(engine := ScriptedSteps(start=5.0), environment={}, times=TIMES)
    async with anyio.create_task_group() as tasks:

        async def shut_down_later() -> None:
            await anyio.sleep(1)
            worker.shutdown()

        tasks.start_soon(shut_down_later)
        async with worker:
            assert worker.served is None
            assert worker.state is WorkerState.RUNNING
            await worker.wait()
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(5)


async def test_a_worker_shut_down_in_its_hooks_is_not_registered() -> None:
    class Thinking(ScriptedSteps):
        async def health_check_payload(self) -> None:
            await anyio.sleep(2)

    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = Worker(Thinking(), runtime=runtime, environment={}, times=TIMES)

        async def shut_down_later() -> None:
            await anyio.sleep(1)
            worker.shutdown()

        tasks.start_soon(shut_down_later)
        async with worker:
            assert (worker.served, worker.health.endpoints) == (None, {})
        assert anyio.current_time() == pytest.approx(2), "without a grace period"


async def test_a_shutdown_goes_before_a_registration_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Runtime.in_process() as runtime:

        async def register(_: Any) -> Any:
            await anyio.sleep_forever()

        monkeypatch.setattr(runtime.discovery, "register", register)
        worker = Worker(engine := ScriptedSteps(), runtime=runtime, environment={}, times=TIMES)
        async with anyio.create_task_group() as tasks:

            async def shut_down_later() -> None:
                await anyio.sleep(1)
                await anyio.to_thread.run_sync(worker.shutdown)

            tasks.start_soon(shut_down_later)
            async with worker:
                assert worker.served is None
        assert engine.calls == ALL_STEPS
        assert runtime.served == {}
