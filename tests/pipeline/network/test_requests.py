"""An instance called across a request plane: in one process, and over a network. The rules are the same."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast
from uuid import UUID

import anyio
import pytest
from attrs import evolve
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
    function_engine,
)
from pipeline.errors import RegistryError
from pipeline.network import Served
from pipeline.network.tcp import TcpOptions
from pipeline.protocols import BootstrapInfo, PrefillResult, PreprocessedRequest
from pipeline.protocols.routing import MigrationState
from pipeline.telemetry import Metrics, extract, inject
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait, check_engine, watch_streams
from tests.pipeline.network.worlds import WHERE, WORLDS, WorldKind, eventually, two_runtimes

Serve = Callable[[AsyncEngine[Any, Any]], AbstractAsyncContextManager[tuple[Served, AsyncEngine[Any, Any]]]]
"""Serves an engine; returns it as it is served, and as it is called."""

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

NARROW = TcpOptions(has_unix_socket=False, window_items=8)
"""As many items under way as a reader may still get after a stop."""


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> WorldKind:
    return cast(WorldKind, request.param)


@pytest.fixture
def served(world: WorldKind) -> Serve:
    @asynccontextmanager
    async def serve(local: AsyncEngine[Any, Any]) -> AsyncIterator[tuple[Served, AsyncEngine[Any, Any]]]:
        async with two_runtimes(world, options=NARROW) as (worker, caller):
            one = await worker.serve(WHERE, local, instance_id=1)
            yield one, caller.workers(WHERE).engine(1)
            await eventually(lambda: one.running == 0)

    return serve


async def test_a_payload_crosses_by_its_own_rules() -> None:
    """What a record keeps for its process does not cross, whatever it holds; its opaque parts cross unchanged."""
    sent = PreprocessedRequest(
        [1, 2],
        prefill_result=PrefillResult({"room": 2**64 - 1, "raw": b"\x00", "ids": [None, 1.5, "x"]}),
        bootstrap_info=BootstrapInfo("host", 1, 2, UUID(int=3)),
        migration_state=MigrationState([7], Disconnected("gone")),
    )
    received: list[PreprocessedRequest] = []

    async def take(request: PreprocessedRequest) -> AsyncIterator[int]:
        received.append(request)
        yield 1

    async with two_runtimes("tcp") as (worker, caller):
        await worker.serve(WHERE, function_engine(take), instance_id=1)
        workers = caller.workers(WHERE, int)
        await workers.wait_for_instances()
        async with await workers.engine(1).generate(Context(sent)) as stream:
            assert await stream.collect() == [1]
    assert received[0].migration_state is None
    assert evolve(received[0], migration_state=sent.migration_state) == sent


@pytest.mark.parametrize("slow", [False, True])
async def test_an_instance_holds_the_engine_contract(served: Serve, slow: bool) -> None:
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


async def test_payload_id_metadata_and_trace_cross_and_the_registry_does_not(
    served: Serve, open_streams: OpenStreams
) -> None:
    local = ScriptedEngine([1])
    request = Context("payload", metadata={"b": "2", "a": "1"})
    request.trace = extract({"traceparent": TRACEPARENT})
    request.registry.insert_shared("here", 1)
    async with served(local) as (_, called):
        assert await (await called.generate(request)).collect() == [1]
    (seen,) = local.requests
    assert (seen.payload, seen.id, seen.metadata) == ("payload", request.id, request.metadata)
    assert inject(seen) == inject(request) == {"traceparent": TRACEPARENT}
    assert seen.metadata is not request.metadata
    with pytest.raises(RegistryError):
        seen.registry.get("here", int)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_control_travels_to_the_engine_and_never_back(served: Serve, how: str, open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    request = Context(None)
    async with served(local) as (_, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1
        getattr(local.requests[0], how)()
        assert not request.is_stopped
        getattr(request, how)()
        assert [item async for item in stream] == []
    assert local.open == 0
    assert getattr(local.requests[0], f"is_{how}{'ped' if how == 'stop' else 'ed'}")


async def test_a_close_reaches_the_engine(served: Serve, open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    async with served(local) as (one, called):
        stream = await called.generate(Context(None))
        assert one.running == 1
        assert await stream.__anext__() == 1
        await stream.aclose()
        await eventually(lambda: local.open == one.running == 0)


async def test_items_are_made_ahead_of_the_reader_within_the_window_only(
    served: Serve, world: WorldKind, open_streams: OpenStreams
) -> None:
    local = ScriptedEngine(range(100))
    async with served(local) as (_, called), await called.generate(Context(None)) as stream:
        for read in range(1, 51):
            await stream.__anext__()
            if read in (1, 20, 50):
                await anyio.sleep(5)
                ahead = 0 if world == "in process" else NARROW.window_items
                assert read <= local.delivered <= read + ahead


@pytest.mark.parametrize("at", ["generate", "first read", "mid stream"])
@pytest.mark.parametrize("typed", [True, False])
async def test_an_error_comes_back_typed(
    served: Serve, world: WorldKind, at: str, typed: bool, open_streams: OpenStreams
) -> None:
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
        await eventually(lambda: one.running == 0)
    assert type(caught.value) is (EngineShutdown if typed else Unknown)
    if world == "in process":
        assert (caught.value if typed else caught.value.__cause__) is error
    assert local.open == 0


# -- a worker that goes away


async def test_an_instance_that_is_not_there_cannot_be_connected(world: WorldKind) -> None:
    async with two_runtimes(world) as (_, caller):
        called = caller.workers(WHERE).engine(5)
        with pytest.raises(CannotConnect, match=r"instance_id=5 not found for endpoint dyn://ns\.comp\.ep"):
            await called.generate(Context(None))


@pytest.mark.parametrize("script", [(1, Stall()), (1, Wait(100), 2), (1, *range(20))])
@pytest.mark.parametrize("reading", [True, False])
async def test_a_crash_is_a_disconnect_and_never_a_short_answer(
    served: Serve, world: WorldKind, script: tuple[Any, ...], reading: bool, open_streams: OpenStreams
) -> None:
    local, request, errors = ScriptedEngine(script), Context(None), list[BaseException]()
    async with served(local) as (one, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1

        async def read() -> None:
            try:
                while True:
                    await stream.__anext__()
            except (Disconnected, StopAsyncIteration) as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            if reading and len(script) < 4:
                tasks.start_soon(read)
                await anyio.sleep(1)
                one.abort()
            else:
                one.abort()
                tasks.start_soon(read)
        assert [type(error) for error in errors] == [Disconnected]
        assert not request.is_stopped
        await eventually(lambda: local.requests[0].is_killed)
        with pytest.raises(CannotConnect):
            await called.generate(Context(None))
    assert local.open == 0


async def test_a_crash_before_the_first_item_is_a_disconnect(served: Serve, open_streams: OpenStreams) -> None:
    local = ScriptedEngine([Wait(1), 1])
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


async def test_a_crash_before_there_is_a_stream_is_a_disconnect(
    served: Serve, world: WorldKind, open_streams: OpenStreams
) -> None:
    async with served(Preparing()) as (one, called), anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(Disconnected) as caught:
                await called.generate(Context(None))
            if world == "in process":  # over a network the caller does not wait for the engine
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


async def test_an_engine_that_raises_when_killed_is_still_a_disconnect(
    served: Serve, open_streams: OpenStreams
) -> None:
    async with served(RaisingWhenKilled()) as (one, called), await called.generate(Context(None)) as stream:
        assert await stream.__anext__() == 1
        one.abort()
        with pytest.raises(Disconnected):
            await stream.__anext__()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stopped_request_gets_no_disconnect(served: Serve, how: str, open_streams: OpenStreams) -> None:
    request = Context(None)
    script = [1, Wait(1), 2]
    async with served(ScriptedEngine(script)) as (one, called), await called.generate(request) as stream:
        assert await stream.__anext__() == 1
        getattr(request, how)()
        one.abort()
        assert [item async for item in stream] == []


async def test_a_crash_leaves_other_instances_alone(world: WorldKind, open_streams: OpenStreams) -> None:
    async with two_runtimes(world) as (worker, caller):
        first, _ = [await worker.serve(WHERE, ScriptedEngine([1, Wait(1), 2]), instance_id=i) for i in (1, 2)]
        workers = caller.workers(WHERE)
        async with await workers.engine(2).generate(Context(None)) as stream:
            assert await stream.__anext__() == 1
            first.abort()
            assert [item async for item in stream] == [2]


# -- a worker that closes


async def test_closing_waits_for_what_runs_and_takes_nothing_new(served: Serve, open_streams: OpenStreams) -> None:
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
        assert 3 <= anyio.current_time() - start <= 3.2  # over a network the engine has begun to wait before


async def test_closing_cuts_what_outlasts_its_time(served: Serve, open_streams: OpenStreams) -> None:
    local = ScriptedEngine([1, Stall()])
    async with served(local) as (one, called), await called.generate(Context(None)) as stream:
        assert await stream.__anext__() == 1
        start = anyio.current_time()
        await one.close(7.0)
        assert anyio.current_time() - start == pytest.approx(7, abs=0.001)
        with pytest.raises(Disconnected):
            await stream.__anext__()
        await one.close()
    assert local.open == 0


async def test_closers_do_not_miss_each_other(served: Serve, open_streams: OpenStreams) -> None:
    async with served(ScriptedEngine([1, Wait(3)])) as (one, called), anyio.create_task_group() as tasks:
        stream = await called.generate(Context(None))
        for _ in range(2):
            tasks.start_soon(one.close, 100.0)
        tasks.start_soon(stream.collect)
    assert anyio.current_time() < 50


# -- what is counted


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_the_calls_of_an_instance_are_counted(world: WorldKind, how: str, open_streams: OpenStreams) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")

    def script(payload: Any) -> list[Any]:
        return [1, Fail(LookupError("broken")) if payload == "fails" else Wait(5), 2]

    async with two_runtimes(world, metrics=Metrics(meter, family="component")) as (worker, caller):
        await worker.serve(WHERE, ScriptedEngine(script), instance_id=0x1A)
        called = caller.workers(WHERE).engine(0x1A)
        await (await called.generate(Context("good"))).collect()
        with pytest.raises(Unknown):
            await (await called.generate(Context("fails"))).collect()
        stopped = Context("good")
        stream = await called.generate(stopped)
        await stream.__anext__()
        getattr(stopped, how)()
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
