"""NativeMetrics: the metrics of a mock engine under the names of the engine it simulates.

    vllm:num_requests_running{model_name="m",engine="0"} 3.0

Only the latencies are counted; all else is read from the ranks when the metrics are collected.

Source: dynamo lib/llm/src/mocker/metrics.rs, NativeMockerMetrics, with its names, labels and bounds. Other than there,
SGLang's hit rate is that of the last admissions, as in the other metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import accumulate, chain
from operator import attrgetter

from pipeline.telemetry import Sample, family

from .args import MockEngineArgs
from .latencies import Histogram, Latencies
from .rank import Rank

_VLLM_BOUNDS = (
    (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
    ),
    (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75), *(1, 2.5, 5, 7.5, 10, 20, 40, 80)),
    (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60), *(120, 240, 480, 960, 1920, 7680)),
)
_SGLANG_BOUNDS = (
    (*(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10), *(20, 40, 60, 80, 100, 200, 400)),
    (
        *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
        *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
    ),
    (*(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10), *(20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)),
)
"""In seconds: of the first token, of the gaps, of whole requests."""

Labels = dict[str, str]


class NativeMetrics:
    """The metrics of one engine's ranks. A prefill worker has no latencies: no client reads its one token."""

    def __init__(self, args: MockEngineArgs, model: str, ranks: Items[Rank]) -> None:
        self._ranks = ranks
        self._model = model
        self._prefix = f"{args.engine_type}:"
        self._is_sglang = args.engine_type == "sglang"
        if args.worker_type != "prefill":
            bounds = _SGLANG_BOUNDS if self._is_sglang else _VLLM_BOUNDS
            for rank in ranks:
                rank.latencies = Latencies(*bounds)

    def text(self) -> str:
        """Return all of them as Prometheus text, each family once."""
        return "".join(self._sglang() if self._is_sglang else self._by_rank())

    def _by_rank(self) -> Iterable[str]:
        """Yield the families of vLLM; also for TensorRT-LLM."""
        yield self._gauge("num_requests_running", "Requests that run", lambda rank: rank.scheduler.running_count)
        yield self._gauge("num_requests_waiting", "Requests that wait", lambda rank: rank.scheduler.waiting_count)
        yield self._gauge("kv_cache_usage_perc", "Part of the cache in use, from 0 to 1", _cache_usage)
        yield self._gauge("gpu_cache_usage_perc", "The same under its older name", _cache_usage)
        preemptions = [Sample(self._of(rank), rank.scheduler.preemptions) for rank in self._ranks]
        yield family(f"{self._prefix}num_preemptions_total", "counter", "Requests that were pre-empted", preemptions)
        measured = [(self._of(rank), [rank.latencies]) for rank in self._ranks if rank.latencies is not None]
        yield from self._latencies(measured)

    def _sglang(self) -> Iterable[str]:
        """Yield the families of SGLang: of all ranks together."""
        schedulers = [rank.scheduler for rank in self._ranks]
        place = {"engine_type": "sglang", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        labels = {"model_name": self._model, **place}
        gauges: list[tuple[str, str, float]] = [
            ("num_running_reqs", "Requests that run", sum(scheduler.running_count for scheduler in schedulers)),
            ("num_queue_reqs", "Requests that wait", sum(scheduler.waiting_count for scheduler in schedulers)),
        ]
        rates = [rank.reports.hit_rate for rank in self._ranks if rank.reports.hit_rate is not None]
        if rates:
            gauges.append(("cache_hit_rate", "Part of the prompts found in the cache", sum(rates) / len(rates)))
        for name, about, value in gauges:
            yield family(self._prefix + name, "gauge", about, [Sample(labels, value)])
        latencies = [rank.latencies for rank in self._ranks if rank.latencies is not None]
        if latencies:
            labels = {"model_name": self._model, "engine_type": "sglang"}
            count = Sample(labels, sum(each.finished for each in latencies))
            yield family(f"{self._prefix}num_requests_total", "counter", "Requests that came to their end", [count])
            yield from self._latencies([(labels, latencies)])

    def _gauge(self, name: str, about: str, value: Callable[[Rank], float]) -> str:
        return family(
            self._prefix + name, "gauge", about, [Sample(self._of(rank), value(rank)) for rank in self._ranks]
        )

    def _latencies(self, measured: Items[tuple[Labels, Items[Latencies]]]) -> Iterable[str]:
        if not measured:
            return
        for name, about, part in (
            ("time_to_first_token_seconds", "Until the first token", attrgetter("first_token")),
            ("inter_token_latency_seconds", "From one token to the next", attrgetter("token_gap")),
            ("e2e_request_latency_seconds", "From the request to its last token", attrgetter("whole")),
        ):
            samples = [_samples([part(latencies) for latencies in each], labels) for labels, each in measured]
            yield family(self._prefix + name, "histogram", about, chain.from_iterable(samples))

    def _of(self, rank: Rank) -> Labels:
        return {"model_name": self._model, "engine": str(rank.dp_rank)}


def _cache_usage(rank: Rank) -> float:
    return rank.scheduler.pool.active / rank.scheduler.pool.capacity


def _samples(histograms: Items[Histogram], labels: Labels) -> Iterable[Sample]:
    """Yield the samples of histograms with the same bounds, added up."""
    counts = accumulate(sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True))
    *below, total = counts
    for bound, count in zip(histograms[0].bounds, below, strict=True):
        yield Sample(labels | {"le": str(float(bound))}, count, "_bucket")
    yield Sample(labels | {"le": "+Inf"}, total, "_bucket")
    yield Sample(labels, sum(histogram.sum for histogram in histograms), "_sum")
    yield Sample(labels, total, "_count")
