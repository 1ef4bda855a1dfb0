"""What a hosted engine publishes: the KV events and the load of its ranks, and metrics.

    engine ──publish(change)──► KvEventPublisher ──► log of the rank, if any ──RouterEvent──► event plane
                                                          └── endpoint of the rank ──► a router that missed some
    engine ──publish(snapshot)─► SnapshotPublisher ──► metrics, and ActiveLoad ──► event plane
           ──publish_rates─────►        ″          ──► RankRates, seldom ──► event plane

Names, units and labels of metrics stand in the table of `pipeline.telemetry.metrics`. Source: dynamo
lib/backend-common/src/publisher.rs and metrics.rs, and lib/llm/src/kv_router/worker_query.rs, the worker's side. Other
than there, a worker's card promises answers only where there are any.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import anyio
from attrs import evolve, frozen

from pipeline import AsyncEngine, InvalidArgument, function_engine
from pipeline.loop import LoopHandle
from pipeline.protocols.kv import (
    ActiveLoad,
    KvEvent,
    KvEventData,
    PassRates,
    RankRates,
    RecoveryAnswer,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    StorageTier,
    recovery_endpoint,
)

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Runtime, Served
    from pipeline.telemetry import Metrics


T = TypeVar("T")

_log = logging.getLogger(__name__)


class KvEventPublisher:
    """Publishes the changes of one rank's cache, numbered from 1 without a gap, or as its `log` numbers them.

    A log is written, and its events are sent, in the thread the publisher was made in. What either raises is logged: a
    change that the log refuses is not published; one that cannot be sent can still be recovered from the log.
    """

    def __init__(
        self, worker_id: int, dp_rank: int, send: Callable[[RouterEvent], object], log: KvEventLog | None = None
    ) -> None:
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.last_event_id = 0
        self._send = send
        self._kept_in = log
        self._handle = LoopHandle()

    def publish(self, change: KvEventData, storage_tier: StorageTier = "device") -> None:
        """Publish the change of a tier. Does not wait; call it on one thread, in the order of the changes."""
        if (log := self._kept_in) is None:
            event = KvEvent(self.last_event_id + 1, change, self.dp_rank)
            self._publish(RouterEvent(self.worker_id, event, storage_tier))
        else:
            self._handle.run(lambda: self._record(log, change, storage_tier))  # where recovery reads the log

    def _record(self, log: KvEventLog, change: KvEventData, storage_tier: StorageTier) -> None:
        try:
            # A log that knows the device only is enough for an engine that has nothing else.
            self._publish(log.record(change) if storage_tier == "device" else log.record(change, storage_tier))
        except Exception:  # in a callback of the loop it would be lost, or end the loop
            _log.exception("a change of rank %d is not published", self.dp_rank)

    def _publish(self, event: RouterEvent) -> None:
        self.last_event_id = event.event.event_id
        self._send(event)


@frozen
class PushSource:
    """An engine that pushes its events: `on_ready` is called with the publisher of the rank, once, before serving."""

    on_ready: Callable[[KvEventPublisher], None]
    dp_rank: int = 0


class KvEventLog(Protocol):
    """Numbers and keeps the events of one rank. Called in one thread; neither call waits."""

    def record(self, change: KvEventData, storage_tier: StorageTier = "device", /) -> RouterEvent:
        """Return the change as the rank's next event."""
        ...

    def recover(self, start: int | None, end: int | None) -> RecoveryAnswer:
        """Return the answer for a router that needs the events from `start` to `end`."""
        ...


MakeKvEventLog = Callable[[int, int], KvEventLog]
"""Returns the log of a worker id and rank."""


def recovery_engine(
    log: KvEventLog, dp_rank: int, publisher_id: int | None = None
) -> AsyncEngine[RecoveryRequest, RecoveryReply]:
    """Return an engine that answers from the log, one item a request.

    `publisher_id` is the id under which the log's events are published: with it routers can decide which of two
    publishers of one worker id is alive. Raises InvalidArgument for a request for another rank.
    """

    async def recover(request: RecoveryRequest) -> AsyncIterator[RecoveryReply]:
        if request.dp_rank != dp_rank:
            raise InvalidArgument(f"this is rank {dp_rank}, not {request.dp_rank}", field="dp_rank")
        yield RecoveryReply.of(log.recover(request.start_event_id, request.end_event_id), publisher_id)

    return function_engine(recover)


class KvEventLogs:
    """Makes the logs, then serves them in the component of the worker's endpoint under the worker's id.

    Without `make_log` there are none, and nothing is served. After `serve` the owner calls `withdraw` and `cut`; these
    do nothing if nothing is served.
    """

    def __init__(self, make_log: MakeKvEventLog | None, endpoint: EndpointId, worker_id: int) -> None:
        self._make_log = make_log
        self._endpoint = endpoint
        self._worker_id = worker_id
        self.publisher_id: int | None = None
        """The id under which the events of the logs are published, given in every answer; set it before `serve`."""
        self._logs: dict[int, KvEventLog] = {}
        self._served: list[Served] = []

    @property
    def answers(self) -> bool:
        """Whether any rank has a log."""
        return bool(self._logs)

    def log_of(self, dp_rank: int) -> KvEventLog | None:
        """Return the rank's log, made at the first call; None if this worker keeps none."""
        if self._make_log is not None and dp_rank not in self._logs:
            self._logs[dp_rank] = self._make_log(self._worker_id, dp_rank)
        return self._logs.get(dp_rank)

    async def serve(self, runtime: Runtime) -> None:
        """Serve each rank at its endpoint. Raises as `runtime.serve`; `withdraw` is due then as well."""
        for dp_rank, log in self._logs.items():
            where = evolve(self._endpoint, endpoint=recovery_endpoint(dp_rank))
            engine = recovery_engine(log, dp_rank, self.publisher_id)
            self._served.append(await runtime.serve(where, engine, instance_id=self._worker_id))

    async def withdraw(self) -> None:
        """Remove the endpoints from discovery and accept no new request. Failures are logged."""
        async with anyio.create_task_group() as tasks:
            for served in self._served:
                tasks.start_soon(served.withdraw)

    def cut(self) -> None:
        """End running requests; their callers get Disconnected."""
        for served in self._served:
            served.cut()

    def abort(self) -> None:
        """Disappear at once, as in a crash."""
        for served in self._served:
            served.abort()


