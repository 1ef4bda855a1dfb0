"""Samples: what a replay notes while it runs, a few machine words for each token.

    sample = samples.arrived(due.name, due.due_ms, input_tokens=due.input_tokens)
    sample.routed(3, now_ms)                      the router has chosen; again after a migration
    sample.tokens(now_ms, len(output.token_ids))  for every item of the stream
    samples.ended(sample, now_ms)                 once, however it ended

Times are milliseconds since the start of the replay.

Source: dynamo lib/mocker/src/replay/collector.rs, TraceCollector. Other than there, every figure is exact, and times of
tokens are kept only until their request has ended.

Amounts for each interval of a replay: things that happen at a time, and things that last.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from typing import Literal, TypeAlias

from attrs import define, field

from pipeline import InvalidArgument


@define(eq=False)
class Amounts:
    """Sums by interval. An interval begins with its first moment and ends before that of the next."""

    interval_ms: float
    by_interval: defaultdict[int, float] = field(factory=lambda: defaultdict(float))

    def interval(self, at_ms: float) -> int:
        return int(at_ms // self.interval_ms)

    def add(self, at_ms: float, amount: float = 1.0) -> None:
        self.by_interval[self.interval(at_ms)] += amount

    def add_sorted(self, times_ms: Sequence[float]) -> None:
        """One for each of the times, which come in order."""
        at = 0
        while at < len(times_ms):
            interval = self.interval(times_ms[at])
            end = bisect_left(times_ms, interval + 1, at, key=self.interval)
            self.by_interval[interval] += end - at
            at = end

    def values(self, intervals: int) -> list[float]:
        """The first so many sums."""
        return [self.by_interval.get(interval, 0.0) for interval in range(intervals)]


@define(eq=False)
class Lasting:
    """How many of something there were on average in each interval."""

    interval_ms: float
    _parts: defaultdict[int, float] = field(factory=lambda: defaultdict(float))
    """Milliseconds in the intervals where something began or ended."""
    _changes: defaultdict[int, int] = field(factory=lambda: defaultdict(int))
    """By how many the number of whole intervals grows there."""

    def add(self, begin_ms: float, end_ms: float) -> None:
        """Something lasted from one time to another."""
        first, last = int(begin_ms // self.interval_ms), int(end_ms // self.interval_ms)
        if first == last:
            self._parts[first] += end_ms - begin_ms
            return
        self._parts[first] += (first + 1) * self.interval_ms - begin_ms
        self._parts[last] += end_ms - last * self.interval_ms
        self._changes[first + 1] += 1
        self._changes[last] -= 1

    def means(self, intervals: int, end_ms: float) -> list[float]:
        """Of the first so many intervals, of which the last one ends with the replay."""
        whole, found = 0, []
        for interval in range(intervals):
            whole += self._changes.get(interval, 0)
            lasted_ms = min(self.interval_ms, end_ms - interval * self.interval_ms) or self.interval_ms
            found.append((self._parts.get(interval, 0.0) + whole * self.interval_ms) / lasted_ms)
        return found


INTERVAL_MS = 10_000.0
"""Of the time series, unless somebody says otherwise."""

Role: TypeAlias = Literal["prefill", "decode"]
"""What a worker does; one that does both counts as decode."""


class Status(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"


def to_nanosecond(time_ms: float) -> float:
    """The time without digits that come by chance from the clock's subtraction: 49.0, not 48.99999999997817."""
    return round(time_ms, 6)


def elapsed_ms(begin_ms: float, end_ms: float) -> float:
    """The time between two such times, as exact as they are; times of other clocks lose nothing either."""
    return round(end_ms - begin_ms, 9)


