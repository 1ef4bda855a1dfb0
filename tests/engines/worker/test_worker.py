"""A worker from the start of its engine to its end, in a block of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from engines import (
    ComponentSnapshot,
    DisaggregationMode,
    EchoEngine,
    EngineConfig,
    GenerateContext,
    KvEventPublisher,
    LLMEngine,
    MetricsBindings,
    MetricsContext,
    PushSource,
    ShutdownTimes,
    SnapshotPublisher,
    SystemHealth,
    Worker,
    WorkerConfig,
    WorkerState,
)
from engines.mocker import MockEngine, MockEngineArgs
from engines.worker import worker_labels
from pipeline import (
    Annotated,
    CannotConnect,
    Context,
    ContractViolation,
    Disconnected,
    InvalidArgument,
    PenstockError,
    StreamClosed,
)
from pipeline.errors import BackendUnknown
from pipeline.network import EndpointId, Event, Runtime, Scope
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.protocols.kv import (
    KV_EVENTS_TOPIC,
    KV_METRICS_TOPIC,
    ActiveLoad,
    KvCleared,
    KvEvent,
    KvRemoved,
    RouterEvent,
)
from pipeline.telemetry import Metrics
from pipeline.testing import OpenStreams

pytestmark = pytest.mark.anyio

WHERE = "dynamo/backend/generate"
HANG = "hang"
TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)


class Fake(LLMEngine):
    """Does at each step what it is told: an error is raised, a number is the seconds it takes, HANG waits for ever."""

    def __init__(self, *, config: Any = None, says: int = 3, each_s: float = 1.0, **steps: Any) -> None:
        self.config = config or EngineConfig(model="m")
        self.steps, self.says, self.each_s = steps, says, each_s
        self.calls: list[str] = []
        self.at_s: dict[str, float] = {}
        self.aborted: list[str] = []
        self.open = 0
        self.sources: Sequence[PushSource] = ()
        self.bindings = MetricsBindings()
        self.metrics_context: MetricsContext | None = None
        self.worker_id = 0

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        await self._do("start")
        return self.config

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.open += 1
        try:
            for token in range(self.says):
                with anyio.move_on_after(self.each_s):
                    await context.stopped()
                if context.is_stopped:
                    yield LLMEngineOutput.cancelled()
                    return
                yield LLMEngineOutput([token])
            yield LLMEngineOutput.stop()
        finally:
            self.open -= 1

    async def abort(self, context: GenerateContext) -> None:
        self.aborted.append(context.id)

    async def drain(self) -> None:
        await self._do("drain")

    async def cleanup(self) -> None:
        await self._do("cleanup")

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        self.metrics_context = context
        await self._do("setup_metrics")
        return self.bindings

    async def kv_event_sources(self) -> Sequence[PushSource]:
        await self._do("kv_event_sources")
        return self.sources

    async def _do(self, step: str) -> None:
        self.calls.append(step)
        self.at_s[step] = anyio.current_time()
        what = self.steps.get(step)
        if what is HANG:
            await anyio.sleep_forever()
        elif isinstance(what, float):
            await anyio.sleep(what)
        elif what is not None:
            raise what


ALL_STEPS = ["start", "setup_metrics", "kv_event_sources", "drain", "cleanup"]


@asynccontextmanager
async def hosted(engine: LLMEngine, runtime: Runtime | None = None, **settings: Any) -> AsyncIterator[Worker]:
    async with Worker(engine, runtime=runtime, environment={}, **{"times": TIMES, **settings}) as worker:
        yield worker


async def say(worker: Worker, request: Context[PreprocessedRequest] | None = None) -> list[list[int]]:
    """What the worker answers, asked across its runtime."""
    called = worker.runtime.workers(worker.endpoint, Annotated[LLMEngineOutput]).engine(worker.worker_id)
    async with await called.generate(request or Context(PreprocessedRequest([1]))) as stream:
        return [item.data.token_ids for item in [item async for item in stream] if item.data is not None]


# -- the ordinary life


async def test_a_worker_serves_its_engine_and_ends_in_order(open_streams: OpenStreams) -> None:
    engine = Fake(start=4.0)
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            assert anyio.current_time() == pytest.approx(4)
            assert (worker.state, worker.engine_config) == (WorkerState.RUNNING, engine.config)
            assert engine.worker_id == worker.worker_id
            (model,) = await runtime.discovery.models(WHERE)
            assert (model.instance_id, model.card, model.card.display_name) == (worker.worker_id, worker.card, "m")
            assert await say(worker) == [[0], [1], [2], []]
            left_s = anyio.current_time()
        assert engine.calls == ALL_STEPS
        assert engine.at_s["drain"] - left_s == pytest.approx(2), "the grace period"
        assert not await runtime.discovery.instances()
        assert not await runtime.discovery.models()
        assert worker.state is WorkerState.STOPPED
        assert runtime.served == {}


async def test_a_worker_without_a_runtime_has_one_of_its_own() -> None:
    async with hosted(EchoEngine()) as worker:
        assert await say(worker) == [[1]]
    with pytest.raises(StreamClosed):
        await worker.runtime.serve(WHERE, EchoEngine())  # type: ignore[arg-type]


async def test_workers_of_one_runtime_have_ids_of_their_own_and_end_in_any_order() -> None:
    engines = [Fake(), Fake(), Fake()]
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
            assert len(await say(worker)) == 4


async def test_a_worker_may_be_given_its_id() -> None:
    async with hosted(engine := Fake(), worker_id=26) as worker:
        assert worker.worker_id == engine.worker_id == 26
        assert str(worker) == "Fake at dynamo/backend/generate/1a"


async def test_a_worker_is_used_once() -> None:
    async with hosted(Fake()) as worker:
        with pytest.raises(StreamClosed):
            await worker.__aenter__()
    with pytest.raises(StreamClosed):
        await worker.run()


async def test_the_mode_of_the_worker_holds_for_its_requests() -> None:
    config = WorkerConfig(disaggregation_mode=DisaggregationMode.PREFILL)
    async with hosted(EchoEngine(), config=config) as worker:
        assert worker.endpoint == EndpointId("dynamo", "prefill", "generate")
        assert await say(worker, Context(PreprocessedRequest([1, 2, 3]))) == [[1]]


async def test_a_folder_gives_the_card_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 7}))
    config = WorkerConfig(model_name=str(tmp_path), served_model_name="shown")
    async with hosted(Fake(), config=config) as worker:
        assert worker.card is not None
        assert (worker.card.display_name, worker.card.context_length) == ("shown", 7)


# -- starting fails


@pytest.mark.parametrize("changes", [{"model_input": "Text"}, {"endpoint_types": ""}, {"namespace": "No Name"}])
async def test_a_wrong_config_is_refused_before_anything_starts(changes: dict[str, Any]) -> None:
    """BE-14."""
    engine = Fake()
    worker = Worker(engine, WorkerConfig(**changes), environment={})
    with pytest.raises(InvalidArgument):
        await worker.__aenter__()
    with pytest.raises(InvalidArgument):
        await worker.run()
    assert (engine.calls, worker.state) == ([], WorkerState.INIT)


BROKEN = LookupError("broken")


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
    """BE-02, and the same for the hooks after the start."""
    steps: dict[str, Any] = {step: error}
    engine = Fake(**steps)
    async with Runtime.in_process() as runtime:
        worker = Worker(engine, runtime=runtime, environment={}, times=TIMES)
        with pytest.raises(raised, match=str(error)):
            await worker.__aenter__()
        assert engine.calls == [*ALL_STEPS[: ALL_STEPS.index(step) + 1], "cleanup"]
        assert anyio.current_time() == pytest.approx(0), "there is nobody to wait for"
        assert await runtime.discovery.instances() == []
    assert (worker.state, worker.served) == (WorkerState.STOPPED, None)


async def test_a_cleanup_that_fails_too_leaves_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = Fake(start=BROKEN, cleanup=RuntimeError("worse"))
    with pytest.raises(BackendUnknown, match="broken"):
        await Worker(engine, environment={}).__aenter__()
    assert "worse" in caplog.text


async def test_a_start_that_is_cancelled_cleans_up() -> None:
    engine = Fake(start=HANG, cleanup=1.0)
    with anyio.move_on_after(3) as scope:
        await Worker(engine, environment={}).__aenter__()
    assert scope.cancelled_caught
    assert engine.calls == ["start", "cleanup"]
    assert anyio.current_time() == pytest.approx(4), "the cleanup is not cut short by it"


async def test_a_card_that_cannot_be_registered_ends_the_worker(open_streams: OpenStreams) -> None:
    engine = Fake(config=EngineConfig(model="another"))
    async with Runtime.in_process() as runtime, hosted(Fake(), runtime) as first:
        with pytest.raises(InvalidArgument, match="cannot serve 'another'"):
            await Worker(engine, runtime=runtime, environment={}, times=TIMES).__aenter__()
        assert engine.calls == ALL_STEPS
        assert [i.instance_id for i in await runtime.discovery.instances()] == [first.worker_id]


async def test_an_id_that_is_taken_is_refused() -> None:
    async with Runtime.in_process() as runtime, hosted(Fake(), runtime, worker_id=5):
        with pytest.raises(InvalidArgument, match="is served already"):
            await Worker(Fake(), runtime=runtime, worker_id=5, environment={}).__aenter__()


async def test_an_engine_without_a_name_is_refused() -> None:
    engine = Fake(config=EngineConfig(model=""))
    with pytest.raises(InvalidArgument) as refused:
        await Worker(engine, environment={}).__aenter__()
    assert (refused.value.field, engine.calls[-1]) == ("model", "cleanup")


async def test_an_engine_that_says_nothing_of_itself_breaks_the_contract() -> None:
    engine = Fake(config="m")
    with pytest.raises(ContractViolation):
        await Worker(engine, environment={}).__aenter__()
    assert engine.calls == ["start", "cleanup"]


async def test_an_engine_that_sets_nothing_up_may_say_nothing_of_it() -> None:
    engine = Fake()
    engine.bindings = None  # type: ignore[assignment]
    async with hosted(engine) as worker:
        assert worker.native_metrics() == ""


# -- told to end early


async def test_a_worker_told_to_end_before_its_start_never_starts() -> None:
    """BE-01, BE-04."""
    worker = Worker(engine := Fake(), environment={}, times=TIMES)
    worker.shutdown()
    async with worker:
        await worker.wait()
        assert worker.served is None
    assert (engine.calls, worker.state) == ([], WorkerState.STOPPED)
    assert anyio.current_time() == pytest.approx(0)


async def test_a_worker_told_to_end_while_it_starts_is_not_registered() -> None:
    """BE-05, without signals."""
    worker = Worker(engine := Fake(start=5.0), environment={}, times=TIMES)
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            await anyio.sleep(1)
            worker.shutdown()

        tasks.start_soon(ask)
        async with worker:
            assert worker.served is None
            assert worker.state is WorkerState.RUNNING
            await worker.wait()
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(5)


async def test_a_worker_told_to_end_while_it_makes_ready_is_not_registered_either() -> None:
    class Thinking(Fake):
        async def health_check_payload(self) -> None:
            await anyio.sleep(2)

    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = Worker(Thinking(), runtime=runtime, environment={}, times=TIMES)

        async def ask() -> None:
            await anyio.sleep(1)
            worker.shutdown()

        tasks.start_soon(ask)
        async with worker:
            assert (worker.served, worker.health.endpoints) == (None, {})
        assert anyio.current_time() == pytest.approx(2), "without a grace period"


async def test_a_shutdown_goes_before_a_registration_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Runtime.in_process() as runtime:

        async def register(_: Any) -> Any:
            await anyio.sleep_forever()

        monkeypatch.setattr(runtime.discovery, "register", register)
        worker = Worker(engine := Fake(), runtime=runtime, environment={}, times=TIMES)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await anyio.sleep(1)
                await anyio.to_thread.run_sync(worker.shutdown)

            tasks.start_soon(ask)
            async with worker:
                assert worker.served is None
        assert engine.calls == ALL_STEPS
        assert runtime.served == {}


# -- requests while it ends


@pytest.mark.parametrize(("tokens", "whole"), [(1, True), (5, False)])
async def test_a_request_may_end_within_the_grace_period_and_is_then_cut(
    tokens: int, whole: bool, open_streams: OpenStreams
) -> None:
    """BE-13: who outlasts it can go on elsewhere."""
    engine = Fake(says=tokens)
    request = Context(PreprocessedRequest([1]))
    said: list[Any] = []
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:

        async def ask(worker: Worker) -> None:
            try:
                said.append(await say(worker, request))
            except Disconnected:
                said.append(Disconnected)

        async with hosted(engine, runtime) as worker:
            tasks.start_soon(ask, worker)
            await anyio.sleep(0.5)
    assert said == ([[[0], []]] if whole else [Disconnected])
    assert engine.open == 0
    assert len(engine.aborted) == (0 if whole else 1)
    assert engine.at_s["cleanup"] == pytest.approx(2.5), "nothing waits for what was cut"


async def test_a_reader_that_does_not_read_holds_the_end_up_by_a_second_only() -> None:
    engine = Fake()
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            called = runtime.workers(worker.endpoint).engine(worker.worker_id)
            stream = await called.generate(Context(PreprocessedRequest([1])))
        assert engine.at_s["cleanup"] == pytest.approx(3)
        with pytest.raises(Disconnected):
            await stream.collect()


async def test_who_knows_the_worker_may_still_ask_in_the_grace_period_but_not_while_it_drains() -> None:
    engine = Fake(says=0, drain=3.0)
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
    engine = Fake(drain=3.0)
    with pytest.raises(LookupError):
        async with hosted(engine):
            raise BROKEN
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(3)


async def test_a_block_that_is_cancelled_still_drains_and_cleans_up() -> None:
    engine = Fake(drain=3.0, cleanup=1.0)
    with anyio.move_on_after(1):
        async with hosted(engine):
            await anyio.sleep_forever()
    assert engine.calls == ALL_STEPS
    assert anyio.current_time() == pytest.approx(5)


async def test_an_orderly_end_may_be_cut_short_but_not_its_cleanup() -> None:
    engine = Fake(cleanup=1.0)
    with anyio.move_on_after(0.5):
        async with hosted(engine):
            pass
    assert engine.calls == [*ALL_STEPS[:3], "cleanup"]
    assert anyio.current_time() == pytest.approx(1.5)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("after_s", [3.5, 4.5])
async def test_a_cancellation_that_knows_no_shield_leaves_nothing_running_either(after_s: float) -> None:
    """asyncio's own, as of a second Ctrl-C: while what was cut still ends, and in the cleanup."""
    running: list[str] = []

    class Busy(Fake):
        async def background(self) -> None:
            running.append("background")
            try:
                await anyio.sleep_forever()
            finally:
                running.remove("background")

    engine = Busy(says=9, cleanup=3.0)
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


