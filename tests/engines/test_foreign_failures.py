"""An engine that raises any exception loses only this request, and its worker continues to serve."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import (
    EngineConfig,
    GenerateContext,
    LLMEngine,
    MetricsBindings,
    MetricsContext,
    PushSource,
    ShutdownTimes,
    SystemHealth,
    Worker,
    as_engine,
)
from engines.adapter import RequestAdapter
from pipeline import Annotated, AsyncEngine, BackendError, Context, PenstockError
from pipeline.errors import BackendCancelled, BackendUnknown
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import watch_streams

TIMES = ShutdownTimes(grace_s=0.0, timeout_s=10.0)
REQUEST = PreprocessedRequest([1, 2])
Fails = Callable[[], None]


class Panic(BaseException):
    """An error as PyO3 raises it for a panic in Rust."""


def exits() -> None:
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def closes() -> None:
    raise GeneratorExit


def panics() -> None:
    raise Panic("index out of bounds")


def fails_in_groups() -> None:
    raise BaseExceptionGroup("tasks", [SystemExit(3), Panic()])


WRECKS = [exits, interrupts, closes, panics, fails_in_groups]


class Wreck(LLMEngine):
    """Yields 1, 2 and an end; calls `fails` at the named places of its life."""

    def __init__(self, fails: Fails, *places: str, ends_on_kill: bool = False) -> None:
        self.fails, self.places = fails, places
        self.ends_on_kill = ends_on_kill  # type: ignore[misc]
        self.calls: list[str] = []

    def at(self, place: str) -> None:
        self.calls.append(place)
        if place in self.places:
            self.fails()

    async def start(self, worker_id: int) -> EngineConfig:
        self.at("start")
        return EngineConfig(model="wreck", kv_cache_block_size=16)

    async def background(self) -> None:
        await anyio.sleep(2)
        self.at("background")

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.at("call")
        return self._later() if "set-up" in self.places else self._chunks(context)

    async def _later(self) -> Any:
        await checkpoint()
        self.at("set-up")

    async def _chunks(self, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        try:
            await checkpoint()
            self.at("first")
            yield LLMEngineOutput.token(1)
            await anyio.sleep(1)
            self.at("middle")
            yield LLMEngineOutput.token(2)
            self.at("end")
            yield LLMEngineOutput.stop()
        finally:
            self.at("close")

    async def abort(self, context: GenerateContext) -> None:
        self.at("abort")

    async def drain(self) -> None:
        self.at("drain")

    async def cleanup(self) -> None:
        self.at("cleanup")

    async def kv_event_sources(self) -> list[PushSource]:
        self.at("kv_event_sources")
        return [PushSource(lambda _: self.at("on_ready"))]

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        self.at("setup_metrics")
        return MetricsBindings(native_text=self.native_text)

    def native_text(self) -> str:
        self.at("native_text")
        return "blocks 1"

    async def health_check_payload(self) -> dict[str, Any]:
        self.at("health_check_payload")
        return {"token_ids": [1]}


async def read(engine: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]) -> tuple[list[int], Any]:
    """Return the tokens of one answer, and its error."""
    tokens: list[int] = []
    try:
        async with await engine.generate(Context(REQUEST)) as stream:
            async for item in stream:
                if item.data is not None:
                    tokens += item.data.token_ids
                elif (error := item.extract_error()) is not None:
                    return tokens, error
    except PenstockError as error:
        return tokens, error
    return tokens, None


@pytest.mark.parametrize("fails", WRECKS)
@pytest.mark.parametrize("ends_on_kill", [True, False])
@pytest.mark.parametrize(
    ("place", "tokens"), [("call", []), ("set-up", []), ("first", []), ("middle", [1]), ("end", [1, 2])]
)
async def test_whatever_an_engine_raises_loses_this_request_only(
    fails: Fails, ends_on_kill: bool, place: str, tokens: list[int]
) -> None:
    wreck = Wreck(fails, place, ends_on_kill=ends_on_kill)
    with watch_streams() as streams:
        async with as_engine(wreck) as engine:
            answers: list[tuple[list[int], Any]] = []

            async def read_one() -> None:
                answers.append(await read(engine))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_one)
                tasks.start_soon(read_one)
            wreck.places = ()
            assert await read(engine) == ([1, 2], None)
    assert not streams.open
    for got, error in answers:
        assert got == tokens
        assert type(error) is BackendUnknown
        assert error.__cause__ is not None
        assert not isinstance(error.__cause__, Exception)
        assert error.facts.status == 500


@pytest.mark.parametrize("place", ["call", "first", "middle"])
@pytest.mark.parametrize("ends_on_kill", [True, False])
async def test_an_unrequested_cancellation_is_a_failure_of_the_engine(place: str, ends_on_kill: bool) -> None:
    kept: list[BaseException] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await checkpoint()
        except anyio.get_cancelled_exc_class() as error:
            kept.append(error)
            raise

    def fails() -> None:
        raise kept[0]

    async with as_engine(Wreck(fails, place, ends_on_kill=ends_on_kill)) as engine:
        _, failure = await read(engine)
    assert type(failure) is BackendCancelled


@pytest.mark.parametrize("fails", [exits, interrupts, panics, fails_in_groups])
@pytest.mark.parametrize("place", ["close", "abort"])
async def test_what_comes_too_late_for_the_reader_is_logged(
    fails: Fails, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with as_engine(Wreck(fails, place)) as engine:
        context = Context(REQUEST)
        async with await engine.generate(context) as stream:
            await anext(stream)
            context.kill()
            await anyio.sleep(0.1)
        wreck: Any = engine.engine
        wreck.places = ()
        assert await read(engine) == ([1, 2], None)
    assert "abort of request" in caplog.text if place == "abort" else "closing the chunks" in caplog.text


@pytest.mark.parametrize("fails", WRECKS)
@pytest.mark.parametrize("place", ["drain", "cleanup"])
async def test_an_end_that_raises_whatever_is_logged(
    fails: Fails, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with as_engine(Wreck(fails, place)):
        pass
    async with Worker(Wreck(fails, place), environment={}, times=TIMES):
        pass
    assert caplog.text.count("Traceback") >= 2


@pytest.mark.parametrize("fails", WRECKS)
@pytest.mark.parametrize("place", ["start", "kv_event_sources", "on_ready", "setup_metrics"])
async def test_a_worker_whose_engine_raises_whatever_at_its_start_cleans_up(fails: Fails, place: str) -> None:
    wreck = Wreck(fails, place)
    with pytest.raises(BackendError):
        await Worker(wreck, environment={}, times=TIMES).__aenter__()
    assert wreck.calls[-1] == "cleanup"


@pytest.mark.parametrize("fails", WRECKS)
async def test_an_engine_alone_that_raises_whatever_at_its_start_cleans_up(fails: Fails) -> None:
    wreck = Wreck(fails, "start")
    with pytest.raises(BackendError):
        await as_engine(wreck).__aenter__()
    assert wreck.calls == ["start", "cleanup"]


@pytest.mark.parametrize("fails", WRECKS)
async def test_a_background_that_raises_whatever_ends_its_worker_and_no_other(fails: Fails) -> None:
    async with Runtime.in_process() as runtime:
        settings: dict[str, Any] = {"runtime": runtime, "environment": {}, "times": TIMES}
        async with Worker(Wreck(fails, "background"), **settings) as broken, Worker(Wreck(fails), **settings) as other:
            await broken.wait()
            assert isinstance(broken.failure, BackendError)
            workers = runtime.workers(other.endpoint, Annotated[LLMEngineOutput])
            await workers.wait_for_instances()
            assert await read(workers.engine(other.worker_id)) == ([1, 2], None)


@pytest.mark.parametrize("fails", WRECKS)
async def test_a_background_of_an_engine_alone_that_raises_whatever_ends_its_block(fails: Fails) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        async with as_engine(Wreck(fails, "background")):
            await anyio.sleep_forever()
    assert [isinstance(error, BackendError) for error in ended.value.exceptions] == [True]


@pytest.mark.parametrize("fails", WRECKS)
@pytest.mark.parametrize("place", ["native_text", "health_check_payload"])
async def test_a_worker_does_without_what_an_engine_fails_to_give(
    fails: Fails, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Worker(Wreck(fails, place), environment={}, times=TIMES) as worker:
        assert ("blocks" in worker.native_metrics()) is (place != "native_text")
        assert worker.served is not None
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("fails", WRECKS)
async def test_a_probe_that_raises_whatever_shows_a_worker_that_is_not_ready(fails: Fails) -> None:
    health = SystemHealth()
    environment = {"DYN_HEALTH_CHECK_ENABLED": "1", "DYN_CANARY_WAIT_TIME": "0.5"}
    wreck = Wreck(fails)
    async with Worker(wreck, environment=environment, times=TIMES, health=health):
        await anyio.sleep(1.8)
        assert health.is_healthy
        wreck.places = ("first",)
        await anyio.sleep(2)
        assert not health.is_healthy
        wreck.places = ()
        await anyio.sleep(3)
        assert health.is_healthy


@pytest.mark.parametrize("fails", WRECKS)
async def test_the_requests_beside_a_wreck_are_served_by_its_worker(fails: Fails) -> None:
    wreck = Wreck(fails)
    async with (
        Runtime.in_process() as runtime,
        Worker(wreck, runtime=runtime, environment={}, times=TIMES) as worker,
    ):
        workers = runtime.workers(worker.endpoint, Annotated[LLMEngineOutput])
        (instance,) = await workers.wait_for_instances()
        engine = workers.engine(instance)
        async with await engine.generate(Context(REQUEST)) as running:
            await anext(running)
            wreck.places = ("first",)
            _, error = await read(engine)
            assert isinstance(error, BackendError)
            assert [item.data.token_ids async for item in running if item.data] == [[2], []]


async def test_an_adapter_passes_a_cancellation_of_its_reader_on() -> None:
    released: list[str] = []

    class Slow(Wreck):
        async def _chunks(self, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            try:
                await anyio.sleep_forever()
                yield LLMEngineOutput.stop()
            finally:
                released.append("released")

    async def read_one(ends_on_kill: bool) -> Awaitable[None] | None:
        adapter = RequestAdapter(Slow(exits, ends_on_kill=ends_on_kill))
        async with await adapter.generate(Context(REQUEST)) as stream:
            await anext(stream)
        return None

    for ends_on_kill in (True, False):
        with anyio.move_on_after(1) as scope:
            await read_one(ends_on_kill)
        assert scope.cancelled_caught
    assert released == ["released"] * 2
