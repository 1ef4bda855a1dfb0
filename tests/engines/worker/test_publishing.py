"""KV events and load snapshots of a worker's engine on the event plane."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import (
    ComponentSnapshot,
    DisaggregationMode,
    EngineConfig,
    KvEventPublisher,
    MetricsBindings,
    PushSource,
    SnapshotPublisher,
    Worker,
    WorkerConfig,
)
from engines.mocker import MockEngine, MockEngineArgs
from operators.kv import EventLog, WorkerRank
from pipeline import (
    CannotConnect,
    Context,
    InvalidArgument,
    PenstockError,
)
from pipeline.errors import BackendUnknown
from pipeline.network import Event, Runtime, Scope
from pipeline.protocols import PreprocessedRequest, StopConditions
from pipeline.protocols.kv import (
    KV_EVENTS_TOPIC,
    KV_METRICS_TOPIC,
    KV_RATES_TOPIC,
    LOADS_EVERY_S,
    ActiveLoad,
    KvCleared,
    KvEvent,
    KvRemoved,
    PassRates,
    RankRates,
    RouterEvent,
)
from tests.engines.worker.worlds import BROKEN, ScriptedSteps, collect, hosted
from tests.pipeline.network.direct_events.worlds import deployment


@pytest.fixture
def changes() -> list[Any]:
    """The publishers that the engine was given, in order."""
    return []


async def listening(runtime: Runtime, topic: str, kind: type[Any], received: list[Event[Any]]) -> None:
    runtime.events.subscribe(Scope("dynamo", "backend"), topic, kind).subscribe(received.append)


async def test_kv_events_of_each_rank_reach_the_component(changes: list[KvEventPublisher]) -> None:
    engine = ScriptedSteps(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources = [PushSource(changes.append, dp_rank=rank) for rank in (3, 0)]
    received: list[Event[RouterEvent]] = []
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_EVENTS_TOPIC, RouterEvent, received)
        async with hosted(engine, runtime, worker_id=7):
            assert [publisher.dp_rank for publisher in changes] == [3, 0]
            changes[0].publish(KvCleared())
            changes[1].publish(KvRemoved([1]))
            changes[0].publish(KvRemoved([2]))
    assert [event.payload for event in received] == [
        RouterEvent(7, KvEvent(1, KvCleared(), 3)),
        RouterEvent(7, KvEvent(1, KvRemoved([1]), 0)),
        RouterEvent(7, KvEvent(2, KvRemoved([2]), 3)),
    ]
    assert [event.sequence for event in received] == [0, 1, 2], "one publisher, so the order of ranks is kept"


async def test_a_change_of_a_lower_tier_is_published_as_one_with_a_log_and_without(
    changes: list[KvEventPublisher],
) -> None:
    received: list[Event[RouterEvent]] = []
    for make_log in (None, lambda worker_id, dp_rank: EventLog(WorkerRank(worker_id, dp_rank))):
        engine = ScriptedSteps(config=EngineConfig(model="m", kv_cache_block_size=16))
        engine.sources = [PushSource(changes.append)]
        async with Runtime.in_process() as runtime:
            await listening(runtime, KV_EVENTS_TOPIC, RouterEvent, received)
            async with hosted(engine, runtime, worker_id=7, kv_event_log=make_log):
                changes[-1].publish(KvRemoved([1]), "host_pinned")
                changes[-1].publish(KvRemoved([2]))
    expected = [RouterEvent(7, KvEvent(1, KvRemoved([1])), "host_pinned"), RouterEvent(7, KvEvent(2, KvRemoved([2])))]
    assert [event.payload for event in received] == expected * 2


async def test_a_decode_worker_that_may_prefill_serves_every_request_and_publishes_no_kv_events() -> None:
    received: list[Event[Any]] = []
    payload = PreprocessedRequest(list(range(200)), stop_conditions=StopConditions(max_tokens=2))
    engine = MockEngine(MockEngineArgs(worker_type="decode"))
    config = WorkerConfig(disaggregation_mode=DisaggregationMode.DECODE, may_prefill=True)
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_EVENTS_TOPIC, RouterEvent, received)
        async with hosted(engine, runtime, config=config) as worker:
            assert [len(tokens) for tokens in await collect(worker, Context(payload))] == [1, 1, 0]
            assert engine.ranks[0].scheduler.pool.names()
    assert received == []


async def test_without_a_block_size_kv_events_are_left_out_with_a_warning(
    changes: list[KvEventPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedSteps()
    async with hosted(engine):
        assert not caplog.records
    engine = ScriptedSteps()
    engine.sources = [PushSource(changes.append)]
    async with hosted(engine):
        assert changes == []
    assert "KV block size" in caplog.text


async def test_without_kv_routing_only_the_metrics_are_set_up(changes: list[Any]) -> None:
    engine = ScriptedSteps(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources = [PushSource(changes.append)]
    engine.bindings = MetricsBindings(dp_ranks=[0], on_publisher_ready=changes.append)
    async with hosted(engine, config=WorkerConfig(enable_kv_routing=False)):
        assert engine.calls == ["start", "setup_metrics"]
    assert changes == []


async def test_snapshots_are_sent_without_kv_events_too(changes: list[SnapshotPublisher]) -> None:
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(dp_ranks=[0, 3], on_publisher_ready=changes.append)
    received: list[Event[ActiveLoad]] = []
    async with Runtime.in_process() as runtime:
        await listening(runtime, KV_METRICS_TOPIC, ActiveLoad, received)
        async with hosted(engine, runtime, worker_id=7):
            (publisher,) = changes
            assert publisher.dp_ranks == [0, 3]
            for rank in (3, 9):
                publisher.publish(rank, ComponentSnapshot(5, 10, 0.5))
            publisher.publish(0, ComponentSnapshot(5, 10, 0.5, active_decode_blocks=4, active_prefill_tokens=0))
    assert [event.payload for event in received] == [
        ActiveLoad(7, 3, kv_used_blocks=5),
        ActiveLoad(7, 0, active_decode_blocks=4, active_prefill_tokens=0, kv_used_blocks=5),
    ]


async def test_the_last_load_of_each_rank_is_repeated_until_the_worker_ends(changes: list[SnapshotPublisher]) -> None:
    """For a router in another process that comes late, or lost a report."""
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(dp_ranks=[0, 1, 2], on_publisher_ready=changes.append)
    received: list[Event[ActiveLoad]] = []
    async with deployment() as made, made.process() as here, made.process() as front:
        async with hosted(engine, here, worker_id=7):
            for blocks in (5, 6):
                changes[0].publish(0, ComponentSnapshot(blocks, 10, 0.5))
            changes[0].publish(2, ComponentSnapshot(1, 10, 0.1))
            await anyio.sleep(1)
            front.events.subscribe(Scope("dynamo", "backend"), KV_METRICS_TOPIC, ActiveLoad).subscribe(received.append)
            await anyio.sleep(LOADS_EVERY_S)
            known = [ActiveLoad(7, 0, kv_used_blocks=6), ActiveLoad(7, 2, kv_used_blocks=1)]
            assert [event.payload for event in received] == known
            await anyio.sleep(LOADS_EVERY_S)
            assert [event.payload for event in received] == 2 * known
        received.clear()
        await anyio.sleep(10 * LOADS_EVERY_S)
        assert received == []


RATES = PassRates(1, 2, 3, 4)


async def test_rates_are_published_as_they_are_known_and_repeated(changes: list[SnapshotPublisher]) -> None:
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(dp_ranks=[0, 3], on_publisher_ready=changes.append)
    received: list[Event[RankRates]] = []
    async with deployment() as made, made.process() as here, made.process() as front:
        async with hosted(engine, here, worker_id=7):
            for rank in (3, 9):
                changes[0].publish_rates(rank, PassRates(9))
            changes[0].publish_rates(3, RATES)
            await anyio.sleep(1)
            front.events.subscribe(Scope("dynamo", "backend"), KV_RATES_TOPIC, RankRates).subscribe(received.append)
            await anyio.sleep(LOADS_EVERY_S)
            assert [event.payload for event in received] == [RankRates(7, RATES, 3)]
        received.clear()
        await anyio.sleep(10 * LOADS_EVERY_S)
        assert received == []


async def test_a_worker_whose_engine_reports_no_rates_has_no_publisher_for_them(
    changes: list[SnapshotPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, topics = ScriptedSteps(), list[str]()
    engine.bindings = MetricsBindings(dp_ranks=[0], on_publisher_ready=changes.append)
    async with Runtime.in_process() as runtime:
        publisher = runtime.events.publisher

        def noted(scope: Scope, topic: str) -> Any:
            topics.append(topic)
            return publisher(scope, topic)

        monkeypatch.setattr(runtime.events, "publisher", noted)
        async with hosted(engine, runtime):
            changes[0].publish(0, ComponentSnapshot(5, 10, 0.5))
            assert topics == [KV_METRICS_TOPIC]
            for _ in range(2):
                changes[0].publish_rates(0, RATES)
            assert topics == [KV_METRICS_TOPIC, KV_RATES_TOPIC]


async def test_rates_that_cannot_be_published_are_logged(
    changes: list[SnapshotPublisher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(dp_ranks=[0], on_publisher_ready=changes.append)
    async with Runtime.in_process() as runtime, hosted(engine, runtime):

        def refuses(*_: object) -> Any:
            raise OSError("no broker")

        monkeypatch.setattr(runtime.events, "publisher", refuses)
        changes[0].publish_rates(0, RATES)
    assert "no broker" in caplog.text


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
    engine = ScriptedSteps(config=EngineConfig(model="m", kv_cache_block_size=16))
    engine.sources, engine.bindings = sources, bindings
    with pytest.raises(raised):
        await Worker(engine, environment={}).__aenter__()
    assert engine.calls == ["start", "setup_metrics", "kv_event_sources", "cleanup"]


async def test_an_event_plane_that_refuses_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def publisher(*_: object) -> Any:
        raise OSError("no broker")

    engine = ScriptedSteps()
    engine.bindings = MetricsBindings(dp_ranks=[0])
    async with Runtime.in_process() as runtime:
        monkeypatch.setattr(runtime.events, "publisher", publisher)
        with pytest.raises(CannotConnect, match="no broker"):
            await Worker(engine, runtime=runtime, environment={}).__aenter__()
    assert engine.calls[-1] == "cleanup"