# -- what goes wrong at the end


async def test_a_worker_that_cannot_be_unregistered_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """BE-08."""
    engine = Fake()
    async with Runtime.in_process() as runtime:
        async with hosted(engine, runtime) as worker:
            assert worker.served is not None

            async def unpublish() -> None:
                raise CannotConnect("no discovery")

            monkeypatch.setattr(worker.served, "unpublish", unpublish)
        assert "could not be unregistered" in caplog.text
        assert engine.calls == ALL_STEPS
        assert engine.at_s["drain"] == pytest.approx(2), "the grace period is kept"


@pytest.mark.parametrize("step", ["drain", "cleanup"])
async def test_a_drain_or_cleanup_that_fails_is_only_logged(step: str, caplog: pytest.LogCaptureFixture) -> None:
    steps: dict[str, Any] = {step: BROKEN}
    engine = Fake(**steps)
    async with hosted(engine) as worker:
        pass
    assert (engine.calls, worker.state) == (ALL_STEPS, WorkerState.STOPPED)
    assert f"{step} of Fake failed" in caplog.text


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
    """BE-07 inside a process that must go on: grace 2 and timeout 10, and 5 at least for the cleanup."""
    engine = Fake(**steps)
    async with hosted(engine) as worker:
        pass
    assert (engine.calls, worker.state) == (ALL_STEPS, WorkerState.STOPPED)
    assert anyio.current_time() == pytest.approx(ends_s)
    assert ("drain in time" in caplog.text) is (steps.get("drain") is HANG)
    assert ("clean up in time" in caplog.text) is (steps.get("cleanup") is HANG)


