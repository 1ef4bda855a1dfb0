"""What is going on in a fleet the moment before a worker dies, and what is left of everything in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import anyio
from attrs import define, field

from engines import Worker
from engines.mocker import MockEngine, TransferExchange
from operators import KvPushRouter, PrefillRouter
from pipeline import Segment
from serving.deployment import OpenGraph
from serving.replay import Action, Fault

_JUST_BEFORE_S = 1e-6


@define
class Death:
    """The work under way in the moment before a worker died."""

    fault: Fault
    sequences: int
    """Sequences on this worker that a request waited for."""
    transfers: int
    """Transfers whose blocks were on their way, on any worker."""


@define
class Watch:
    """Looks at the workers the moment before one dies, and at all there ever were in the end."""

    opened: OpenGraph
    exchange: TransferExchange | None
    deaths: list[Death] = field(factory=list)
    _gone: dict[Worker, None] = field(factory=dict)

    async def run(self, script: Sequence[Fault], began_s: float) -> None:
        for fault in script:
            if fault.action is Action.RETURNS:
                continue
            await anyio.sleep_until(began_s + fault.at_ms / 1000 - _JUST_BEFORE_S)
            worker = self._pool(fault)[fault.worker]
            self._gone[worker] = None
            if fault.action is Action.DIES:
                sequences = sum(rank.live for rank in cast(MockEngine, worker.engine).ranks)
                self.deaths.append(Death(fault, sequences, 0 if self.exchange is None else self.exchange.transfers))

    def _pool(self, fault: Fault) -> list[Worker]:
        return self.opened.workers if fault.role == "decode" else self.opened.prefill_workers

    def left_over(self) -> list[str]:
        """What is booked, held, running or waiting; empty if nothing is."""
        found = {**_of_routers(self.opened), **_of_exchange(self.exchange)}
        for worker in {**self._gone, **dict.fromkeys(self.opened.workers + self.opened.prefill_workers)}:
            found |= _of_worker(worker)
        return [f"{what}: {count} are left" for what, count in found.items() if count]


def _of_routers(opened: OpenGraph) -> dict[str, int]:
    graph = cast("Segment[Any, Any]", opened.tokens)
    routers = {"decode": cast(KvPushRouter, graph[KvPushRouter])}
    found = {}
    if opened.prefill_workers:
        stage = cast(PrefillRouter, graph[PrefillRouter])
        branch = cast("Segment[Any, Any]", stage.branches()["prefill"])
        routers["prefill"] = cast(KvPushRouter, branch[KvPushRouter])
        found["prefills under way"] = stage.prefills
    for pool, router in routers.items():
        found[f"bookings of the {pool} router"] = len(router.router.loads)
        found[f"requests waiting in the {pool} router"] = len(router.router.queue)
    return found


def _of_exchange(exchange: TransferExchange | None) -> dict[str, int]:
    return {} if exchange is None else {"hand-overs": exchange.sessions, "sides waiting": exchange.waiting}


def _of_worker(worker: Worker) -> dict[str, int]:
    found = {f"requests served by {worker}": 0 if worker.served is None else worker.served.running}
    for rank in cast(MockEngine, worker.engine).ranks:
        rank.scheduler.pool.check()
        found[f"active blocks of {worker}"] = rank.scheduler.pool.active
        found[f"live sequences of {worker}"] = rank.live
        found[f"busy schedulers of {worker}"] = int(not rank.scheduler.is_idle)
    return found
