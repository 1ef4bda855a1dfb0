"""Background tasks that a worker runs beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest

from engines import EchoEngine, EngineConfig, MetricsBindings, MetricsContext, ShutdownTimes, SystemHealth, Worker
from engines.worker.lifecycle import Background
from engines.worker.signals import Signals
from pipeline import Annotated, CannotConnect, Context, Disconnected, InvalidArgument, Unavailable
from pipeline.errors import BackendCancelled, BackendUnknown
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.rx import AnyIOScheduler
from pipeline.testing import OpenStreams


async def test_what_runs_can_be_waited_for() -> None:
    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        for seconds in (3, 1, 2):
            background.run(partial(anyio.sleep, seconds))
        await background.idle()
        assert anyio.current_time() == pytest.approx(3)
        await background.idle()


async def test_what_runs_can_be_cancelled_one_by_one_or_all_together() -> None:
    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        cancels = [background.run(anyio.sleep_forever) for _ in range(3)]
        cancels[0]()
        await anyio.sleep(1)
        with anyio.move_on_after(1) as scope:
            await background.idle()
        assert scope.cancelled_caught, "the others run on"
        background.end()
        await background.idle()


async def test_two_may_wait_for_it() -> None:
    async with AnyIOScheduler() as scheduler, anyio.create_task_group() as tasks:
        background = Background(scheduler)
        background.run(partial(anyio.sleep, 1))
        with anyio.fail_after(2):
            for _ in range(2):
                tasks.start_soon(background.idle)
            await background.idle()


async def test_what_it_raises_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        await anyio.sleep(1)
        raise LookupError("broken")

    async with AnyIOScheduler() as scheduler:
        background = Background(scheduler)
        background.run(fail)
        background.run(partial(anyio.sleep, 2))
        await background.idle()
    assert anyio.current_time() == pytest.approx(2)
    assert "broken" in caplog.text


# -- the engine's own task


TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)
PROBED = {"DYN_HEALTH_CHECK_ENABLED": "1", "DYN_CANARY_WAIT_TIME": "4"}
BROKEN = LookupError("the scheduler broke")
WHOLE = ["start", "setup_metrics", "drain", "cleanup"]


class Driven(EchoEngine):
    """Yields a token a second. Its background ends after `after_s`, by raising `error` if there is one; None: never.

    Cancelled, it takes `end_s` to end.
    """

    def __init__(
        self,
        after_s: float | None = None,
        error: Exception | None = BROKEN,
        *,
        end_s: float = 0,
        cleanup_s: float = 0,
        setup_s: float = 0,
    ) -> None:
        super().__init__(delay_s=1.0)
        self.after_s, self.error, self.end_s = after_s, error, end_s
        self.cleanup_s, self.setup_s = cleanup_s, setup_s
        self.calls: list[str] = []
        self.is_running = False

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        return await super().start(worker_id)

    async def background(self) -> None:
        self.is_running = True
        try:
            await anyio.sleep(float("inf") if self.after_s is None else self.after_s)
            if self.error is not None:
                raise self.error
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.end_s)
            self.is_running = False

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        self.calls.append("setup_metrics")
        await anyio.sleep(self.setup_s)
        return MetricsBindings()

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        assert self.is_running or self.after_s is not None, "it runs until after the cleanup"
        self.calls.append("cleanup")
        await anyio.sleep(self.cleanup_s)


def worker_of(engine: Driven, runtime: Runtime, **settings: Any) -> Worker:
    return Worker(engine, runtime=runtime, **{"environment": {}, "times": TIMES, **settings})


async def collect_answer(worker: Worker, tokens: int) -> list[Annotated[LLMEngineOutput]]:
    called = worker.runtime.workers(worker.endpoint, Annotated[LLMEngineOutput]).engine(worker.worker_id)
    async with await called.generate(Context(PreprocessedRequest([1] * tokens))) as stream:
        return [item async for item in stream]


async def test_a_background_that_returns_early_changes_nothing() -> None:
    engine = Driven(1.0, None)
    async with Runtime.in_process() as runtime:
        async with worker_of(engine, runtime) as worker:
            await anyio.sleep(2)
            assert not engine.is_running
            assert len(await collect_answer(worker, 3)) == 3
        assert (worker.failure, engine.calls) == (None, WHOLE)


async def test_a_background_runs_until_after_the_cleanup_and_has_ended_when_the_worker_is_left() -> None:
    engine = Driven(cleanup_s=3, end_s=0.5)
    async with Runtime.in_process() as runtime:
        async with worker_of(engine, runtime) as worker:
            await anyio.sleep(1)
        assert not engine.is_running
        assert anyio.current_time() == pytest.approx(1 + 2 + 3 + 0.5)
        assert (worker.failure, engine.calls) == (None, WHOLE)


async def test_a_background_that_ignores_its_cancellation_is_abandoned_after_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Driven(end_s=5)
    async with Runtime.in_process() as runtime:
        async with worker_of(engine, runtime):
            await anyio.sleep(1)
        assert anyio.current_time() == pytest.approx(1 + 2 + 1)
        assert "do not end when they are cancelled" in caplog.text
        assert engine.is_running


@pytest.mark.parametrize("setup_s", [3, float("inf")])
async def test_a_background_that_fails_before_the_registration_is_raised_and_nothing_is_registered(
    setup_s: float,
) -> None:
    """This holds also where the engine's set-up waits for the background in vain."""
    engine = Driven(1.0, setup_s=setup_s)
    async with Runtime.in_process() as runtime:
        worker = worker_of(engine, runtime)
        with anyio.fail_after(99), pytest.raises(BackendUnknown, match="the scheduler broke"):
            await worker.__aenter__()
        assert anyio.current_time() == pytest.approx(1)
        assert engine.calls == ["start", "setup_metrics", "cleanup"]
        assert (worker.served, runtime.served, worker.health.endpoints) == (None, {}, {})
        assert await runtime.discovery.instances() == []


