"""The report of samples: latencies, rates, balances, costs and goodput.

    report = make_report(samples, limits=Limits(ttft_ms=500, itl_ms=50), gpus_per_worker=2)

Source: dynamo lib/mocker/src/replay/collector.rs, TraceCollector::finish and SlaThresholds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import fsum, inf
from typing import Any

from attrs import fields, frozen

from pipeline import InvalidArgument

from ..samples import RequestSample, Role, Samples, Status, WorkerSample, elapsed_ms
from .distribution import Distribution, gaps_and_rates
from .report import Balance, ErrorReport, Goodput, Report, RequestReport, WorkerReport
from .series import computed_at, make_series, stays


@frozen
class Limits:
    """Latency limits of a good request; None is no limit. Raise InvalidArgument for an invalid time."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """For the mean of the request's own gaps."""
    e2e_ms: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < inf:
                raise InvalidArgument(f"must be finite and not negative, got {limit}", field=f"sla_{name}")

    @property
    def are_set(self) -> bool:
        return (self.ttft_ms, self.itl_ms, self.e2e_ms) != (None, None, None)

    def hold(self, sample: RequestSample) -> bool:
        """Return whether a completed request is within the limits. One without tokens has only its end-to-end time."""
        if sample.first_token_ms is None:
            whole_ms = elapsed_ms(sample.arrival_ms, sample.end_ms or 0.0)
            return self.ttft_ms is None and self.itl_ms is None and _within(whole_ms, self.e2e_ms)
        figures = ((sample.e2e_latency_ms, self.e2e_ms), (sample.ttft_ms, self.ttft_ms), (sample.tpot_ms, self.itl_ms))
        return all(_within(value, limit) for value, limit in figures)


def make_report(
    samples: Samples,
    *,
    settings: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    gpus_per_worker: int = 1,
    gpus_per_prefill_worker: int | None = None,
    unsent_requests: int = 0,
    skipped_lines: int = 0,
    per_request: bool = False,
    series: bool = True,
    wall_time_ms: float | None = None,
) -> Report:
    """Return the report of a finished replay. Requests that have not ended count as unfinished."""
    if gpus_per_worker < 0 or (gpus_per_prefill_worker or 0) < 0:
        raise InvalidArgument("cannot be negative", field="gpus_per_worker")
    requests = samples.requests
    done = [sample for sample in requests if sample.status is Status.COMPLETED]
    end_ms = max((sample.end_ms for sample in requests if sample.end_ms is not None), default=0.0)
    itl, rates = gaps_and_rates(samples.gaps_ms, samples.arithmetic)
    workers = _worker_reports(samples, end_ms)
    gpus = gpus_per_worker, gpus_per_worker if gpus_per_prefill_worker is None else gpus_per_prefill_worker
    return Report(
        settings=dict(settings or {}),
        unsent_requests=unsent_requests,
        skipped_lines=skipped_lines,
        duration_ms=end_ms,
        wall_time_ms=wall_time_ms,
        itl=itl,
        output_token_throughput_per_user=rates,
        goodput=_goodput(done, limits, end_ms) if limits is not None and limits.are_set else None,
        errors=_errors(requests),
        workers=workers,
        series=make_series(samples, end_ms) if series else None,
        per_request=[request_report(sample) for sample in requests] if per_request else None,
        **_counts(requests),
        **_amounts(done, end_ms),
        **_latencies(done),
        **_router_figures(requests, samples.workers.values()),
        **_costs(workers, *gpus),
        **_balances([one for one in workers if one.role == "decode"]),
    )


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _counts(requests: list[RequestSample]) -> dict[str, Any]:
    by_status = Counter(sample.status for sample in requests)
    return {"num_requests": len(requests), **{f"{status}_requests": by_status[status] for status in Status}}


def _errors(requests: list[RequestSample]) -> list[ErrorReport]:
    parts = [sample.error.partition(": ") for sample in requests if sample.error is not None]
    examples = {kind: message for kind, _, message in reversed(parts)}
    counted = Counter(kind for kind, _, _ in parts)
    return [ErrorReport(kind, count, examples[kind]) for kind, count in counted.most_common()]


def _amounts(done: list[RequestSample], end_ms: float) -> dict[str, Any]:
    prompt, answer = sum(one.input_tokens for one in done), sum(one.output_tokens for one in done)
    cached, first = sum(one.reused_tokens for one in done), sum(one.first_hit_tokens for one in done)
    return {
        "total_input_tokens": prompt,
        "total_output_tokens": answer,
        "processed_tokens": prompt + answer,
        "request_throughput_rps": _per_second(len(done), end_ms),
        "input_throughput_tok_s": _per_second(prompt, end_ms),
        "output_throughput_tok_s": _per_second(answer, end_ms),
        "total_throughput_tok_s": _per_second(prompt + answer, end_ms),
        "prefix_cache_reused_ratio": cached / prompt if prompt else 0.0,
        "first_admission_prefix_cache_reused_ratio": first / prompt if prompt else 0.0,
    }


