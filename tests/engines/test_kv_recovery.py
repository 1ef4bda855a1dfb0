"""Workers that keep their KV events for routers that missed some: what they keep, and when recovery is available."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread, get_ident
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from engines import (
    DisaggregationMode,
    EchoEngine,
    EngineConfig,
    KvEventPublisher,
    PushSource,
    ShutdownTimes,
    Worker,
    WorkerConfig,
)
from engines.publishing import KvEventLog, recovery_engine
from pipeline import AsyncEngine, CannotConnect, Context, InvalidArgument
from pipeline.errors import BackendUnknown
from pipeline.network import Added, EndpointId, Event, Runtime, Scope
from pipeline.protocols.kv import (
    KV_EVENTS_TOPIC,
    KvCleared,
    KvEvent,
    KvEventData,
    KvRemoved,
    RecoveredEvents,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    StorageTier,
)
from pipeline.testing import ScriptedEngine, check_engine

WHERE = EndpointId("dynamo", "backend", "generate")
TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)
NAMES = ["worker_kv_indexer_query_dp0", "worker_kv_indexer_query_dp3"]


class Kept:
    """A log that numbers from 101 and returns all its events for any range."""

    def __init__(self, worker_id: int, dp_rank: int) -> None:
        self.worker_id, self.dp_rank = worker_id, dp_rank
        self.events: list[RouterEvent] = []
        self.ranges: list[tuple[int | None, int | None]] = []
        self.threads: set[int] = set()
        self.fails: Exception | None = None

    def record(self, change: KvEventData, storage_tier: StorageTier = "device", /) -> RouterEvent:
        self.threads.add(get_ident())
        if self.fails is not None:
            raise self.fails
        event = KvEvent(101 + len(self.events), change, self.dp_rank)
        self.events.append(RouterEvent(self.worker_id, event, storage_tier))
        return self.events[-1]

    def recover(self, start: int | None, end: int | None) -> RecoveredEvents:
        self.ranges.append((start, end))
        return RecoveredEvents(list(self.events))


class Logs:
    """Creates logs, and keeps them by worker and rank."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], Kept] = {}

    def __call__(self, worker_id: int, dp_rank: int) -> KvEventLog:
        return self.made.setdefault((worker_id, dp_rank), Kept(worker_id, dp_rank))


class Engine(EchoEngine):
    """An engine with KV events of some ranks; its background fails after `fails_s` seconds, if given."""

    def __init__(self, ranks: Sequence[int] = (3, 0), *, block_size: int | None = 16, fails_s: float | None = None):
        super().__init__()
        self.ranks, self.block_size, self.fails_s = ranks, block_size, fails_s
        self.publishers: dict[int, KvEventPublisher] = {}

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m", kv_cache_block_size=self.block_size)

    async def kv_event_sources(self) -> list[PushSource]:
        return [PushSource(lambda made: self.publishers.update({made.dp_rank: made}), rank) for rank in self.ranks]

    async def background(self) -> None:
        await anyio.sleep(float("inf") if self.fails_s is None else self.fails_s)
        raise LookupError("the scheduler broke")


def worker_of(engine: Engine, runtime: Runtime, **settings: Any) -> Worker:
    return Worker(engine, runtime=runtime, **{"environment": {}, "times": TIMES, "kv_event_log": Logs(), **settings})


async def names(runtime: Runtime) -> list[str]:
    """Return the names of the discoverable endpoints."""
    return sorted(instance.endpoint for instance in await runtime.discovery.instances("dynamo/backend"))


async def engine_of(runtime: Runtime, worker: Worker, dp_rank: int) -> AsyncEngine[Any, RecoveryReply]:
    workers = runtime.workers(f"dynamo/backend/worker_kv_indexer_query_dp{dp_rank}", RecoveryReply)
    await workers.wait_for_instances()
    return workers.engine(worker.worker_id)


async def request_recovery(runtime: Runtime, worker: Worker, dp_rank: int, *request: int | None) -> Any:
    engine = await engine_of(runtime, worker, dp_rank)
    (reply,) = await (await engine.generate(Context(RecoveryRequest(dp_rank, *request)))).collect()
    return reply.answer


# -- what is kept


async def test_what_the_log_records_is_published_and_answered() -> None:
    logs = Logs()
    received: list[Event[RouterEvent]] = []
    async with Runtime.in_process() as runtime:
        runtime.events.subscribe(Scope("dynamo", "backend"), KV_EVENTS_TOPIC, RouterEvent).subscribe(received.append)
        async with worker_of(engine := Engine(), runtime, worker_id=7, kv_event_log=logs) as worker:
            for rank, change in ((3, KvCleared()), (0, KvRemoved([1])), (3, KvRemoved([2]))):
                engine.publishers[rank].publish(change)
            assert await request_recovery(runtime, worker, 3, 5, 6) == RecoveredEvents(logs.made[7, 3].events)
            assert await request_recovery(runtime, worker, 0) == RecoveredEvents(logs.made[7, 0].events)
    assert [(e.payload.event.dp_rank, e.payload.event.event_id) for e in received] == [(3, 101), (0, 101), (3, 102)]
    assert [event.payload for event in received if event.payload.event.dp_rank == 3] == logs.made[7, 3].events
    assert (logs.made[7, 3].ranges, logs.made[7, 0].ranges) == ([(5, 6)], [(None, None)])
    assert engine.publishers[3].last_event_id == 102


