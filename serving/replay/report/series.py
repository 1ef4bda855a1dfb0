"""Series: the figures of a replay by interval."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import inf

from attrs import define, field, frozen

from pipeline.protocols.field_rules import InvalidRecord

from ..samples import RequestSample, Role, Samples, Status, interval_of
from .distribution import rank


@define(eq=False)
class IntervalMeans:
    """Average number of concurrent things in each interval."""

    interval_ms: float
    _parts: defaultdict[int, float] = field(factory=lambda: defaultdict(float))
    """Milliseconds in the intervals where a thing began or ended."""
    _changes: defaultdict[int, int] = field(factory=lambda: defaultdict(int))
    """Change of the number of things that last for the whole interval."""

    def add(self, begin_ms: float, end_ms: float) -> None:
        """Add a thing that lasted from one time to another."""
        first, last = interval_of(begin_ms, self.interval_ms), interval_of(end_ms, self.interval_ms)
        if first == last:
            self._parts[first] += end_ms - begin_ms
            return
        self._parts[first] += (first + 1) * self.interval_ms - begin_ms
        self._parts[last] += end_ms - last * self.interval_ms
        self._changes[first + 1] += 1
        self._changes[last] -= 1

    def means(self, intervals: int, end_ms: float) -> list[float]:
        """Return the averages of the first `intervals`; the last one ends with the replay."""
        whole, found = 0, []
        for interval in range(intervals):
            whole += self._changes.get(interval, 0)
            lasted_ms = min(self.interval_ms, end_ms - interval * self.interval_ms) or self.interval_ms
            found.append((self._parts.get(interval, 0.0) + whole * self.interval_ms) / lasted_ms)
        return found


@frozen
class WorkerSeries:
    """The series of one worker: a value for each interval."""

    worker: int
    role: Role
    load: list[float]
    """Requests at a time, on average."""
    hit_rate: list[float | None]
    """Cached part of the prompts that arrived in the interval; None if it completed none of them."""


@frozen
class Series:
    """A value for each interval; the last one ends with the replay."""

    interval_ms: float
    arrivals: list[int]
    completions: list[int]
    running: list[float]
    """Requests in flight, on average."""
    mean_ttft_ms: list[float | None]
    """Of the requests that arrived in the interval; None without one."""
    p99_ttft_ms: list[float | None]
    output_tok_s: list[float]
    workers: list[WorkerSeries]

    def __attrs_post_init__(self) -> None:
        if not 0 < self.interval_ms < inf:
            raise InvalidRecord(f"must be finite and above 0, got {self.interval_ms}", "interval_ms")


def make_series(samples: Samples, end_ms: float) -> Series:
    """Return the series of a replay that ended then."""
    width, requests = samples.interval_ms, samples.requests
    latest_ms = max([end_ms, *(sample.arrival_ms for sample in requests)], default=0.0)
    intervals = int(latest_ms // width) + 1 if requests else 0
    arrivals, completions, running = Counter[int](), Counter[int](), IntervalMeans(width)
    ttfts: defaultdict[int, list[float]] = defaultdict(list)
    for sample in requests:
        arrived = interval_of(sample.arrival_ms, width)
        arrivals[arrived] += 1
        running.add(sample.arrival_ms, _end(sample, latest_ms))
        if sample.status is Status.COMPLETED and sample.end_ms is not None:
            completions[interval_of(sample.end_ms, width)] += 1
            if sample.ttft_ms is not None:
                ttfts[arrived].append(sample.ttft_ms)
    ordered = [sorted(ttfts.get(interval, ())) for interval in range(intervals)]
    lasted_s = [(min(width, latest_ms - interval * width) or width) / 1000 for interval in range(intervals)]
    return Series(
        interval_ms=width,
        arrivals=[arrivals[interval] for interval in range(intervals)],
        completions=[completions[interval] for interval in range(intervals)],
        running=running.means(intervals, latest_ms),
        mean_ttft_ms=[sum(values) / len(values) if values else None for values in ordered],
        p99_ttft_ms=[values[rank(len(values), 99)] if values else None for values in ordered],
        output_tok_s=[samples.tokens_by_interval[interval] / lasted for interval, lasted in enumerate(lasted_s)],
        workers=list(_workers(samples, intervals, latest_ms)),
    )


def _end(sample: RequestSample, latest_ms: float) -> float:
    return latest_ms if sample.end_ms is None else sample.end_ms


def stays(sample: RequestSample, end_ms: float) -> Iterator[tuple[tuple[Role, int], float, float]]:
    """Yield the workers of a request with their begin and end; one ends where the next begins."""
    for at, (role, worker, begin_ms) in enumerate(sample.places):
        over_ms = sample.places[at + 1][2] if at + 1 < len(sample.places) else _end(sample, end_ms)
        yield (role, worker), begin_ms, max(begin_ms, over_ms)


def _workers(samples: Samples, intervals: int, end_ms: float) -> Iterator[WorkerSeries]:
    width = samples.interval_ms
    loads: defaultdict[tuple[Role, int], IntervalMeans] = defaultdict(lambda: IntervalMeans(width))
    cached: defaultdict[tuple[Role, int], Counter[int]] = defaultdict(Counter)
    prompts: defaultdict[tuple[Role, int], Counter[int]] = defaultdict(Counter)
    for sample in samples.requests:
        for place, begin_ms, over_ms in stays(sample, end_ms):
            loads[place].add(begin_ms, over_ms)
        place_of_prompt = computed_at(sample)
        if place_of_prompt is not None and sample.status is Status.COMPLETED:
            arrived = interval_of(sample.arrival_ms, width)
            cached[place_of_prompt][arrived] += sample.hit_tokens
            prompts[place_of_prompt][arrived] += sample.input_tokens
    for role, worker in sorted(samples.workers.keys() | loads.keys()):
        place = role, worker
        hits, wholes = cached[place], prompts[place]
        rates = [hits[at] / wholes[at] if wholes[at] else None for at in range(intervals)]
        yield WorkerSeries(worker, role, loads[place].means(intervals, end_ms), rates)


def computed_at(sample: RequestSample) -> tuple[Role, int] | None:
    """Return the worker that computed the prompt: the last prefill worker, else the last decode worker."""
    prefill = sample.worker("prefill")
    if prefill is not None:
        return "prefill", prefill
    worker = sample.worker()
    return None if worker is None else ("decode", worker)
