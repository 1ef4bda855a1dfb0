"""RequestTracker: when a request passed which point, and which workers had it.

Source: dynamo lib/llm/src/protocols/common/timing.rs, RequestTracker. Other than there, clocks come from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, Self

from attrs import define, field

from .timing import RequestPhase, RouterChoice, RouterDecision, RoutingData, TimingInfo, WorkerIdInfo, worker_label

_log = logging.getLogger(__name__)
_NANOSECONDS_MAX = 2**64 - 1
_LATE_FACT = "worker %s had %s %s already, %s is not recorded"


class PermitGate(Protocol):
    """One permit that any task may give back, such as `anyio.Semaphore(1)`."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


class PhasePermit:
    """Holds the phase of a request; the next `set_phase` waits until it is released. Released once, however often."""

    def __init__(self, gate: PermitGate) -> None:
        self._gate: PermitGate | None = gate

    def release(self) -> None:
        """Let the next phase begin."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@define(slots=True)
class WorkerSlot:
    """The worker of one phase."""

    worker_id: int | None = None
    dp_rank: int | None = None
    worker_type: str | None = None
    choice: RouterChoice | None = None

    def record(self, worker_id: int, dp_rank: int | None, worker_type: str | None) -> None:
        """The first worker stays, its rank and type may follow; another worker is logged and ignored."""
        if self.worker_id is not None and self.worker_id != worker_id:
            _log.warning("worker %s already had this phase, worker %s is not recorded", self.worker_id, worker_id)
            return
        self.worker_id = worker_id
        if self.dp_rank is None:
            self.dp_rank = dp_rank
        elif dp_rank is not None and dp_rank != self.dp_rank:
            _log.warning(_LATE_FACT, worker_id, "rank", self.dp_rank, dp_rank)
        if self.worker_type is None:
            self.worker_type = worker_type
        elif worker_type is not None and worker_type != self.worker_type:
            _log.warning(_LATE_FACT, worker_id, "type", self.worker_type, worker_type)


@define(slots=True, eq=False)
class RequestTracker:
    """One request's times, counts and workers, shared by all its stages and attempts. Belongs to one event loop.

    `clock` gives monotonic seconds, `wall_ms` milliseconds since the epoch, `gate` a fresh permit gate, called when
    the first phase is set. The first value recorded holds, but the last holds for `finish` and `osl_tokens`.
    """

    _clock: Callable[[], float]
    _wall_ms: Callable[[], int]
    _gate: Callable[[], PermitGate] = field(repr=False)
    received: float = field(init=False)
    received_ms: int = field(init=False)
    phase: RequestPhase = field(init=False, default=RequestPhase.AGGREGATED)
    prefill_start: float | None = field(init=False, default=None)
    prefills_sent: int = field(init=False, default=0)
    """How often a prefill was handed to a worker, all attempts counted."""
    first_token: float | None = field(init=False, default=None)
    decode_first_token: float | None = field(init=False, default=None)
    prefill_complete: float | None = field(init=False, default=None)
    finish: float | None = field(init=False, default=None)
    osl_tokens: int = field(init=False, default=0)
    isl_tokens: int | None = field(init=False, default=None)
    cached_tokens: int | None = field(init=False, default=None)
    prefill_cached_tokens: int | None = field(init=False, default=None)
    overlap_blocks: float | None = field(init=False, default=None)
    isl_blocks: int | None = field(init=False, default=None)
    router_queue_depth: int | None = field(init=False, default=None)
    tokenize_latency_s: float | None = field(init=False, default=None)
    detokenize_count: int = field(init=False, default=0)
    attempts: int = field(init=False, default=1)
    """To how many workers the request was sent one after the other, in disaggregation pairs of them."""
    prefill_worker: WorkerSlot = field(init=False, factory=WorkerSlot)
    decode_worker: WorkerSlot = field(init=False, factory=WorkerSlot)
    external_query_token_ids: list[int] | None = field(init=False, default=None)
    _detokenize_ns: int = field(init=False, default=0)
    _osl_before_tokens: int = field(init=False, default=0)
    _external_timing: TimingInfo | None = field(init=False, default=None)
    _external_workers: WorkerIdInfo | None = field(init=False, default=None)
    _opened_gate: PermitGate | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.received, self.received_ms = self._clock(), self._wall_ms()

    async def set_phase(self, phase: RequestPhase) -> PhasePermit:
        """Wait until the phase before is let go, then begin this one; the caller releases the permit.

        A prefill in the background so has its worker recorded before the phase turns to decode.
        """
        if self._opened_gate is None:
            self._opened_gate = self._gate()
        gate = self._opened_gate
        await gate.acquire()
        self.phase = phase
        return PhasePermit(gate)

    def _now_once(self, name: str) -> bool:
        """Record the time under `name` unless there is one. Return whether this was the first."""
        if getattr(self, name) is not None:
            return False
        setattr(self, name, self._clock())
        return True

    def record_prefill_start(self) -> bool:
        """Record that the prompt is sent to a worker now. Return whether this was the first time."""
        self.prefills_sent += 1
        return self._now_once("prefill_start")

    def record_first_token(self) -> bool:
        """Record the first token, in disaggregation that of prefill. Return whether this was the first time."""
        return self._now_once("first_token")

    def record_decode_first_token(self) -> bool:
        """Record the first token of decode. Return whether this was the first time."""
        return self._now_once("decode_first_token")

    def record_prefill_complete(self) -> bool:
        """Record the end of prefill. Return whether this was the first time."""
        return self._now_once("prefill_complete")

    def record_prefill_cached(self, cached_tokens: int | None) -> None:
        """Record the tokens of the prompt that the prefill worker had cached, if reported; the last report counts."""
        if cached_tokens is not None:
            self.prefill_cached_tokens = cached_tokens

    def record_finish(self) -> None:
        """Record the end of the request. A later call moves it."""
        self.finish = self._clock()

    def record_osl(self, osl_tokens: int) -> None:
        """Record the output tokens of the present attempt so far."""
        self.osl_tokens = self._osl_before_tokens + osl_tokens

    def record_answer(self, osl_tokens: int) -> None:
        """Record the end of the answer, after the output tokens of all attempts. A router may still count more."""
        self.osl_tokens = osl_tokens
        self.record_finish()

    def begin_attempt(self, delivered_tokens: int) -> None:
        """Record that another worker continues after so many output tokens; its tokens are added to them.

        A prefill without a decoded token is forgotten: the blocks of the next prefill are the ones transferred.
        """
        self.attempts += 1
        self._osl_before_tokens = self.osl_tokens = delivered_tokens
        self.prefill_worker, self.decode_worker = WorkerSlot(), WorkerSlot()
        if self.decode_first_token is None:
            self.prefill_complete = None

    def record_isl(self, isl_tokens: int, cached_tokens: int | None = None) -> None:
        """Record the number of input tokens, and how many of them a worker had cached, if known."""
        if self.isl_tokens is None:
            self.isl_tokens = isl_tokens
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens

    def record_kv_hit(self, overlap_blocks: float, isl_blocks: int) -> None:
        """Record how many of the input's blocks the chosen worker had."""
        if self.isl_blocks is None:
            self.overlap_blocks, self.isl_blocks = overlap_blocks, isl_blocks

    def record_worker(self, worker_id: int, dp_rank: int | None = None, worker_type: str | None = None) -> None:
        """Record the worker of the current phase; an aggregated phase is both prefill and decode."""
        if self.phase is not RequestPhase.DECODE:
            self.prefill_worker.record(worker_id, dp_rank, worker_type)
        if self.phase is not RequestPhase.PREFILL:
            self.decode_worker.record(worker_id, dp_rank, worker_type)

    def record_choice(self, choice: RouterChoice) -> None:
        """Record why the worker of the current phase was chosen. Of several routers the uppermost counts."""
        if self.phase is not RequestPhase.DECODE and self.prefill_worker.choice is None:
            self.prefill_worker.choice = choice
        if self.phase is not RequestPhase.PREFILL and self.decode_worker.choice is None:
            self.decode_worker.choice = choice

    def record_router_queue_depth(self, depth: int) -> None:
        """Record the requests waiting in the router when this one came."""
        if self.router_queue_depth is None:
            self.router_queue_depth = depth

    def record_tokenize_latency(self, seconds: float) -> None:
        """Record the time of tokenizing."""
        if self.tokenize_latency_s is None:
            self.tokenize_latency_s = seconds

    def record_detokenize(self, nanoseconds: int) -> None:
        """Record the time of one more detokenizing step; the sum is limited to the largest u64."""
        self._detokenize_ns = min(self._detokenize_ns + nanoseconds, _NANOSECONDS_MAX)
        self.detokenize_count += 1

    def record_external_timing(self, timing: TimingInfo) -> None:
        """Record the times of another router, for those not known here."""
        if self._external_timing is None:
            self._external_timing = timing

    def record_external_workers(self, workers: WorkerIdInfo) -> None:
        """Record the workers another router chose, for those not known here."""
        if self._external_workers is None:
            self._external_workers = workers

    def record_external_query_token_ids(self, token_ids: list[int]) -> None:
        """Record the token ids in another router's answer to a query."""
        if self.external_query_token_ids is None:
            self.external_query_token_ids = token_ids

    @property
    def prefill_wait_time_ms(self) -> float | None:
        return _between_ms(self.received, self.prefill_start)

    @property
    def prefill_time_ms(self) -> float | None:
        return _between_ms(self.prefill_start, self.first_token)

    @property
    def ttft_ms(self) -> float | None:
        return _between_ms(self.received, self.first_token)

    @property
    def total_time_ms(self) -> float | None:
        return _between_ms(self.received, self.finish)

    @property
    def avg_itl_ms(self) -> float | None:
        """Mean time between tokens; None below two tokens."""
        decoding_ms = _between_ms(self.first_token, self.finish)
        return None if decoding_ms is None or self.osl_tokens < 2 else decoding_ms / (self.osl_tokens - 1)

    @property
    def kv_hit_rate(self) -> float | None:
        """Share of the input's blocks that were on the chosen worker."""
        return self.overlap_blocks / self.isl_blocks if self.overlap_blocks is not None and self.isl_blocks else None

    @property
    def kv_transfer_estimated_latency_s(self) -> float | None:
        """From the end of prefill to decode's first token, not below zero; None where both are one worker's."""
        duration_ms = _between_ms(self.prefill_complete, self.decode_first_token)
        return None if duration_ms is None else max(0.0, duration_ms / 1000)

    @property
    def detokenize_total_s(self) -> float | None:
        return self._detokenize_ns / 1e9 if self.detokenize_count else None

    def worker_info(self) -> WorkerIdInfo | None:
        """Both phases' workers, field by field ours before another router's; None if no worker is known."""
        other = self._external_workers or WorkerIdInfo()
        prefill, decode = self.prefill_worker, self.decode_worker
        info = WorkerIdInfo(
            _first(prefill.worker_id, other.prefill_worker_id),
            _first(prefill.dp_rank, other.prefill_dp_rank),
            _first(decode.worker_id, other.decode_worker_id),
            _first(decode.dp_rank, other.decode_dp_rank),
        )
        return None if info.prefill_worker_id is None and info.decode_worker_id is None else info

    def decision(self) -> RouterDecision | None:
        """Why the workers were chosen, of the latest attempt; None if no router has recorded it."""
        prefill, decode = self.prefill_worker.choice, self.decode_worker.choice
        if prefill is None and decode is None:
            return None
        return RouterDecision(decode, None if prefill is decode else prefill, self.attempts)

    def timing_info(self) -> TimingInfo:
        """Return all durations known by now, in milliseconds to the microsecond; gaps filled from another router's."""
        transfer_s = self.kv_transfer_estimated_latency_s
        timing = TimingInfo(
            self.received_ms,
            _to_microsecond(self.prefill_wait_time_ms),
            _to_microsecond(self.prefill_time_ms),
            _to_microsecond(self.ttft_ms),
            _to_microsecond(self.total_time_ms),
            self.kv_hit_rate,
            self.router_queue_depth,
            _to_microsecond(None if transfer_s is None else transfer_s * 1000),
        )
        if self._external_timing is not None:
            timing.fill_gaps(self._external_timing)
        return timing

    def routing_data(self) -> RoutingData:
        """Timing, workers and query tokens together, as they travel with an output."""
        return RoutingData(self.timing_info(), self.worker_info(), self.external_query_token_ids)


