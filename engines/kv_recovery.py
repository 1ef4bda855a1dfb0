"""KvEventLogs: the logs of a worker's ranks, and where routers that missed events ask for them.

    engine ──► KvEventPublisher ──► log of the rank ──► event plane
                                        └── endpoint of the rank ──► a router that missed some

Source: dynamo lib/llm/src/kv_router/worker_query.rs, the worker's side. Other than there, a worker's card says that
it answers only where it does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from attrs import evolve

from pipeline import AsyncEngine, InvalidArgument, function_engine
from pipeline.protocols.kv_events import KvEventData, RouterEvent
from pipeline.protocols.kv_recovery import RecoveryAnswer, RecoveryReply, RecoveryRequest, recovery_endpoint

if TYPE_CHECKING:
    from pipeline.network import EndpointId, Runtime, Served


class KvEventLog(Protocol):
    """Gives the events of one rank their ids and remembers them. Called in one thread; neither call waits."""

    def record(self, change: KvEventData) -> RouterEvent:
        """The change as the rank's next event."""
        ...

    def recover(self, start: int | None, end: int | None) -> RecoveryAnswer:
        """What brings a router that needs the events from the start on up to date."""
        ...


MakeKvEventLog = Callable[[int, int], KvEventLog]
"""From worker id and rank to its log."""


def recovery_engine(
    log: KvEventLog, dp_rank: int, publisher_id: int | None = None
) -> AsyncEngine[RecoveryRequest, RecoveryReply]:
    """Return an engine that answers from the log, one item a request.

    `publisher_id` is the id under which the log's events are published: with it routers can decide which of two
    publishers of one worker id is alive. Raises InvalidArgument for a request that means another rank.
    """

    async def recover(request: RecoveryRequest) -> AsyncIterator[RecoveryReply]:
        if request.dp_rank != dp_rank:
            raise InvalidArgument(f"this is rank {dp_rank}, not {request.dp_rank}", field="dp_rank")
        yield RecoveryReply.of(log.recover(request.start_event_id, request.end_event_id), publisher_id)

    return function_engine(recover)


class KvEventLogs:
    """Makes the logs, then serves them in the component of the worker's endpoint under the worker's id.

    Without `make_log` there are none, and nothing is served. Whoever serves withdraws, and cuts in the end; all of that
    does nothing where nothing is served.
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
        """The rank's log, made when it is first asked for; None if this worker keeps none."""
        if self._make_log is not None and dp_rank not in self._logs:
            self._logs[dp_rank] = self._make_log(self._worker_id, dp_rank)
        return self._logs.get(dp_rank)

    async def serve(self, runtime: Runtime) -> None:
        """Each rank at its endpoint. Raises as `runtime.serve`; what is served then must still be withdrawn."""
        for dp_rank, log in self._logs.items():
            where = evolve(self._endpoint, endpoint=recovery_endpoint(dp_rank))
            engine = recovery_engine(log, dp_rank, self.publisher_id)
            self._served.append(await runtime.serve(where, engine, instance_id=self._worker_id))

    async def withdraw(self) -> None:
        """Makes it invisible and takes no new question. Failures are logged."""
        for served in self._served:
            await served.withdraw()

    def cut(self) -> None:
        """Ends what runs; who asked gets Disconnected."""
        for served in self._served:
            served.cut()

    def abort(self) -> None:
        """As a crash: it cannot be reached any more, and discovery drops it at once."""
        for served in self._served:
            served.abort()
