"""An instance called across the request plane of one process."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pipeline import (
    AsyncEngine,
    CannotConnect,
    Context,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    PenstockError,
    ResponseStream,
    Unknown,
)
from pipeline.errors import RegistryError
from pipeline.network import Runtime, Served
from pipeline.telemetry import Metrics
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait, check_engine, watch_streams

WHERE = "ns/comp/ep"


@asynccontextmanager
async def served(local: AsyncEngine[Any, Any]) -> AsyncIterator[tuple[Served, AsyncEngine[Any, Any]]]:
    """The engine behind a runtime: as it is served, and as it is called."""
    async with Runtime.in_process() as runtime:
        one = await runtime.serve(WHERE, local, instance_id=1)
        yield one, runtime.workers(WHERE).engine(1)
        assert one.running == 0


@pytest.mark.parametrize("slow", [False, True])
async def test_an_instance_holds_the_engine_contract(slow: bool) -> None:
    def script(payload: Any) -> list[Any]:
        if payload == "bad":
            return [Fail(InvalidArgument("bad"))]
        return [step for item in range(64) for step in ((Wait(0.01), item) if slow else (item,))]

    held: list[Served] = []

    @asynccontextmanager
    async def remote() -> AsyncIterator[AsyncEngine[Any, Any]]:
        async with served(ScriptedEngine(script)) as (one, called):
            held[:] = [one]
            yield called

    await check_engine(
        remote,
        request="good",
        expected=list(range(64)),
        bad_request="bad",
        open_count=lambda _: held[0].running,
    )


async def test_payload_id_metadata_and_trace_cross_and_the_registry_does_not(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1])
    request = Context("payload", metadata={"b": "2", "a": "1"})
    request.trace = object()
    request.registry.insert_shared("here", 1)
    async with served(local) as (_, called):
        assert await (await called.generate(request)).collect() == [1]
    (seen,) = local.requests
    assert (seen.payload, seen.id, seen.metadata, seen.trace) == (
        "payload",
        request.id,
        request.metadata,
        request.trace,
    )
    assert seen.metadata is not request.metadata
    with pytest.raises(RegistryError):
        seen.registry.get("here", int)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_control_travels_to_the_engine_and_never_back(how: str, open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    request = Context(None)
    async with served(local) as (_, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1
        getattr(local.requests[0], how)()
        assert not request.is_stopped
        getattr(request, how)()
        assert [item async for item in stream] == []
    assert local.open == 0


async def test_a_close_reaches_the_engine(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    async with served(local) as (one, called):
        stream = await called.generate(Context(None))
        assert one.running == 1
        assert await stream.__anext__() == 1
        await stream.aclose()
        assert local.open == one.running == 0


async def test_no_item_is_made_before_it_is_requested(open_streams: OpenStreams) -> None:
    local = ScriptedEngine(range(9))
    async with served(local) as (_, called), await called.generate(Context(None)) as stream:
        await stream.__anext__()
        await anyio.sleep(5)
        assert local.delivered == 1


@pytest.mark.parametrize("at", ["generate", "first read", "mid stream"])
@pytest.mark.parametrize("typed", [True, False])
async def test_an_error_comes_back_typed(at: str, typed: bool, open_streams: OpenStreams) -> None:
    error = EngineShutdown("broken") if typed else LookupError("broken")
    scripts: dict[str, Callable[[], ScriptedEngine]] = {
        "generate": lambda: ScriptedEngine([], fails=error),
        "first read": lambda: ScriptedEngine([Fail(error)]),
        "mid stream": lambda: ScriptedEngine([1, Fail(error)]),
    }
    local = scripts[at]()
    async with served(local) as (one, called):
        with pytest.raises(PenstockError, match="broken") as caught:
            await (await called.generate(Context(None))).collect()
        assert one.running == 0
    assert (caught.value is error) if typed else (type(caught.value) is Unknown and caught.value.__cause__ is error)
    assert local.open == 0


# -- a worker that goes away


async def test_an_instance_that_is_not_there_cannot_be_connected() -> None:
    async with Runtime.in_process() as runtime:
        called = runtime.workers(WHERE).engine(5)
        with pytest.raises(CannotConnect, match=r"instance_id=5 not found for endpoint dyn://ns\.comp\.ep"):
            await called.generate(Context(None))


@pytest.mark.parametrize("script", [(1, Stall()), (1, Wait(100), 2), (1,)])
@pytest.mark.parametrize("reading", [True, False])
async def test_a_crash_is_a_disconnect_and_never_a_short_answer(
    script: tuple[Any, ...], reading: bool, open_streams: OpenStreams
) -> None:
    local, request, errors = ScriptedEngine(script), Context(None), list[BaseException]()
    async with served(local) as (one, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1

        async def read() -> None:
            try:
                await stream.__anext__()
            except (Disconnected, StopAsyncIteration) as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            if reading and len(script) > 1:
                tasks.start_soon(read)
                await anyio.sleep(1)
                one.abort()
            else:
                one.abort()
                tasks.start_soon(read)
        assert [type(error) for error in errors] == [Disconnected]
        assert not request.is_stopped
        assert local.requests[0].is_killed
        with pytest.raises(CannotConnect):
            await called.generate(Context(None))
    assert local.open == 0


async def test_a_crash_before_the_first_item_is_a_disconnect(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1])
    async with served(local) as (one, called), await called.generate(Context(None)) as stream:
        one.abort()
        with pytest.raises(Disconnected):
            await stream.__anext__()
    assert local.open == 0


class Preparing(AsyncEngine[Any, Any]):
    """Takes its time before there is a stream; gives up when it is killed."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        await request.killed()
        raise EngineShutdown("killed while preparing")


