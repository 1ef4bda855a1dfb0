"""Series: the figures of a replay by interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from attrs import frozen

from pipeline import InvalidArgument

from ..samples import IntervalMeans, IntervalSums, RequestSample, Role, Samples, Status
from .distribution import rank


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
            raise InvalidArgument(f"must be finite and above 0, got {self.interval_ms}", field="interval_ms")


def make_series(samples: Samples, end_ms: float) -> Series:
    """Return the series of a replay that ended then."""
    width, requests = samples.interval_ms, samples.requests
    latest_ms = max([end_ms, *(sample.arrival_ms for sample in requests)], default=0.0)
    intervals = int(latest_ms // width) + 1 if requests else 0
    arrivals, completions, running = IntervalSums(width), IntervalSums(width), IntervalMeans(width)
    ttfts: defaultdict[int, list[float]] = defaultdict(list)
    for sample in requests:
        arrivals.add(sample.arrival_ms)
        running.add(sample.arrival_ms, _end(sample, latest_ms))
        if sample.status is Status.COMPLETED and sample.end_ms is not None:
            completions.add(sample.end_ms)
            if sample.ttft_ms is not None:
                ttfts[arrivals.interval(sample.arrival_ms)].append(sample.ttft_ms)
    ordered = [sorted(ttfts.get(interval, ())) for interval in range(intervals)]
    tokens = samples.tokens_over_time.values(intervals)
    lasted_s = [(min(width, latest_ms - interval * width) or width) / 1000 for interval in range(intervals)]
    return Series(
        interval_ms=width,
        arrivals=[int(value) for value in arrivals.values(intervals)],
        completions=[int(value) for value in completions.values(intervals)],
        running=running.means(intervals, latest_ms),
        mean_ttft_ms=[sum(values) / len(values) if values else None for values in ordered],
        p99_ttft_ms=[values[rank(len(values), 99)] if values else None for values in ordered],
        output_tok_s=[count / lasted for count, lasted in zip(tokens, lasted_s, strict=True)],
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
    cached: defaultdict[tuple[Role, int], IntervalSums] = defaultdict(lambda: IntervalSums(width))
    prompts: defaultdict[tuple[Role, int], IntervalSums] = defaultdict(lambda: IntervalSums(width))
    for sample in samples.requests:
        for place, begin_ms, over_ms in stays(sample, end_ms):
            loads[place].add(begin_ms, over_ms)
        place_of_prompt = computed_at(sample)
        if place_of_prompt is not None and sample.status is Status.COMPLETED:
            cached[place_of_prompt].add(sample.arrival_ms, sample.hit_tokens)
            prompts[place_of_prompt].add(sample.arrival_ms, sample.input_tokens)
    for role, worker in sorted(samples.workers.keys() | loads.keys()):
        place = role, worker
        parts = zip(cached[place].values(intervals), prompts[place].values(intervals), strict=True)
        rates = [part / whole if whole else None for part, whole in parts]
        yield WorkerSeries(worker, role, loads[place].means(intervals, end_ms), rates)


def computed_at(sample: RequestSample) -> tuple[Role, int] | None:
    """Return the worker that computed the prompt: the last prefill worker, else the last decode worker."""
    prefill = sample.worker("prefill")
    if prefill is not None:
        return "prefill", prefill
    worker = sample.worker()
    return None if worker is None else ("decode", worker)
