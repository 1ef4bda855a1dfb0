"""The end of a worker: requests that outlast it, steps that fail or hang, blocks that are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from engines import (
    Worker,
    WorkerState,
)
from pipeline import (
    Annotated,
    CannotConnect,
    Context,
    Disconnected,
)
from pipeline.network import Runtime
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import OpenStreams
from tests.engines.worker.worlds import ALL_STEPS, BROKEN, HANG, TIMES, ScriptedSteps, collect, hosted


@pytest.mark.parametrize(("tokens", "whole"), [(1, True), (5, False)])
async def test_a_request_may_end_within_the_grace_period_and_is_then_cut(
    tokens: int, whole: bool, open_streams: OpenStreams
) -> None:
    """A request that outlasts the period can continue on another worker."""
    engine = ScriptedSteps(tokens=tokens)
    request = Context(PreprocessedRequest([1]))
    results: list[Any] = []
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:

        async def read_answer(worker: Worker) -> None:
            try:
                results.append(await collect(worker, request))
            except Disconnected:
                results.append(Disconnected)

        async with hosted(engine, runtime) as worker:
            tasks.start_soon(read_answer, worker)
            await anyio.sleep(0.5)
    assert results == ([[[0], []]] if whole else [Disconnected])
    assert engine.open == 0
    assert len(engine.aborted) == (0 if whole else 1)
    assert engine.at_s["cleanup"] == pytest.approx(2.5), "nothing waits for what was cut"


async def test_a_reader_that_does_not_read_holds_the_end_up_by_a_second_only() -> None:
    engine = ScriptedSteps()
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            called = runtime.workers(worker.endpoint).engine(worker.worker_id)
            stream = await called.generate(Context(PreprocessedRequest([1])))
        assert engine.at_s["cleanup"] == pytest.approx(3)
        with pytest.raises(Disconnected):
            await stream.collect()


async def test_a_known_worker_accepts_requests_in_the_grace_period_but_not_while_it_drains() -> None:
    engine = ScriptedSteps(tokens=0, drain=3.0)
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = Worker(engine, runtime=runtime, environment={}, times=TIMES)
        await worker.__aenter__()
        instance = runtime.requests.engine(runtime.served[next(iter(runtime.served))].instance, Annotated)
        tasks.start_soon(worker.__aexit__, None, None, None)
        await anyio.sleep(1)
        assert await runtime.discovery.instances() == []
        assert len(await (await instance.generate(Context(PreprocessedRequest([1])))).collect()) == 1
        await anyio.sleep(2)
        assert engine.calls[-1] == "drain"
        with pytest.raises(CannotConnect):
            await instance.generate(Context(PreprocessedRequest([1])))


async def test_a_block_that_fails_has_no_grace_period_but_drains() -> None:
    engine = ScriptedSteps(drain=3.0)
    with pytest.raises(LookupError):
        async with hosted(engine):
            raise BROKEN
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(3)


async def test_a_block_that_is_cancelled_still_drains_and_cleans_up() -> None:
    engine = ScriptedSteps(drain=3.0, cleanup=1.0)
    with anyio.move_on_after(1):
        async with hosted(engine):
            await anyio.sleep_forever()
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(5)


async def test_an_orderly_end_may_be_cut_short_but_not_its_cleanup() -> None:
    engine = ScriptedSteps(cleanup=1.0)
    with anyio.move_on_after(0.5):
        async with hosted(engine):
            pass
    assert engine.calls == [*ALL_STEPS[:3], "cleanup"]
    assert anyio.current_time() == pytest.approx(1.5)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("after_s", [3.5, 4.5])
async def test_a_cancellation_that_knows_no_shield_leaves_nothing_running_either(after_s: float) -> None:
    """The cancellation is asyncio's own, as of a second Ctrl-C: during the cut, and in the cleanup."""
    running: list[str] = []

    class Busy(ScriptedSteps):
        async def background(self) -> None:
            running.append("background")
            try:
                await anyio.sleep_forever()
            finally:
                running.remove("background")

    engine = Busy(tokens=9, cleanup=3.0)
    async with Runtime.in_process() as runtime:
        stream: Any = None

        async def host() -> None:
            nonlocal stream
            async with hosted(engine, runtime) as worker:
                called = runtime.workers(worker.endpoint).engine(worker.worker_id)
                stream = await called.generate(Context(PreprocessedRequest([1])))
                await anyio.sleep(1)

        task = asyncio.ensure_future(host())
        await anyio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await anyio.sleep(1)
        assert (engine.calls.count("cleanup"), running) == (1, [])
        await stream.aclose()


async def test_a_worker_that_cannot_be_unregistered_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedSteps()
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            assert worker.served is not None

            async def unpublish() -> None:
                raise CannotConnect("no discovery")

            monkeypatch.setattr(worker.served, "unpublish", unpublish)
        assert "could not be unregistered, its lease runs out: no discovery" in caplog.text
        assert "Traceback" not in caplog.text
        assert engine.calls == ALL_STEPS
        assert engine.at_s["drain"] == pytest.approx(2), "the grace period is kept"


@pytest.mark.parametrize("step", ["drain", "cleanup"])
async def test_a_drain_or_cleanup_that_fails_is_only_logged(step: str, caplog: pytest.LogCaptureFixture) -> None:
    steps: dict[str, Any] = {step: BROKEN}
    engine = ScriptedSteps(**steps)
    async with hosted(engine) as worker:
        pass
    assert (engine.calls, worker.state) == (ALL_STEPS, WorkerState.STOPPED)
    assert f"{step} of ScriptedSteps failed" in caplog.text


@pytest.mark.parametrize(
    ("steps", "ends_s"),
    [
        ({"drain": HANG}, 12),
        ({"cleanup": HANG}, 12),
        ({"drain": HANG, "cleanup": 4.0}, 16),
        ({"drain": HANG, "cleanup": HANG}, 17),
        ({"drain": 8.0, "cleanup": 4.5}, 14.5),
    ],
)
async def test_what_hangs_at_the_end_is_cut_short_and_logged(
    steps: dict[str, Any], ends_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The process must go on: a grace of 2 s, a timeout of 10 s, and at least 5 s for the cleanup."""
    engine = ScriptedSteps(**steps)
    async with hosted(engine) as worker:
        pass
    assert (engine.calls, worker.state) == (ALL_STEPS, WorkerState.STOPPED)
    assert anyio.current_time() == pytest.approx(ends_s)
    assert ("drain in time" in caplog.text) is (steps.get("drain") is HANG)
    assert ("clean up in time" in caplog.text) is (steps.get("cleanup") is HANG)