# -- KV events and load


@pytest.fixture
def changes() -> list[Any]:
    """Publishers the engine was given, in order."""
    return []


async def listening(runtime: Runtime, topic: str, kind: type[Any], heard: list[Event[Any]]) -> None:
    runtime.events.subscribe(Scope("dynamo", "backend"), topic, kind).subscribe(heard.append)


async def test_kv_events_of_each_rank_reach_the_component(changes: list[KvEventPublisher]) -> None:
    engine = Fake(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources = [PushSource(changes.append, dp_rank=rank) for rank in (3, 0)]
    heard: list[Event[RouterEvent]] = []
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_EVENTS_TOPIC, RouterEvent, heard)
        async with hosted(engine, runtime, worker_id=7):
            assert [publisher.dp_rank for publisher in changes] == [3, 0]
            changes[0].publish(KvCleared())
            changes[1].publish(KvRemoved([1]))
            changes[0].publish(KvRemoved([2]))
    assert [event.payload for event in heard] == [
        RouterEvent(7, KvEvent(1, KvCleared(), 3)),
        RouterEvent(7, KvEvent(1, KvRemoved([1]), 0)),
        RouterEvent(7, KvEvent(2, KvRemoved([2]), 3)),
    ]
    assert [event.sequence for event in heard] == [0, 1, 2], "one publisher, so the order of ranks is kept"