def _per_second(amount: float, lasted_ms: float) -> float:
    return amount / (lasted_ms / 1000) if lasted_ms > 0 else 0.0


_LATENCIES = ("ttft", "ttst", "tpot", "e2e_latency", "queue_wait", "prefill_wait", "prefill_time", "kv_transfer")


def _latencies(done: list[RequestSample]) -> dict[str, Any]:
    figures = {name: [getattr(one, f"{name}_ms") for one in done] for name in _LATENCIES}
    return {name: Distribution.of([value for value in values if value is not None]) for name, values in figures.items()}


def _router_figures(requests: list[RequestSample], workers: Iterable[WorkerSample]) -> dict[str, Any]:
    return {
        "max_router_queue_depth": max((one.queue_depth or 0 for one in requests), default=0),
        "preemptions": sum(worker.preemptions for worker in workers),
        "migrations": sum(one.migrations for one in requests),
        "migrated_requests": sum(one.migrations > 0 for one in requests),
    }


def _costs(workers: list[WorkerReport], gpus_per_worker: int, gpus_per_prefill_worker: int) -> dict[str, Any]:
    prefill_s = fsum(one.worker_seconds for one in workers if one.role == "prefill")
    decode_s = fsum(one.worker_seconds for one in workers if one.role == "decode")
    return {
        "worker_seconds": prefill_s + decode_s,
        "prefill_worker_seconds": prefill_s,
        "decode_worker_seconds": decode_s,
        "gpu_hours": (prefill_s * gpus_per_prefill_worker + decode_s * gpus_per_worker) / 3600,
    }


def _goodput(done: list[RequestSample], limits: Limits, end_ms: float) -> Goodput:
    good = [sample for sample in done if limits.hold(sample)]
    tokens = sum(sample.output_tokens for sample in good)
    return Goodput(len(good), _per_second(len(good), end_ms), _per_second(tokens, end_ms))


def _balances(workers: list[WorkerReport]) -> dict[str, Any]:
    return {
        "request_balance": Balance.of([float(one.requests) for one in workers]),
        "token_balance": Balance.of(
            [float(one.input_tokens - one.cached_tokens + one.output_tokens) for one in workers]
        ),
        "load_balance": Balance.of([one.mean_running for one in workers]),
    }


def _worker_reports(samples: Samples, end_ms: float) -> list[WorkerReport]:
    """Return the reports of all workers, decode first, by number."""
    busy_ms: defaultdict[tuple[Role, int], float] = defaultdict(float)
    work: defaultdict[tuple[Role, int], Counter[str]] = defaultdict(Counter)
    for sample in samples.requests:
        for place, begin_ms, over_ms in stays(sample, end_ms):
            busy_ms[place] += over_ms - begin_ms
        if sample.status is Status.COMPLETED:
            _count_completed(work, sample)
    return [
        _worker_report(
            samples.workers.get(place) or WorkerSample(place[1], place[0]), work[place], busy_ms[place], end_ms
        )
        for place in sorted(samples.workers.keys() | busy_ms.keys())
    ]


def _count_completed(work: Mapping[tuple[Role, int], Counter[str]], sample: RequestSample) -> None:
    """Count a completed request at its last worker of each role, and its prompt where it was computed."""
    prompt_at, answer_at = computed_at(sample), sample.worker()
    if prompt_at is not None:
        work[prompt_at].update(input_tokens=sample.input_tokens, cached_tokens=sample.hit_tokens)
        work[prompt_at]["requests"] += prompt_at[0] == "prefill"
    if answer_at is not None:
        work["decode", answer_at].update(requests=1, output_tokens=sample.output_tokens)


def _worker_report(known: WorkerSample, work: Mapping[str, int], busy_ms: float, end_ms: float) -> WorkerReport:
    return WorkerReport(
        worker=known.worker,
        role=known.role,
        requests=work["requests"],
        input_tokens=work["input_tokens"],
        cached_tokens=work["cached_tokens"],
        output_tokens=work["output_tokens"],
        hit_rate=work["cached_tokens"] / work["input_tokens"] if work["input_tokens"] else None,
        mean_running=busy_ms / end_ms if end_ms > 0 else 0.0,
        preemptions=known.preemptions,
        worker_seconds=known.seconds(end_ms),
    )


def request_report(sample: RequestSample) -> RequestReport:
    """Return the figures of one request."""
    named: dict[str, Any] = {
        "arrival_time_ms": sample.arrival_ms,
        "terminal_time_ms": sample.end_ms,
        "input_length": sample.input_tokens,
        "requested_output_length": sample.wanted_output_tokens,
        "output_length": sample.output_tokens,
        "reused_input_tokens": sample.reused_tokens,
        "worker": sample.worker(),
        "prefill_worker": sample.worker("prefill"),
    }
    others = {one.name: getattr(sample, one.name) for one in fields(RequestReport) if one.name not in named}
    return RequestReport(**named, **others)
