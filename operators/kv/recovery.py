"""KvRecovery: asks workers, over the runtime, for the events a router missed.

    EventFeed ──rank, from──► KvRecovery ──RecoveryRequest──► the rank's endpoint at that worker
        ◄── answer; None where the worker's card says that it keeps nothing

Source: dynamo lib/llm/src/kv_router/worker_query.rs, WorkerQueryClient. Other than there, who is a worker is known from
its own endpoint and card; these endpoints are followed from the first question of their rank on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pipeline import Context, StreamClosed, Unavailable
from pipeline.errors import StreamIncomplete
from pipeline.network import EndpointId, EndpointWorkers, Runtime
from pipeline.protocols.kv_recovery import RecoveryReply, RecoveryRequest, recovery_endpoint
from pipeline.rx import Disposable, DisposableBase, Observable

from .router_pool import Configs
from .worker_rank import WorkerRank

WorkersOf = Callable[[int], EndpointWorkers[Any, RecoveryReply]]
"""From a rank to those who answer for theirs."""


class KvRecovery:
    """The `recover` of a KvRouter, until it is closed; a context manager. In one loop and thread.

    `configs` are the settings in the workers' cards, as the router's; without them every worker is asked. Whoever makes
    it closes it, after the router's `run` has ended.
    """

    def __init__(self, workers_of: WorkersOf, configs: Observable[Configs] | None = None) -> None:
        self._workers_of = workers_of
        self._pools: dict[int, EndpointWorkers[Any, RecoveryReply]] = {}
        self._configs: Configs | None = None if configs is None else {}
        self._is_closed = False
        self._following: DisposableBase = Disposable() if configs is None else configs.subscribe(self._learn)

    async def __call__(self, rank: WorkerRank, start_event_id: int | None) -> RecoveryReply | None:
        """Return the rank's events from the id on, without one everything; None for a worker that keeps nothing.

        Raises Unavailable for a worker that is not known here yet, or not any more; StreamIncomplete for one that says
        nothing; StreamClosed after `close`; else what its answer ended with. Waits as long as the worker takes.
        """
        if self._is_closed:
            raise StreamClosed("this recovery was closed")
        if self._configs is not None:
            if (config := self._configs.get(rank.worker_id)) is None:
                raise Unavailable(f"worker {rank.worker_id} has not said whether it keeps its events")
            if not config.enable_local_indexer:
                return None
        pool = self._pool(rank.dp_rank)
        if rank.worker_id not in pool.instance_ids():
            raise Unavailable(f"worker {rank.worker_id} is not to be asked at {pool}")
        request = Context(RecoveryRequest(rank.dp_rank, start_event_id))
        async with await pool.engine(rank.worker_id).generate(request) as stream:
            async for reply in stream:
                return reply
        raise StreamIncomplete(f"worker {rank.worker_id} said nothing at {pool}")

    def close(self) -> None:
        """Follows nothing more. Idempotent."""
        self._is_closed = True
        self._following.dispose()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _learn(self, configs: Configs) -> None:
        self._configs = configs

    def _pool(self, dp_rank: int) -> EndpointWorkers[Any, RecoveryReply]:
        if dp_rank not in self._pools:
            self._pools[dp_rank] = self._workers_of(dp_rank)
        return self._pools[dp_rank]


def recovery_workers(runtime: Runtime, endpoint: str | EndpointId) -> WorkersOf:
    """Those who answer for the ranks of the endpoint's workers, as discovery knows them."""
    where = EndpointId.parse(endpoint)

    def workers_of(dp_rank: int) -> EndpointWorkers[Any, RecoveryReply]:
        name = EndpointId(where.namespace, where.component, recovery_endpoint(dp_rank))
        return runtime.workers(name, RecoveryReply)

    return workers_of