async def test_an_answer_names_the_publisher_of_the_events() -> None:
    """Each start of a worker has its own publisher id."""
    received: list[Event[RouterEvent]] = []
    named: list[int | None] = []
    async with Runtime.in_process() as runtime:
        runtime.events.subscribe(Scope("dynamo", "backend"), KV_EVENTS_TOPIC, RouterEvent).subscribe(received.append)
        for _ in range(2):
            async with worker_of(engine := Engine(), runtime, worker_id=7) as worker:
                for rank in (3, 0):
                    engine.publishers[rank].publish(KvCleared())
                    stream = await (await engine_of(runtime, worker, rank)).generate(Context(RecoveryRequest(rank)))
                    named += [reply.publisher_id for reply in await stream.collect()]
    assert named == [event.publisher_id for event in received]
    assert len(named) == 4
    assert len(set(named)) == 2


async def test_a_log_is_written_in_the_thread_it_is_read_in() -> None:
    """An engine may publish from its own thread."""
    sent: list[RouterEvent] = []
    all_sent = anyio.Event()

    def send(event: RouterEvent) -> None:
        sent.append(event)
        if len(sent) == 3:
            all_sent.set()

    log = Kept(7, 0)
    publisher = KvEventPublisher(7, 0, send, log)

    def publish() -> None:
        for block in range(3):
            publisher.publish(KvRemoved([block]))

    thread = Thread(target=publish)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    await all_sent.wait()
    assert log.threads == {get_ident()}
    assert [event.event.data for event in sent] == [KvRemoved([0]), KvRemoved([1]), KvRemoved([2])]


async def test_a_change_the_log_refuses_is_not_published_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[RouterEvent] = []
    log = Kept(7, 0)
    publisher = KvEventPublisher(7, 0, sent.append, log)
    log.fails = ValueError("no such block")
    publisher.publish(KvCleared())
    log.fails = None
    publisher.publish(KvCleared())
    assert [event.event.event_id for event in sent] == [101]
    assert "no such block" in caplog.text


async def test_what_cannot_be_sent_from_another_thread_is_logged_kept_and_ends_no_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A callback that raises would end the loop of trio."""
    tried = anyio.Event()

    def send(event: RouterEvent) -> None:
        tried.set()
        raise OSError("the broker is away")

    log = Kept(7, 0)
    publisher = KvEventPublisher(7, 0, send, log)
    await anyio.to_thread.run_sync(publisher.publish, KvCleared())
    await tried.wait()
    assert [event.event.event_id for event in log.events] == [101]
    assert "the broker is away" in caplog.text


async def test_a_recovery_request_for_another_rank_is_refused() -> None:
    stream = await recovery_engine(Kept(7, 3), 3).generate(Context(RecoveryRequest(0)))
    with pytest.raises(InvalidArgument) as caught:
        await stream.collect()
    assert caught.value.field == "dp_rank"


async def test_the_engine_of_a_log_holds_the_contract() -> None:
    await check_engine(
        lambda: recovery_engine(Kept(7, 0), 0),
        request=RecoveryRequest(),
        expected=[RecoveryReply.of(RecoveredEvents([]))],
        bad_request=RecoveryRequest(1),
    )


# -- when recovery is available


async def test_recovery_endpoints_open_before_the_worker_is_registered_and_close_after_it() -> None:
    seen: list[tuple[str, str]] = []
    async with Runtime.in_process() as runtime:
        runtime.discovery.watch("dynamo/backend").subscribe(
            lambda news: seen.append(("+" if isinstance(news, Added) else "-", news.item.endpoint))
        )
        async with worker_of(Engine(), runtime) as worker:
            assert await names(runtime) == ["generate", *NAMES]
            rank = await engine_of(runtime, worker, 0)
        assert await names(runtime) == []
        assert runtime.served == {}
        with pytest.raises(CannotConnect):
            await rank.generate(Context(RecoveryRequest()))
    assert [kind for kind, _ in seen] == ["+"] * 3 + ["-"] * 3
    assert (seen[2], seen[3]) == (("+", "generate"), ("-", "generate"))


async def test_a_worker_in_its_grace_period_is_not_discoverable() -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = worker_of(Engine(), runtime)
        await worker.__aenter__()
        rank = await engine_of(runtime, worker, 0)
        tasks.start_soon(worker.__aexit__, None, None, None)
        await anyio.sleep(1)
        assert await names(runtime) == []
        with pytest.raises(CannotConnect):
            await rank.generate(Context(RecoveryRequest()))


@pytest.mark.parametrize("taken", ["generate", *NAMES])
async def test_a_start_that_fails_leaves_no_endpoint(taken: str) -> None:
    async with Runtime.in_process() as runtime:
        await runtime.serve(f"dynamo/backend/{taken}", ScriptedEngine([]), instance_id=7)
        with pytest.raises(InvalidArgument, match="served already"):
            await worker_of(Engine(), runtime, worker_id=7).__aenter__()
        assert await names(runtime) == [taken]
        assert len(runtime.served) == 1


@pytest.mark.parametrize("kind", ["shutdown", "cancel"])
async def test_a_start_that_is_given_up_leaves_no_endpoint(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is cancelled while the second rank is being registered."""
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        register = runtime.discovery.register

        async def slow(instance: Any) -> Any:
            if instance.endpoint == NAMES[0]:
                await anyio.sleep(5)
            return await register(instance)

        monkeypatch.setattr(runtime.discovery, "register", slow)
        worker = worker_of(Engine(), runtime)
        tasks.start_soon(worker.__aenter__)
        await anyio.sleep(1)
        assert await names(runtime) == [NAMES[1]]
        if kind == "shutdown":
            worker.shutdown()
            await anyio.sleep(1)
            await worker.__aexit__(None, None, None)
        else:
            tasks.cancel_scope.cancel()
    assert runtime.served == {}