@define(eq=False)
class RequestSample:
    """One request. The runner sets what it learns; the fields without a default never change."""

    name: str
    arrival_ms: float
    input_tokens: int
    wanted_output_tokens: int | None = None
    session_id: str | None = None
    turn_index: int | None = None
    status: Status = Status.UNFINISHED
    first_token_ms: float | None = None
    second_token_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing, as the worker said last."""
    first_cached_tokens: int | None = None
    """The same as the first worker said; None: as the last."""
    prefill_cached_tokens: int | None = None
    """The same as the prefill worker said, where there was one: what its decode worker had need not be sent."""
    migrations: int = 0
    queue_depth: int | None = None
    """How many waited in the router when it came."""
    prefill_wait_ms: float | None = None
    prefill_ms: float | None = None
    kv_transfer_ms: float | None = None
    places: list[tuple[Role, int, float]] = field(factory=list)
    """Where it was sent and when: role, worker, time."""
    is_placed_by_answer: bool = False
    """Whether only its answer told of its workers: then nobody knows how long it waited for one."""
    error: str | None = None
    """What it ended with, as `Type: message`."""
    _times: array[float] = field(factory=lambda: array("d"), repr=False)

    def routed(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """A worker was chosen for it; what it had before is over."""
        self.places.append((role, worker, now_ms))

    def tokens(self, now_ms: float, count: int = 1) -> None:
        """So many tokens came at once."""
        if count == 1:
            self._times.append(now_ms)
        elif count > 1:
            self._times.extend((now_ms,) * count)

    def worker(self, role: Role = "decode") -> int | None:
        """The last worker that had it in that role."""
        return next((worker for its_role, worker, _ in reversed(self.places) if its_role == role), None)

    @property
    def reused_tokens(self) -> int:
        """The most of its prompt that any worker had cached."""
        return max(self.cached_tokens, self.prefill_cached_tokens or 0)

    @property
    def hit_tokens(self) -> int:
        """What the worker that computed its prompt had cached of it."""
        return self.cached_tokens if self.prefill_cached_tokens is None else self.prefill_cached_tokens

    @property
    def first_hit_tokens(self) -> int:
        """The same of the first worker that had it."""
        known = (self.prefill_cached_tokens, self.first_cached_tokens, self.cached_tokens)
        return next(tokens for tokens in known if tokens is not None)

    @property
    def queue_wait_ms(self) -> float | None:
        """Until its first worker was chosen, where that is known."""
        if not self.places or self.is_placed_by_answer:
            return None
        return max(0.0, to_nanosecond(self.places[0][2] - self.arrival_ms))

    def close(self, now_ms: float, status: Status) -> array[float]:
        """It has ended. Gives the times of its tokens and forgets them."""
        times, self._times = self._times, array("d")
        self.status, self.end_ms, self.output_tokens = status, now_ms, len(times)
        if times:
            self.first_token_ms, self.last_token_ms = times[0], times[-1]
        if len(times) > 1:
            self.second_token_ms = times[1]
        return times


@define(eq=False)
class WorkerSample:
    """One worker, by its number in the replay and its role. `spans` are when it was there; the last may be open."""

    worker: int
    role: Role
    spans: list[tuple[float, float | None]] = field(factory=list)
    preemptions: int = 0

    def seconds(self, end_ms: float) -> float:
        """How long it was there until then."""
        ends = (end_ms if left is None else min(left, end_ms) for _, left in self.spans)
        return sum(max(0.0, end - joined) for end, (joined, _) in zip(ends, self.spans, strict=True)) / 1000.0


@define(eq=False)
class Samples:
    """All requests and workers of one replay; tokens are also counted for each interval of `interval_ms`."""

    interval_ms: float = INTERVAL_MS
    requests: list[RequestSample] = field(factory=list)
    workers: dict[tuple[Role, int], WorkerSample] = field(factory=dict)
    gaps_ms: array[float] = field(factory=lambda: array("d"), repr=False)
    """Between the tokens of all requests that were completed."""
    tokens_over_time: Amounts = field(init=False)

    def __attrs_post_init__(self) -> None:
        if not self.interval_ms > 0:
            raise InvalidArgument(f"must be above 0, got {self.interval_ms}", field="interval_ms")
        self.tokens_over_time = Amounts(self.interval_ms)

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
        """A request is sent."""
        sample = RequestSample(name, arrival_ms, input_tokens, wanted_output_tokens, session_id, turn_index)
        self.requests.append(sample)
        return sample

    def ended(self, sample: RequestSample, now_ms: float, status: Status = Status.COMPLETED) -> None:
        """A request is over. Only what was completed counts in the figures of latency.

        Raises InvalidArgument for one that is over already.
        """
        if sample.end_ms is not None:
            raise InvalidArgument(f"request {sample.name!r} is over already", field="sample")
        times = sample.close(now_ms, status)
        self.tokens_over_time.add_sorted(times)
        if status is Status.COMPLETED:
            self.gaps_ms.extend(map(elapsed_ms, times, islice(times, 1, None)))

    def worker_joined(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """A worker is there, for the first time or again. One that is there already stays."""
        known = self.workers.setdefault((role, worker), WorkerSample(worker, role))
        if not known.spans or known.spans[-1][1] is not None:
            known.spans.append((now_ms, None))

    def worker_left(self, worker: int, now_ms: float, role: Role = "decode") -> None:
        """A worker is gone. One that was not there stays away."""
        known = self.workers.get((role, worker))
        if known is not None and known.spans and known.spans[-1][1] is None:
            known.spans[-1] = known.spans[-1][0], now_ms

    def preempted(self, worker: int, count: int = 1, role: Role = "decode") -> None:
        """A worker sent so many requests back to its queue."""
        self.workers.setdefault((role, worker), WorkerSample(worker, role)).preemptions += count