Step = Literal["model_load", "drain", "cleanup"]


@frozen
class ComponentSnapshot:
    """The load of one rank."""

    kv_used_blocks: int
    """KV blocks in use."""
    kv_total_blocks: int
    """KV blocks of the cache."""
    gpu_cache_usage: float
    """Share of the cache in use, from 0 to 1."""
    kv_cache_hit_rate: float | None = None
    """Share of prompt tokens found in the cache, from 0 to 1; None: unknown."""
    dp_rank: int = 0
    """The rank."""
    active_decode_blocks: int | None = None
    """KV blocks of the requests that run; None: not known apart from those in use."""
    active_prefill_tokens: int | None = None
    """Prompt tokens of running and waiting requests that are still to be computed; None: unknown."""


class EngineMetrics:
    """Records the metrics of one hosted engine; without `metrics` nothing is recorded.

    `labels` are those of the worker; empty ones are left out.
    """

    def __init__(self, metrics: Metrics | None = None, labels: Mapping[str, str] | None = None) -> None:
        self._metrics = metrics
        self.labels = {name: text for name, text in (labels or {}).items() if text}

    def took(self, step: Step, seconds: float) -> None:
        """Record the duration of a step of the engine's life."""
        if self._metrics is not None:
            self._metrics.set(f"{step}_time_seconds", seconds, **self.labels)

    def seed(self, dp_ranks: Iterable[int]) -> None:
        """Record the ranks as empty, so that they are shown from the start."""
        for rank in dp_ranks:
            self._set("total_blocks", 0, rank)
            self._set("gpu_cache_usage_percent", 0.0, rank)

    def show(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Record the load of the rank; an unknown hit rate leaves the last one."""
        self._set("total_blocks", snapshot.kv_total_blocks, rank)
        self._set("gpu_cache_usage_percent", snapshot.gpu_cache_usage, rank)
        if snapshot.kv_cache_hit_rate is not None:
            self._set("kv_cache_hit_rate", snapshot.kv_cache_hit_rate, rank)

    def _set(self, name: str, value: float, rank: int) -> None:
        if self._metrics is not None:
            self._metrics.set(name, value, **self.labels, dp_rank=str(rank))


class SnapshotPublisher:
    """Records snapshots as metrics and publishes the load for routers, and rates. No call waits or raises.

    Without `send_rates` no rates are published.
    """

    def __init__(
        self,
        worker_id: int,
        dp_ranks: Sequence[int],
        metrics: EngineMetrics,
        send: Callable[[ActiveLoad], object],
        send_rates: Callable[[RankRates], object] = lambda _: None,
    ) -> None:
        self.dp_ranks = list(dp_ranks)
        self._worker_id, self._metrics, self._send, self._send_rates = worker_id, metrics, send, send_rates
        self._failed: set[int] = set()
        self._last: dict[int, ActiveLoad] = {}
        """By rank, what was published last."""
        self._last_rates: dict[int, RankRates] = {}
        metrics.seed(self.dp_ranks)

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Publish the load of a rank; a rank that was not named is ignored."""
        if rank not in self.dp_ranks:
            return
        self._metrics.show(rank, snapshot)
        self._last[rank] = load = ActiveLoad(
            self._worker_id,
            rank,
            active_decode_blocks=snapshot.active_decode_blocks,
            active_prefill_tokens=snapshot.active_prefill_tokens,
            kv_used_blocks=snapshot.kv_used_blocks,
        )
        self._publish(rank, self._send, load)

    def publish_rates(self, rank: int, rates: PassRates) -> None:
        """Publish what the passes of a rank take; a rank that was not named is ignored."""
        if rank in self.dp_ranks:
            self._last_rates[rank] = found = RankRates(self._worker_id, rates, rank)
            self._publish(rank, self._send_rates, found)

    def repeat(self) -> None:
        """Publish the last load and the last rates of each rank once more."""
        for rank, load in list(self._last.items()):
            self._publish(rank, self._send, load)
        for rank, rates in list(self._last_rates.items()):
            self._publish(rank, self._send_rates, rates)

    def _publish(self, rank: int, send: Callable[[T], object], what: T) -> None:
        try:
            send(what)
        except Exception:
            level = logging.DEBUG if rank in self._failed else logging.WARNING
            self._failed.add(rank)
            _log.log(level, "the load of rank %d could not be published", rank, exc_info=True)


@frozen
class MetricsContext:
    """The facts for an engine's `setup_metrics`."""

    model: str
    component: str
    model_load_time_s: float
    metrics: EngineMetrics


@frozen
class MetricsBindings:
    """The metrics that an engine will publish."""

    dp_ranks: Sequence[int] = ()
    """The ranks of which it publishes snapshots."""
    on_publisher_ready: Callable[[SnapshotPublisher], None] | None = None
    """Called with the publisher of the snapshots, once, before serving."""
    native_text: Callable[[], str] | None = None
    """Returns the engine's own metrics as Prometheus text, shown among the others."""