async def test_a_start_that_is_cancelled_withdraws_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Runtime.in_process() as runtime:
        register = runtime.discovery.register

        async def slow(instance: Any) -> Any:
            if instance.endpoint == "generate":
                await anyio.sleep(5)
            return await register(instance)

        monkeypatch.setattr(runtime.discovery, "register", slow)
        with anyio.move_on_after(1):
            await worker_of(Engine(), runtime).__aenter__()
        assert await names(runtime) == []
        assert runtime.served == {}


async def test_a_worker_whose_end_is_cancelled_leaves_no_endpoint() -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        worker = worker_of(Engine(), runtime, times=ShutdownTimes(grace_s=60.0, timeout_s=60.0))
        await worker.__aenter__()
        tasks.start_soon(worker.__aexit__, None, None, None)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.1)
            assert await names(runtime) == []
    assert runtime.served == {}


async def test_a_broken_worker_no_longer_offers_recovery() -> None:
    async with Runtime.in_process() as runtime, worker_of(Engine(fails_s=3.0), runtime) as worker:
        assert await names(runtime) == ["generate", *NAMES]
        await worker.wait()
        assert isinstance(worker.failure, BackendUnknown)
        assert runtime.served == {}
        await anyio.sleep(0.01)
        assert await names(runtime) == []


# -- how a worker advertises recovery


async def test_the_card_advertises_recovery_where_the_worker_offers_it() -> None:
    async with Runtime.in_process() as runtime, worker_of(Engine(), runtime):
        (model,) = await runtime.discovery.models(WHERE.path)
        assert model.card.runtime_config.enable_local_indexer


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ({}, {"kv_event_log": None}),
        ({}, {"config": WorkerConfig(component="backend", enable_local_indexer=False)}),
        ({}, {"config": WorkerConfig(component="backend", enable_kv_routing=False)}),
        ({}, {"config": WorkerConfig(component="backend", disaggregation_mode=DisaggregationMode.DECODE)}),
        ({"ranks": ()}, {}),
        ({"block_size": None}, {}),
    ],
)
async def test_a_worker_without_an_event_log_advertises_and_offers_no_recovery(
    engine: dict[str, Any], settings: dict[str, Any]
) -> None:
    async with Runtime.in_process() as runtime, worker_of(Engine(**engine), runtime, **settings):
        (model,) = await runtime.discovery.models(WHERE.path)
        assert not model.card.runtime_config.enable_local_indexer
        assert await names(runtime) == ["generate"]


# -- the events of one rank


def test_changes_are_numbered_from_one_without_a_gap_for_worker_and_rank() -> None:
    sent: list[RouterEvent] = []
    publisher = KvEventPublisher(7, 2, sent.append)
    for _ in range(3):
        publisher.publish(KvCleared())
    assert [event.event.event_id for event in sent] == [1, 2, 3]
    assert {(event.worker_id, event.event.dp_rank) for event in sent} == {(7, 2)}
    assert publisher.last_event_id == 3


def test_each_rank_counts_by_itself() -> None:
    sent: list[RouterEvent] = []
    for publisher in [KvEventPublisher(7, rank, sent.append) for rank in (0, 1)]:
        publisher.publish(KvCleared())
    assert [(event.event.dp_rank, event.event.event_id) for event in sent] == [(0, 1), (1, 1)]


def test_a_source_belongs_to_the_first_rank_by_default() -> None:
    assert PushSource(print).dp_rank == 0
    assert PushSource(print, 3).dp_rank == 3