async def test_a_background_that_fails_while_the_worker_is_registered_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Runtime.in_process() as runtime:

        async def register_model(_: Any) -> Any:
            await anyio.sleep_forever()

        monkeypatch.setattr(runtime.discovery, "register_model", register_model)
        with anyio.fail_after(99), pytest.raises(BackendUnknown, match="the scheduler broke"):
            await worker_of(Driven(1.0), runtime).__aenter__()
        assert (runtime.served, await runtime.discovery.instances()) == ({}, [])


async def test_when_the_background_fails_callers_are_disconnected_and_the_worker_is_invisible(
    open_streams: OpenStreams,
) -> None:
    engine, health = Driven(2.5), SystemHealth()
    ended: list[Any] = []
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = worker_of(engine, runtime, environment=PROBED, health=health)
        async with worker:

            async def call(tokens: int) -> None:
                try:
                    ended.append(len(await collect_answer(worker, tokens)))
                except Disconnected:
                    ended.append(Disconnected)

            pool = runtime.workers(worker.endpoint)
            for tokens in (2, 5, 5):
                tasks.start_soon(call, tokens)
            await anyio.sleep(2)
            assert health.is_healthy
            await worker.wait()
            assert anyio.current_time() == pytest.approx(2.5)
            assert (list(health.endpoints.values()), runtime.served) == ([False], {})
            await anyio.sleep(20)
            assert ended == [2, Disconnected, Disconnected]
            assert (pool.instance_ids(), await runtime.discovery.models()) == ((), [])
            assert not health.is_healthy, "no canary probes a broken engine"
            left_s = anyio.current_time()
        assert anyio.current_time() == pytest.approx(left_s), "no caller is left to need a grace period"
        assert isinstance(worker.failure, BackendUnknown)
        assert worker.failure.__cause__ is BROKEN
        assert engine.calls == WHOLE


@pytest.mark.parametrize(("error", "has_stack"), [(BROKEN, True), (CannotConnect("the server is gone"), False)])
async def test_the_stack_of_a_background_that_fails_is_logged_unless_another_worker_would_do(
    error: Exception, has_stack: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with Runtime.in_process() as runtime, worker_of(Driven(1.0, error), runtime) as worker:
        await worker.wait()
    (record,) = [each for each in caplog.records if "failed in the background" in each.getMessage()]
    assert str(error) in record.getMessage()
    assert bool(record.exc_info) == has_stack


async def test_a_background_that_fails_in_the_grace_period_cuts_what_runs() -> None:
    engine = Driven(3.0)
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = worker_of(engine, runtime)
        await worker.__aenter__()

        async def call() -> None:
            with pytest.raises(Disconnected):
                await collect_answer(worker, 9)
            assert anyio.current_time() == pytest.approx(3)

        tasks.start_soon(call)
        await anyio.sleep(2)
        await worker.__aexit__(None, None, None)
        assert worker.failure is not None


async def test_a_background_that_fails_because_of_the_cleanup_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Driven(4.0, cleanup_s=3)
    async with Runtime.in_process() as runtime:
        async with worker_of(engine, runtime) as worker:
            pass
        assert worker.failure is None
        assert anyio.current_time() == pytest.approx(2 + 3)
    assert "the scheduler broke" in caplog.text


def never() -> Signals:
    """No signal comes in this test."""

    class Silence:
        def __enter__(self) -> AsyncIterator[int]:
            return self._numbers()

        def __exit__(self, *_: object) -> None: ...

        async def _numbers(self) -> AsyncIterator[int]:
            await anyio.sleep_forever()
            yield 0

    return Silence


async def test_a_program_whose_engine_fails_raises_that_once_all_is_released() -> None:
    engine = Driven(3.0, cleanup_s=1)
    async with Runtime.in_process() as runtime:
        with pytest.raises(BackendUnknown, match="the scheduler broke"):
            await worker_of(engine, runtime, signals=never()).run()
        assert engine.calls == WHOLE
        assert anyio.current_time() == pytest.approx(4)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ExceptionGroup("tasks", [InvalidArgument("no such rank")]), InvalidArgument),
        (Unavailable("no device"), Unavailable),
        (ExceptionGroup("tasks", [BROKEN, BROKEN]), BackendUnknown),
    ],
)
async def test_a_failure_is_typed_and_stands_alone_if_it_came_alone(error: Exception, raised: type[Exception]) -> None:
    async with Runtime.in_process() as runtime, worker_of(Driven(1.0, error), runtime) as worker:
        await worker.wait()
        assert type(worker.failure) is raised


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_an_engine_that_cancels_its_own_background_has_failed() -> None:
    """The engine waits in its background for a task that is cancelled; trio does not allow this."""

    class Cancelling(Driven):
        async def background(self) -> None:
            raise asyncio.CancelledError

    async with Runtime.in_process() as runtime, worker_of(Cancelling(1.0), runtime) as worker:
        with anyio.fail_after(1):
            await worker.wait()
        assert isinstance(worker.failure, BackendCancelled)