async def test_a_crash_before_there_is_a_stream_is_a_disconnect(open_streams: OpenStreams) -> None:
    async with served(Preparing()) as (one, called), anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(Disconnected) as caught:
                await called.generate(Context(None))
            assert isinstance(caught.value.__cause__, EngineShutdown)

        tasks.start_soon(call)
        await anyio.sleep(1)
        assert one.running == 1
        one.abort()


class RaisingWhenKilled(AsyncEngine[Any, int]):
    """Breaks the contract: a killed stream ends without raising."""

    async def generate(self, request: Context[Any]) -> ResponseStream[int]:
        async def items() -> AsyncIterator[int]:
            yield 1
            await request.killed()
            raise LookupError("killed")

        return ResponseStream(items(), request)


async def test_an_engine_that_raises_when_killed_is_still_a_disconnect(open_streams: OpenStreams) -> None:
    async with served(RaisingWhenKilled()) as (one, called), await called.generate(Context(None)) as stream:
        assert await stream.__anext__() == 1
        one.abort()
        with pytest.raises(Disconnected):
            await stream.__anext__()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stopped_request_gets_no_disconnect(how: str, open_streams: OpenStreams) -> None:
    request = Context(None)
    async with served(ScriptedEngine([1, 2])) as (one, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1
        getattr(request, how)()
        one.abort()
        assert [item async for item in stream] == []


async def test_a_crash_leaves_other_instances_alone(open_streams: OpenStreams) -> None:
    async with Runtime.in_process() as runtime:
        first, _ = [await runtime.serve(WHERE, ScriptedEngine([1, 2]), instance_id=i) for i in (1, 2)]
        workers = runtime.workers(WHERE)
        async with await workers.engine(2).generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
            first.abort()
            assert [item async for item in stream] == [2]


# -- a worker that closes


async def test_closing_waits_for_what_runs_and_takes_nothing_new(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Wait(3), 2])
    async with served(local) as (one, called), anyio.create_task_group() as tasks:
        stream = await called.generate(Context(None))
        assert await stream.__anext__() == 1
        start = anyio.current_time()
        tasks.start_soon(one.close, 100.0)
        await anyio.sleep(0.1)
        with pytest.raises(CannotConnect):
            await called.generate(Context(None))
        assert await stream.collect() == [2]
        assert anyio.current_time() - start == pytest.approx(3.1)


async def test_closing_cuts_what_outlasts_its_time(open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    async with served(local) as (one, called), await called.generate(Context(None)) as stream:
        assert await stream.__anext__() == 1
        start = anyio.current_time()
        await one.close(7.0)
        assert anyio.current_time() - start == pytest.approx(7)
        with pytest.raises(Disconnected):
            await stream.__anext__()
        await one.close()
    assert local.open == 0


async def test_closers_do_not_miss_each_other(open_streams: OpenStreams) -> None:
    async with served(ScriptedEngine([1, Wait(3)])) as (one, called), anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(one.close, 100.0)
        stream = await called.generate(Context(None))
        tasks.start_soon(stream.collect)
    assert anyio.current_time() < 50


# -- what is counted


async def test_the_calls_of_an_instance_are_counted(open_streams: OpenStreams) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")

    def script(payload: Any) -> list[Any]:
        return [1, Fail(LookupError("broken")) if payload == "fails" else Wait(5), 2]

    async with Runtime.in_process(metrics=Metrics(meter, family="component")) as runtime:
        await runtime.serve(WHERE, ScriptedEngine(script), instance_id=0x1A)
        called = runtime.workers(WHERE).engine(0x1A)
        await (await called.generate(Context("good"))).collect()
        with pytest.raises(Unknown):
            await (await called.generate(Context("fails"))).collect()
        stopped = Context("good")
        stream = await called.generate(stopped)
        await stream.__anext__()
        stopped.stop()
        await stream.collect()
        with watch_streams(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            dropped = await called.generate(Context("good"))
            del dropped
            await anyio.sleep(0.1)
    points = {metric.name: metric.data.data_points[0] for metric in recorded(reader)}
    counted = {name.removeprefix("dynamo_component_"): getattr(p, "value", None) for name, p in points.items()}
    assert counted == {
        "requests_total": 4,
        "inflight_requests": 0,
        "request_duration_seconds": None,
        "cancellation_total": 1,
        "errors_total": 1,
    }
    duration = points["dynamo_component_request_duration_seconds"]
    assert (duration.count, duration.max) == (4, pytest.approx(5))
    assert dict(duration.attributes) == {
        "dynamo_namespace": "ns",
        "dynamo_component": "comp",
        "dynamo_endpoint": "ep",
        "worker_id": "1a",
    }


def recorded(reader: InMemoryMetricReader) -> Any:
    data = reader.get_metrics_data()
    assert data is not None
    return data.resource_metrics[0].scope_metrics[0].metrics
