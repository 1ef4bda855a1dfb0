"""What a replay observes: the workers of each request, and when each worker of a fleet joins and leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import anyio
from attrs import define, field

from engines import Worker
from engines.mocker import Horizon, MockEngine
from pipeline.protocols import RequestPhase, RequestTracker, RoutingData
from pipeline.protocols.timing import TimingInfo, WorkerIdInfo

from ..deployment import Fleet
from .faults import Action, Fault
from .samples import RequestSample, Role, Samples, to_nanosecond

WorkerNumber = Callable[[int, Role], int]
"""Returns the number of a worker in the replay from its id and role."""


@define(slots=True, eq=False)
class SampleTracker(RequestTracker):
    """The tracker of one request; it records in a sample where the request is sent."""

    sample: RequestSample = field(kw_only=True)
    now_ms: Callable[[], float] = field(kw_only=True)
    number_of: WorkerNumber = field(kw_only=True)
    _reported: TimingInfo | None = field(default=None, init=False)
    """Times that came with the answer."""

    @classmethod
    def of(
        cls, sample: RequestSample, clock: Callable[[], float], now_ms: Callable[[], float], number_of: WorkerNumber
    ) -> SampleTracker:
        """Return the tracker of a request that is sent now. It has no wall time: a replay has only its own."""
        return cls(clock, _no_wall_ms, _one_permit, sample=sample, now_ms=now_ms, number_of=number_of)

    def record_worker(self, worker_id: int, dp_rank: int | None = None, worker_type: str | None = None) -> None:
        """Record a worker the first time it is reported; one for both phases counts as decode."""
        had_prefill, had_decode = self.prefill_worker.worker_id is not None, self.decode_worker.worker_id is not None
        RequestTracker.record_worker(self, worker_id, dp_rank, worker_type)
        if self.phase is RequestPhase.PREFILL:
            if not had_prefill:
                self.sample.routed(self.number_of(worker_id, "prefill"), self.now_ms(), "prefill")
        elif not had_decode:
            if self.sample.worker() is not None:
                self.sample.migrations += 1
            self.sample.routed(self.number_of(worker_id, "decode"), self.now_ms())

    def record_token(self) -> None:
        """Record the time of the first token."""
        self.record_first_token()
        if self.phase is RequestPhase.DECODE:
            self.record_decode_first_token()

    def record_routing(self, routing: RoutingData) -> None:
        """Record workers and times from an answer, unless a stage of this process has recorded them."""
        if self.decode_worker.worker_id is not None or self.prefill_worker.worker_id is not None:
            return
        self._reported = routing.timing or self._reported
        if routing.worker_id is not None:
            self._record_workers(routing.worker_id)

    def _record_workers(self, workers: WorkerIdInfo) -> None:
        """Record the workers of an answer: the first one since the arrival, a later one since now."""
        sample, decode_id, prefill_id = self.sample, workers.decode_worker_id, workers.prefill_worker_id
        is_first, sample.is_placed_by_answer = not sample.places, True
        if is_first and prefill_id is not None and decode_id is not None and prefill_id != decode_id:
            sample.routed(self.number_of(prefill_id, "prefill"), sample.arrival_ms, "prefill")
            is_first = False
        worker_id = prefill_id if decode_id is None else decode_id
        if worker_id is None or sample.worker() == (worker := self.number_of(worker_id, "decode")):
            return
        sample.migrations += sample.worker() is not None
        sample.routed(worker, sample.arrival_ms if is_first else self.now_ms())

    def complete_sample(self) -> None:
        """Copy the times that stages or the answer reported into the sample."""
        sample, transfer_s = self.sample, self.kv_transfer_estimated_latency_s
        sample.queue_depth = self.router_queue_depth
        sample.prefill_cached_tokens = self.prefill_cached_tokens
        sample.prefill_wait_ms, sample.prefill_time_ms = _to_ns(self.prefill_wait_time_ms), _to_ns(self.prefill_time_ms)
        sample.kv_transfer_ms = None if transfer_s is None else _to_ns(1000.0 * transfer_s)
        if (reported := self._reported) is not None:
            sample.queue_depth = reported.router_queue_depth
            sample.prefill_wait_ms, sample.prefill_time_ms = reported.prefill_wait_time_ms, reported.prefill_time_ms
            sample.kv_transfer_ms = reported.kv_transfer_estimated_latency_ms


def _to_ns(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else to_nanosecond(duration_ms)


def _no_wall_ms() -> int:
    return 0


def _one_permit() -> anyio.Semaphore:
    return anyio.Semaphore(1, max_value=1, fast_acquire=True)


_ROLES: tuple[Role, ...] = ("decode", "prefill")


class FleetRecorder:
    """Runs the fault script of a fleet, and records in the samples when each worker joins and leaves."""

    def __init__(self, fleet: Fleet, samples: Samples) -> None:
        self._fleet, self._samples = fleet, samples
        self._numbers: dict[int, int] = {}
        self._ever: dict[Worker, tuple[Role, int]] = {}
        self._last: dict[tuple[Role, int], Worker] = {}
        for role in _ROLES:
            for number, worker in enumerate(self._pool(role)):
                self._join(role, number, worker, 0.0)

    def number_of(self, worker_id: int, role: Role) -> int:
        """Return the number of a worker that is or was in the fleet, also before its start is recorded."""
        if worker_id not in self._numbers:
            for number, worker in enumerate(self._pool(role)):
                self._numbers[worker.worker_id] = number
        return self._numbers[worker_id]

    async def run_script(
        self, script: Sequence[Fault], now_ms: Callable[[], float], horizon: Horizon | None = None
    ) -> None:
        """Run the fault script, in order for each worker. Raise the error of a worker that cannot return.

        Engines do not run ahead beyond a fault by their horizon.
        """
        if horizon is not None:
            now_s, at_ms = anyio.current_time(), now_ms()
            for fault in script:
                horizon.add_cut(now_s + (fault.at_ms - at_ms) / 1000.0)
        by_worker: dict[tuple[Role, int], list[Fault]] = {}
        for fault in script:
            by_worker.setdefault((fault.role, fault.worker), []).append(fault)
        async with anyio.create_task_group() as tasks:
            for (role, number), faults in by_worker.items():
                tasks.start_soon(self._one, role, number, faults, now_ms)

    async def _one(self, role: Role, number: int, faults: list[Fault], now_ms: Callable[[], float]) -> None:
        """Run the faults of one worker. Its end may overlap the next fault; the next fault cuts its start short."""
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
        """End a worker: one that dies has left at once, one that leaves when its requests have ended."""
        if action is Action.DIES:
            self._samples.worker_left(number, now_ms(), role)
            await self._fleet.die(worker)
            return
        await self._fleet.leave(worker)
        if self._last[role, number] is worker:
            self._samples.worker_left(number, now_ms(), role)

    def record_preemptions(self) -> None:
        """Record the preemptions of all workers, at the end of the replay."""
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