def _between_ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1000


def _to_microsecond(duration_ms: float | None) -> float | None:
    """Without the digits that the subtraction of two times of a clock leaves by chance, as in 48.99999999997817."""
    return None if duration_ms is None else round(duration_ms, 3)


def _first(ours: int | None, theirs: int | None) -> int | None:
    return theirs if ours is None else ours


GAUGE_PREFIX = "worker_last_"


def worker_gauges(tracker: RequestTracker) -> list[tuple[str, dict[str, str], float]]:
    """Return the per-worker gauges this request sets: name without the front end's prefix, labels, value.

    Time to first token and input length belong to the prefill worker, time between tokens to the decode worker.
    Empty if no worker is known, or before its first token: a chosen worker alone has no latency.
    """
    if tracker.first_token is None:
        return []
    ttft_ms, itl_ms = _to_microsecond(tracker.ttft_ms), _to_microsecond(tracker.avg_itl_ms)
    prefill, decode = tracker.prefill_worker, tracker.decode_worker
    measured = (
        ("time_to_first_token_seconds", prefill, "prefill", None if ttft_ms is None else ttft_ms / 1000),
        ("input_sequence_tokens", prefill, "prefill", tracker.isl_tokens),
        ("inter_token_latency_seconds", decode, "decode", None if itl_ms is None else itl_ms / 1000),
    )
    return [
        (GAUGE_PREFIX + name, _labels(slot, phase), float(value))
        for name, slot, phase, value in measured
        if value is not None and slot.worker_id is not None
    ]


def _labels(slot: WorkerSlot, phase: str) -> dict[str, str]:
    assert slot.worker_id is not None, "only workers that are known are shown"
    rank = "none" if slot.dp_rank is None else str(slot.dp_rank)
    kind = slot.worker_type or phase
    # One that does both is shown as one that decodes, as in the gauges of what it has to do.
    shown = "decode" if kind == RequestPhase.AGGREGATED else kind
    return {"worker_id": worker_label(slot.worker_id), "dp_rank": rank, "worker_type": shown}
