"""Samples: what a replay records while it runs, a few machine words for each token.

    sample = samples.arrived(due.name, due.due_ms, input_tokens=due.input_tokens)
    sample.routed(3, now_ms)                      the router has chosen; again after a migration
    sample.tokens(now_ms, len(output.token_ids))  for every item of the stream
    samples.ended(sample, now_ms)                 once, however it ended

Times are milliseconds since the start of the replay.

Source: dynamo lib/mocker/src/replay/collector.rs, TraceCollector. Other than there, every figure is exact, and times of
tokens are kept only until their request has ended.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import Literal, TypeAlias

from attrs import define, field

from pipeline import InvalidArgument

from .arithmetic import NANOSECOND_DIGITS, PICOSECOND_DIGITS, Arithmetic

INTERVAL_MS = 10_000.0
"""Interval of the series, by default."""

_AT_ONCE_TOKENS = 16_384
"""Tokens of completed requests are counted together once they are so many."""

Role: TypeAlias = Literal["prefill", "decode"]
"""The role of a worker; one for both phases counts as decode."""


class Status(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"


def to_nanosecond(time_ms: float) -> float:
    """Return a time without the rounding error of subtracting clock values: 49.0, not 48.99999999997817."""
    return round(time_ms, NANOSECOND_DIGITS)


def elapsed_ms(begin_ms: float, end_ms: float) -> float:
    """Return the time between two times, without rounding error below a picosecond."""
    return round(end_ms - begin_ms, PICOSECOND_DIGITS)


def interval_of(time_ms: float, interval_ms: float) -> int:
    """Return the number of the interval at a time. An interval contains its begin, but not its end."""
    return int(time_ms // interval_ms)


def count_sorted(times_ms: Sequence[float], interval_ms: float) -> dict[int, int]:
    """Return how many of the times, which are in order, are in each interval; many of one interval cost little."""
    counts, at, over = {}, 0, len(times_ms)
    last = interval_of(times_ms[-1], interval_ms) if times_ms else 0
    while at < over:
        interval, end = interval_of(times_ms[at], interval_ms), over
        if interval != last:
            end = bisect_left(times_ms, interval + 1, at, key=lambda time_ms: interval_of(time_ms, interval_ms))
        counts[interval], at = end - at, end
    return counts


def _since(begin_ms: float | None, end_ms: float | None) -> float | None:
    return None if begin_ms is None or end_ms is None else elapsed_ms(begin_ms, end_ms)


@define(eq=False)
class RequestSample:
    """One request. The driver sets the fields as the request proceeds; None is not known yet."""

    name: str
    arrival_ms: float
    """When it was due."""
    input_tokens: int
    wanted_output_tokens: int | None = None
    """Length of the recorded answer."""
    session_id: str | None = None
    turn_index: int | None = None
    status: Status = Status.UNFINISHED
    first_token_ms: float | None = None
    second_token_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    """Cached prompt tokens, as the last worker reported."""
    first_cached_tokens: int | None = None
    """The same of the first worker; None: of the last."""
    prefill_cached_tokens: int | None = None
    """The same of the prefill worker, if any; then `cached_tokens` of the decode worker need no transfer."""
    migrations: int = 0
    queue_depth: int | None = None
    """Requests that waited in the router when it arrived."""
    prefill_wait_ms: float | None = None
    prefill_time_ms: float | None = None
    kv_transfer_ms: float | None = None
    places: list[tuple[Role, int, float]] = field(factory=list)
    """Role, number and time of each worker it was sent to."""
    is_placed_by_answer: bool = False
    """Whether its workers are known from its answer only; then its wait for one is not known."""
    error: str | None = None
    """Its error as `Type: message`."""
    _times: array[float] = field(factory=lambda: array("d"), repr=False)

    def routed(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """Record that a worker was chosen, which replaces the one before."""
        self.places.append((role, worker, now_ms))

    def tokens(self, now_ms: float, count: int = 1) -> None:
        """Record tokens that came at once."""
        if count == 1:
            self._times.append(now_ms)
        elif count > 1:
            self._times.extend((now_ms,) * count)

    def tokens_at(self, times_ms: Sequence[float]) -> None:
        """Record one token at each of these times, which are in order. They are rounded when the request has ended."""
        self._times.extend(times_ms)

    def worker(self, role: Role = "decode") -> int | None:
        """Return the last worker of that role."""
        return next((worker for its_role, worker, _ in reversed(self.places) if its_role == role), None)

    @property
    def reused_tokens(self) -> int:
        """The most prompt tokens that one of its workers had cached."""
        return max(self.cached_tokens, self.prefill_cached_tokens or 0)

    @property
    def hit_tokens(self) -> int:
        """The prompt tokens that the worker that computed the prompt had cached."""
        return self.cached_tokens if self.prefill_cached_tokens is None else self.prefill_cached_tokens

    @property
    def first_hit_tokens(self) -> int:
        """The same of its first worker."""
        known = (self.prefill_cached_tokens, self.first_cached_tokens, self.cached_tokens)
        return next(tokens for tokens in known if tokens is not None)

    @property
    def queue_wait_ms(self) -> float | None:
        """Time until its first worker was chosen, if known."""
        if not self.places or self.is_placed_by_answer:
            return None
        return max(0.0, to_nanosecond(self.places[0][2] - self.arrival_ms))

    @property
    def ttft_ms(self) -> float | None:
        """Time from its arrival to its first token."""
        return _since(self.arrival_ms, self.first_token_ms)

    @property
    def ttst_ms(self) -> float | None:
        """Time from its first token to its second."""
        return _since(self.first_token_ms, self.second_token_ms)

    @property
    def tpot_ms(self) -> float | None:
        """Mean gap between its tokens; None for fewer than two."""
        whole_ms = _since(self.first_token_ms, self.last_token_ms)
        return None if whole_ms is None or self.output_tokens < 2 else whole_ms / (self.output_tokens - 1)

    @property
    def e2e_latency_ms(self) -> float | None:
        """Time from its arrival to its last token."""
        return _since(self.arrival_ms, self.last_token_ms)

    def close(self, now_ms: float, status: Status) -> array[float]:
        """Record the end. Return the times of its tokens, not rounded, and drop them."""
        times, self._times = self._times, array("d")
        self.status, self.end_ms, self.output_tokens = status, now_ms, len(times)
        if times:
            self.first_token_ms, self.last_token_ms = to_nanosecond(times[0]), to_nanosecond(times[-1])
        if len(times) > 1:
            self.second_token_ms = to_nanosecond(times[1])
        return times


@define(eq=False)
class WorkerSample:
    """One worker of the replay."""

    worker: int
    """Its number."""
    role: Role
    spans: list[tuple[float, float | None]] = field(factory=list)
    """When it joined and left; the last one may be open."""
    preemptions: int = 0

    def seconds(self, end_ms: float) -> float:
        """Return how long it existed until then, in seconds."""
        ends = (end_ms if left is None else min(left, end_ms) for _, left in self.spans)
        return sum(max(0.0, end - joined) for end, (joined, _) in zip(ends, self.spans, strict=True)) / 1000.0


@define(eq=False)
class Samples:
    """All requests and workers of one replay."""

    interval_ms: float = INTERVAL_MS
    """Of the series."""
    arithmetic: Arithmetic = field(factory=Arithmetic, repr=False)
    requests: list[RequestSample] = field(factory=list)
    workers: dict[tuple[Role, int], WorkerSample] = field(factory=dict)
    _gaps_ms: array[float] = field(factory=lambda: array("d"), init=False, repr=False)
    _tokens_by_interval: Counter[int] = field(factory=Counter, init=False, repr=False)
    _times: array[float] = field(factory=lambda: array("d"), init=False, repr=False)
    """Of the tokens of completed requests that are not counted yet: many requests at once take a fifth of the time."""
    _ends: list[int] = field(factory=list, init=False, repr=False)
    """Where the times of each of these requests end."""

    def __attrs_post_init__(self) -> None:
        if not 0 < self.interval_ms < inf:
            raise InvalidArgument(f"must be finite and above 0, got {self.interval_ms}", field="interval_ms")

    def arrived(
        self,
        name: str,
        arrival_ms: float,
        *,
        input_tokens: int,
        wanted_output_tokens: int | None = None,
        session_id: str | None = None,
        turn_index: int | None = None,
    ) -> RequestSample:
        """Record that a request is sent, and return its sample."""
        sample = RequestSample(name, arrival_ms, input_tokens, wanted_output_tokens, session_id, turn_index)
        self.requests.append(sample)
        return sample

    def ended(self, sample: RequestSample, now_ms: float, status: Status = Status.COMPLETED) -> None:
        """Record that a request has ended. Only completed ones count for latencies.

        Raise InvalidArgument if it has ended already.
        """
        if sample.end_ms is not None:
            raise InvalidArgument(f"request {sample.name!r} is over already", field="sample")
        times = sample.close(now_ms, status)
        if status is not Status.COMPLETED:
            self._count(self.arithmetic.rounded(times, NANOSECOND_DIGITS), (len(times),))
        elif times:
            self._times += times
            self._ends.append(len(self._times))
            if len(self._times) >= _AT_ONCE_TOKENS:
                self._count_completed()

    @property
    def gaps_ms(self) -> array[float]:
        """Between the tokens of all completed requests."""
        self._count_completed()
        return self._gaps_ms

    @property
    def tokens_by_interval(self) -> Counter[int]:
        """How many tokens all requests that have ended got in each interval."""
        self._count_completed()
        return self._tokens_by_interval

    def _count_completed(self) -> None:
        """Count the tokens of completed requests, and the gaps between them."""
        if not self._times:
            return
        times, ends = self.arithmetic.rounded(self._times, NANOSECOND_DIGITS), self._ends
        self._times, self._ends = array("d"), []
        self._count(times, ends)
        self._gaps_ms.extend(self.arithmetic.gaps_ms(times, ends))

    def _count(self, times_ms: array[float], ends: Sequence[int]) -> None:
        """Count the tokens of requests; the times of each end before its index in `ends`."""
        for start, end in pairwise((0, *ends)):
            self._tokens_by_interval.update(count_sorted(times_ms[start:end], self.interval_ms))

    def worker_joined(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """Record that a worker joined, for the first time or again; without effect on one that is there."""
        known = self.workers.setdefault((role, worker), WorkerSample(worker, role))
        if not known.spans or known.spans[-1][1] is not None:
            known.spans.append((now_ms, None))

    def worker_left(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """Record that a worker left; without effect on one that is not there."""
        known = self.workers.get((role, worker))
        if known is not None and known.spans and known.spans[-1][1] is None:
            known.spans[-1] = known.spans[-1][0], now_ms

    def preempted(self, worker: int, count: int = 1, role: Role = "decode") -> None:
        """Record that a worker preempted requests."""
        self.workers.setdefault((role, worker), WorkerSample(worker, role)).preemptions += count
