"""SampleTracker: what the stages of a graph tell of a request, noted the moment they tell it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from attrs import define, field

from pipeline.protocols import RequestPhase, RequestTracker, RoutingData, TimingInfo, WorkerIdInfo

from .samples import RequestSample, Role, to_nanosecond

Numbered = Callable[[int, Role], int]
"""From the id of a worker and what it does to its number in the replay."""


@define(slots=True, eq=False)
class SampleTracker(RequestTracker):
    """The tracker of one request of a replay; where it is sent goes into its sample."""

    sample: RequestSample = field(kw_only=True)
    now_ms: Callable[[], float] = field(kw_only=True)
    number_of: Numbered = field(kw_only=True)
    _told: TimingInfo | None = field(default=None, init=False)
    """Times that came with the answer."""

    @classmethod
    def of(cls, sample: RequestSample, now_ms: Callable[[], float], number_of: Numbered) -> SampleTracker:
        """For a request that is sent now. The day is none: a replay has only its own time."""
        return cls(anyio.current_time, lambda: 0, _one_permit, sample=sample, now_ms=now_ms, number_of=number_of)

    def record_worker(self, worker_id: int, dp_rank: int | None = None, worker_type: str | None = None) -> None:
        """The first to tell of a worker notes it; one that does both phases counts as decode."""
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
        """The first token is there."""
        self.record_first_token()
        if self.phase is RequestPhase.DECODE:
            self.record_decode_first_token()

    def heard(self, routing: RoutingData) -> None:
        """An answer tells of its workers and times. That counts where no stage of this process knows them."""
        if self.decode_worker.worker_id is not None or self.prefill_worker.worker_id is not None:
            return
        self._told = routing.timing or self._told
        if routing.worker_id is not None:
            self._heard_workers(routing.worker_id)

    def _heard_workers(self, workers: WorkerIdInfo) -> None:
        """The first had it from the beginning; when it went on to another, nobody says sooner than its answer."""
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

    def note(self) -> None:
        """It is over: what only the stages, or its answer, know goes into the sample."""
        sample, transfer_s = self.sample, self.kv_transfer_estimated_latency_s
        sample.queue_depth = self.router_queue_depth
        sample.prefill_cached_tokens = self.prefill_cached_tokens
        sample.prefill_wait_ms, sample.prefill_ms = _to_ns(self.prefill_wait_time_ms), _to_ns(self.prefill_time_ms)
        sample.kv_transfer_ms = None if transfer_s is None else _to_ns(1000.0 * transfer_s)
        if (told := self._told) is not None:
            sample.queue_depth = told.router_queue_depth
            sample.prefill_wait_ms, sample.prefill_ms = told.prefill_wait_time_ms, told.prefill_time_ms
            sample.kv_transfer_ms = told.kv_transfer_estimated_latency_ms


def _to_ns(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else to_nanosecond(duration_ms)


def _one_permit() -> anyio.Semaphore:
    return anyio.Semaphore(1, max_value=1, fast_acquire=True)