async def test_a_decode_worker_that_may_prefill_serves_whoever_asks_and_tells_no_router_of_its_cache() -> None:
    heard: list[Event[Any]] = []
    payload = PreprocessedRequest(list(range(200)), stop_conditions=StopConditions(max_tokens=2))
    engine = MockEngine(MockEngineArgs(worker_type="decode"))
    config = WorkerConfig(disaggregation_mode=DisaggregationMode.DECODE, may_prefill=True)
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_EVENTS_TOPIC, RouterEvent, heard)
        async with hosted(engine, runtime, config=config) as worker:
            assert [len(tokens) for tokens in await say(worker, Context(payload))] == [1, 1, 0]
            assert engine.ranks[0].scheduler.pool.names()
    assert heard == []


async def test_without_a_block_size_kv_events_are_left_out_with_a_warning(
    changes: list[KvEventPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Fake()
    async with hosted(engine):
        assert not caplog.records
    engine = Fake()
    engine.sources = [PushSource(changes.append)]
    async with hosted(engine):
        assert changes == []
    assert "KV block size" in caplog.text


async def test_without_kv_routing_only_the_metrics_are_set_up(changes: list[Any]) -> None:
    engine = Fake(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources = [PushSource(changes.append)]
    engine.bindings = MetricsBindings(dp_ranks=[0], on_publisher_ready=changes.append)
    async with hosted(engine, config=WorkerConfig(enable_kv_routing=False)):
        assert engine.calls == ["start", "setup_metrics"]
    assert changes == []


async def test_snapshots_are_sent_without_kv_events_too(changes: list[SnapshotPublisher]) -> None:
    """BE-88, BE-89."""
    engine = Fake()
    engine.bindings = MetricsBindings(dp_ranks=[0, 3], on_publisher_ready=changes.append)
    heard: list[Event[ActiveLoad]] = []
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_METRICS_TOPIC, ActiveLoad, heard)
        async with hosted(engine, runtime, worker_id=7):
            (publisher,) = changes
            assert publisher.dp_ranks == [0, 3]
            for rank in (3, 9):
                publisher.publish(rank, ComponentSnapshot(5, 10, 0.5))
    assert [event.payload for event in heard] == [ActiveLoad(7, 3, kv_used_blocks=5)]


def broken_source(_: object) -> None:
    raise BROKEN


@pytest.mark.parametrize(
    ("sources", "bindings", "raised"),
    [
        ([PushSource(broken_source)], MetricsBindings(), BackendUnknown),
        ([], MetricsBindings(dp_ranks=[0], on_publisher_ready=broken_source), BackendUnknown),
        ([PushSource(lambda _: None), PushSource(lambda _: None)], MetricsBindings(), InvalidArgument),
        ([], MetricsBindings(dp_ranks=[1, 1]), InvalidArgument),
    ],
)
async def test_publishers_that_cannot_be_attached_end_the_worker(
    sources: list[PushSource], bindings: MetricsBindings, raised: type[PenstockError]
) -> None:
    engine = Fake(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources, engine.bindings = sources, bindings
    with pytest.raises(raised):
        await Worker(engine, environment={}).__aenter__()
    assert engine.calls == ["start", "setup_metrics", "kv_event_sources", "cleanup"]


async def test_an_event_plane_that_refuses_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def publisher(*_: object) -> Any:
        raise OSError("no broker")

    engine = Fake()
    engine.bindings = MetricsBindings(dp_ranks=[0])
    async with Runtime.in_process() as runtime:
        monkeypatch.setattr(runtime.events, "publisher", publisher)
        with pytest.raises(CannotConnect, match="no broker"):
            await Worker(engine, runtime=runtime, environment={}).__aenter__()
    assert engine.calls[-1] == "cleanup"


# -- metrics


def test_empty_labels_are_left_out_and_the_id_is_hexadecimal() -> None:
    """BE-91."""
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
    engine = Fake(start=4.0, drain=3.0, cleanup=BROKEN, config=EngineConfig(model="m", served_model_name="s"))
    engine.bindings = MetricsBindings(dp_ranks=[2])
    async with hosted(engine, metrics=metrics, worker_id=26) as worker:
        await say(worker)
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
    """BE-92."""
    engine = Fake()
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
    engine = Fake()
    engine.bindings = MetricsBindings(native_text=lambda: text)
    async with hosted(engine) as worker:
        (line,) = worker.native_metrics().splitlines(keepends=True)
        assert line.endswith("} 1\n")


async def test_an_engine_that_fails_to_give_its_metrics_has_none(caplog: pytest.LogCaptureFixture) -> None:
    """Those of others are shown all the same."""
    engine = Fake()
    engine.bindings = MetricsBindings(native_text=lambda: str(1 / 0))
    async with hosted(engine) as worker:
        assert worker.native_metrics() == ""
    assert "ZeroDivisionError" in caplog.text


# -- health


PROBED = {"DYN_HEALTH_CHECK_ENABLED": "1", "DYN_CANARY_WAIT_TIME": "4"}


class Sick(EchoEngine):
    """Answers everybody but the canary."""

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        if request.is_probe:
            raise LookupError("broken")
        return super().generate(request, context)


@pytest.mark.parametrize(
    ("engine", "environment", "at_once", "later"),
    [
        (EchoEngine, {}, True, True),
        (Fake, {}, False, False),
        (EchoEngine, PROBED, False, True),
        (Sick, PROBED, False, False),
        (Sick, {}, True, True),
        (Fake, PROBED | {"DYN_HEALTH_CHECK_PAYLOAD": '{"token_ids": [1]}'}, False, True),
        (EchoEngine, PROBED | {"DYN_HEALTH_CHECK_PAYLOAD": "{}"}, False, False),
    ],
)
async def test_a_worker_is_healthy_when_its_target_is_ready(
    engine: type[LLMEngine], environment: dict[str, str], at_once: bool, later: bool
) -> None:
    """HLT-05, HLT-07: without a canary at once, with one when its probe has succeeded."""
    async with Worker(engine(), environment=environment, times=TIMES) as worker:
        assert worker.health.is_healthy is at_once
        await anyio.sleep(9)
        assert worker.health.is_healthy is later
    assert worker.health.endpoints == {}


async def test_real_traffic_makes_a_probed_worker_ready(open_streams: OpenStreams) -> None:
    async with Worker(Sick(), environment=PROBED, times=TIMES) as worker:
        await say(worker)
        assert worker.health.is_healthy
        await anyio.sleep(5)
        assert not worker.health.is_healthy


async def test_traffic_during_the_registration_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Runtime.in_process() as runtime:
        worker = Worker(Sick(), runtime=runtime, environment=PROBED, times=TIMES)
        register = runtime.discovery.register_model

        async def asked_at_once(model: Any) -> Any:
            await say(worker)
            return await register(model)

        monkeypatch.setattr(runtime.discovery, "register_model", asked_at_once)
        async with worker:
            assert worker.health.is_healthy


async def test_a_worker_that_could_not_be_registered_leaves_no_trace_in_the_health() -> None:
    health = SystemHealth(process_ready=True)
    config = EngineConfig(model="another")
    async with Runtime.in_process() as runtime, hosted(Fake(), runtime, health=health):
        with pytest.raises(InvalidArgument):
            await Worker(Fake(config=config), runtime=runtime, environment={}, health=health).__aenter__()
        assert len(health.endpoints) == 1


async def test_a_worker_whose_id_is_taken_says_nothing_of_the_other_ones_health() -> None:
    health = SystemHealth()
    async with Runtime.in_process() as runtime, hosted(EchoEngine(), runtime, worker_id=5, health=health):
        heard: list[bool] = []
        health.on_change(heard.append)
        with pytest.raises(InvalidArgument, match="is served already"):
            await Worker(EchoEngine(), runtime=runtime, worker_id=5, environment={}, health=health).__aenter__()
        assert (health.is_healthy, heard) == (True, [])


async def test_a_worker_that_ends_is_not_ready_from_the_start_of_its_end() -> None:
    heard: list[tuple[float, bool]] = []
    health = SystemHealth(process_ready=True)
    health.on_change(lambda healthy: heard.append((anyio.current_time(), healthy)))
    times = ShutdownTimes(grace_s=20)
    async with Worker(EchoEngine(), environment=PROBED, health=health, times=times):
        await anyio.sleep(6)
    assert heard == [(0, False), (pytest.approx(4), True), (pytest.approx(6), False), (pytest.approx(26), True)]


async def test_workers_may_share_what_is_known_of_their_health() -> None:
    """HLT-08."""
    health = SystemHealth()
    async with (
        Runtime.in_process() as runtime,
        Worker(EchoEngine(), runtime=runtime, environment=PROBED, health=health, times=TIMES),
        Worker(EchoEngine(), runtime=runtime, environment=PROBED, health=health, times=TIMES),
    ):
        async with Worker(Sick(), runtime=runtime, environment=PROBED, health=health, times=TIMES):
            await anyio.sleep(9)
            assert sorted(health.endpoints.values()) == [False, True, True]
            assert not health.is_healthy
        assert health.is_healthy


def test_the_process_environment_counts_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0.25")
    assert Worker(EchoEngine()).times.grace_s == 0.25
    assert Worker(EchoEngine(), environment={}).times.grace_s == 5.0
