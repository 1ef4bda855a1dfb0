"""Where a worker's KV events come from, and how they reach the routers.

    engine ──publish(change)──► KvEventPublisher ──RouterEvent──► event plane
                                      └── numbered here, or by the log of the rank

Source: dynamo lib/backend-common/src/publisher.rs.

KvEventLogs: the logs of a worker's ranks, and the endpoints at which routers recover missed events.

    engine ──► KvEventPublisher ──► log of the rank ──► event plane
                                        └── endpoint of the rank ──► a router that missed some

Source: dynamo lib/llm/src/kv_router/worker_query.rs, the worker's side. Other than there, a worker's card
promises answers only where there are any.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import evolve, frozen

from pipeline import AsyncEngine, InvalidArgument, function_engine
from pipeline.loop import LoopHandle
from pipeline.protocols.kv import (
    KvEvent,
    KvEventData,
    RecoveryAnswer,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    recovery_endpoint,
)

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Runtime, Served


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

    def publish(self, change: KvEventData) -> None:
        """Publish the change. Does not wait; call it on one thread, in the order of the changes."""
        if (log := self._kept_in) is None:
            self._publish(RouterEvent(self.worker_id, KvEvent(self.last_event_id + 1, change, self.dp_rank)))
        else:
            self._handle.run(lambda: self._record(log, change))  # where recovery reads the log

    def _record(self, log: KvEventLog, change: KvEventData) -> None:
        try:
            self._publish(log.record(change))
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


KvEventSource: TypeAlias = PushSource


class KvEventLog(Protocol):
    """Numbers and keeps the events of one rank. Called in one thread; neither call waits."""

    def record(self, change: KvEventData) -> RouterEvent:
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
        for served in self._served:
            await served.withdraw()

    def cut(self) -> None:
        """End running requests; their callers get Disconnected."""
        for served in self._served:
            served.cut()

    def abort(self) -> None:
        """Disappear at once, as in a crash."""
        for served in self._served:
            served.abort()
