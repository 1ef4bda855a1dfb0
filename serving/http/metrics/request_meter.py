"""RequestMeter: the metrics of one request, from its start to its result.

Source: dynamo lib/llm/src/http/service/metrics.rs, InflightGuard and ResponseMetricCollector.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pipeline.loop import clock
from pipeline.protocols import FinishReason, RequestTracker

from ...openai import UsageCount
from ..problems import CLIENT_GONE, Problem
from .telemetry import Telemetry

UNKNOWN_MODEL = "unknown_model"
"""Label of requests for models that are not served: a client must not be able to make labels."""


class RequestMeter:
    """Counts one request while its block runs. A request that leaves without `finish` is an internal error."""

    __slots__ = (
        "_error_type",
        "_has_begun",
        "_last",
        "_metrics",
        "_now",
        "_series",
        "_started",
        "_status",
        "_workers",
        "finish_reasons",
        "first_tokens_s",
        "input_tokens",
        "output_tokens",
        "trackers",
    )

    def __init__(self, telemetry: Telemetry, model: str | None, endpoint: str, streams: bool) -> None:
        """`model` is None if it is not served; `endpoint` is the API's name in the metrics."""
        self._metrics = telemetry.metrics
        self._series = telemetry.series_of(model or UNKNOWN_MODEL, endpoint, "stream" if streams else "unary")
        self._workers = telemetry.workers
        self.trackers: list[RequestTracker] = []
        """The trackers of its prompts."""
        self.finish_reasons: list[str] = []
        """Why each choice ended, in that order."""
        self.input_tokens = self.output_tokens = 0
        self._status, self._error_type = "error", "internal"
        self._now = clock()
        self._started = self._last = self._now()
        self._has_begun = False
        self.first_tokens_s: float | None = None
        """Time to the first tokens; None before them."""

    def __enter__(self) -> Self:
        self._series.started(1)
        self._series.inflight(1)
        self._series.queued(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        series = self._series
        (series.active if self._has_begun else series.queued)(-1)
        series.inflight(-1)
        self._metrics.add("requests_total", 1, **series.labels, status=self._status, error_type=self._error_type)
        series.duration_s(self._now() - self._started)
        if self.output_tokens:
            series.all_output_tokens(self.output_tokens)
            series.output_tokens(self.output_tokens)
        for tracker in self.trackers:
            self._workers.record(tracker)

    @property
    def started_s(self) -> float:
        """When the request began, by the loop's clock."""
        return self._started

    @property
    def first_token_at_s(self) -> float | None:
        """When the first tokens came, by the loop's clock."""
        return None if self.first_tokens_s is None else self._started + self.first_tokens_s

    def add_tracker(self, tracker: RequestTracker | None) -> None:
        """Add the tracker of a prompt that was sent; its workers' gauges are set when the request is over."""
        if tracker is not None:
            self.trackers.append(tracker)

    def add_tokens(self, count: int) -> None:
        """Count the tokens of one item. The first tokens give the time to the first token and no gap."""
        if not count:
            return
        now = self._now()
        if self._has_begun:
            self._series.gaps.observe((now - self._last) / count, count)
        else:
            self._begin(now)
        self._last = now
        self.output_tokens += count

    def _begin(self, now: float) -> None:
        self._has_begun = True
        self.first_tokens_s = now - self._started
        self._series.queued(-1)
        self._series.active(1)
        self._series.first_token_s(self.first_tokens_s)

    def add_finish_reason(self, reason: FinishReason) -> None:
        """Record why one choice ended."""
        self.finish_reasons.append(str(reason))

    def add_prompts(self, usage: UsageCount) -> None:
        """Record the prompt tokens that are known when the request is over."""
        if prompt_tokens := usage.prompt_tokens:
            self.input_tokens = prompt_tokens
            self._series.input_tokens(prompt_tokens)
        if (cached := usage.cached_tokens) is not None:
            self._series.cached_tokens(cached)

    def finish(self, problem: Problem | None) -> None:
        """Set the result: None is success."""
        if problem is None:
            self._status, self._error_type = "success", ""
            return
        self._status, self._error_type = "error", problem.kind
        labels = self._series.labels
        if problem.kind == "overload":
            self._metrics.add("model_rejection_total", model=labels["model"], endpoint=labels["endpoint"])
        if problem is CLIENT_GONE:
            self._metrics.add("disconnected_clients")
            self._metrics.add("model_cancellation_total", 1, **labels)
