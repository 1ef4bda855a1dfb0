"""Members: the workers of a fleet by number, and what happens to them in a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import anyio

from engines import Worker
from engines.mocker import MockEngine

from ..fleet import Fleet
from .faults import Action, Fault
from .samples import Role, Samples

_ROLES: tuple[Role, ...] = ("decode", "prefill")


class Members:
    """All that were ever in the fleet; when each was there is noted in the samples."""

    def __init__(self, fleet: Fleet, samples: Samples) -> None:
        self._fleet, self._samples = fleet, samples
        self._numbers: dict[int, int] = {}
        self._ever: dict[Worker, tuple[Role, int]] = {}
        self._last: dict[tuple[Role, int], Worker] = {}
        for role in _ROLES:
            for number, worker in enumerate(self._pool(role)):
                self._join(role, number, worker, 0.0)

    def number_of(self, worker_id: int, role: Role) -> int:
        """Of a worker that is, or was, in the fleet. One may be asked before it is known to have started."""
        if worker_id not in self._numbers:
            for number, worker in enumerate(self._pool(role)):
                self._numbers[worker.worker_id] = number
        return self._numbers[worker_id]

    async def disturb(self, script: Sequence[Fault], now_ms: Callable[[], float]) -> None:
        """Lets happen what the script says, worker by worker in its order. Raises what keeps one from coming back."""
        by_worker: dict[tuple[Role, int], list[Fault]] = {}
        for fault in script:
            by_worker.setdefault((fault.role, fault.worker), []).append(fault)
        async with anyio.create_task_group() as tasks:
            for (role, number), faults in by_worker.items():
                tasks.start_soon(self._one, role, number, faults, now_ms)

    async def _one(self, role: Role, number: int, faults: list[Fault], now_ms: Callable[[], float]) -> None:
        """What happens to one worker. It ends beside what comes next; a start is cut short by what comes next."""
        async with anyio.create_task_group() as ending:
            for fault, next_one in pairwise([*faults, None]):
                assert fault is not None
                await anyio.sleep(max(0.0, (fault.at_ms - now_ms()) / 1000.0))
                if fault.action is not Action.RETURNS:
                    ending.start_soon(self._end, role, number, self._pool(role)[number], fault.action, now_ms)
                    continue
                within_s = float("inf") if next_one is None else max(0.0, (next_one.at_ms - now_ms()) / 1000.0)
                with anyio.move_on_after(within_s):
                    worker = await self._fleet.bring_back(self._pool(role), number)
                    self._join(role, number, worker, now_ms())

    async def _end(self, role: Role, number: int, worker: Worker, action: Action, now_ms: Callable[[], float]) -> None:
        """One that died is gone at once; one that leaves is there until it has finished what it has."""
        if action is Action.DIES:
            self._samples.worker_left(number, now_ms(), role)
            await self._fleet.die(worker)
            return
        await self._fleet.leave(worker)
        if self._last[role, number] is worker:
            self._samples.worker_left(number, now_ms(), role)

    def note_preemptions(self) -> None:
        """Those of all, once the replay is over."""
        for worker, (role, number) in self._ever.items():
            if isinstance(worker.engine, MockEngine):
                self._samples.preempted(number, worker.engine.preemptions, role)

    def _pool(self, role: Role) -> list[Worker]:
        return self._fleet.workers if role == "decode" else self._fleet.prefill_workers

    def _join(self, role: Role, number: int, worker: Worker, now_ms: float) -> None:
        self._ever[worker] = role, number
        self._last[role, number] = worker
        self._numbers[worker.worker_id] = number
        self._samples.worker_joined(number, now_ms, role)
