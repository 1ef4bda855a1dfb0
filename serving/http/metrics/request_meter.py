"""RequestMeter: the metrics of one request, from its start to its result.

Source: dynamo lib/llm/src/http/service/metrics.rs, InflightGuard and ResponseMetricCollector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from attrs import Factory, define, field

from pipeline.loop import clock
from pipeline.protocols import FinishReason, RequestTracker

from ...openai import UsageCount
from ...problems import CLIENT_GONE, Problem
from .telemetry import RequestSeries, Telemetry

UNKNOWN_MODEL = "unknown_model"
"""Label of requests for models that are not served: a client must not be able to make labels."""


@define(eq=False)
class RequestMeter:
    """Counts one request while its block runs. A request that leaves without `finish` is an internal error."""

    _telemetry: Telemetry
    _series: RequestSeries
    """What requests with its labels are counted in."""
    trackers: list[RequestTracker] = field(init=False, factory=list)
    """The trackers of its prompts."""
    finish_reasons: list[str] = field(init=False, factory=list)
    """Why each choice ended, in that order."""
    input_tokens: int = field(init=False, default=0)
    output_tokens: int = field(init=False, default=0)
    first_tokens_s: float | None = field(init=False, default=None)
    """Time to the first tokens; None before them."""
    _status: str = field(init=False, default="error")
    _error_type: str = field(init=False, default="internal")
    _has_begun: bool = field(init=False, default=False)
    _now: Callable[[], float] = field(init=False, factory=clock)
    started_s: float = field(init=False, default=Factory(lambda self: self._now(), takes_self=True))
    """When the request began, by the loop's clock."""
    _last_s: float = field(init=False, default=0.0)
    """When the last tokens came; set once it has begun."""

    @classmethod
    def of(cls, telemetry: Telemetry, model: str | None, endpoint: str, streams: bool) -> RequestMeter:
        """Return the meter of a request; `model` is None if it is not served, `endpoint` the API's name in metrics."""
        return cls(telemetry, telemetry.series_of(model or UNKNOWN_MODEL, endpoint, "stream" if streams else "unary"))

    def __enter__(self) -> Self:
        self._series.started(1)
        self._series.inflight(1)
        self._series.queued(1)
        return self

    def __exit__(self, *_: object) -> None:
        series = self._series
        (series.active if self._has_begun else series.queued)(-1)
        series.inflight(-1)
        self._telemetry.metrics.add(
            "requests_total", 1, **series.labels, status=self._status, error_type=self._error_type
        )
        series.duration_s(self._now() - self.started_s)
        if self.output_tokens:
            series.all_output_tokens(self.output_tokens)
            series.output_tokens(self.output_tokens)
        for tracker in self.trackers:
            self._telemetry.workers.record(tracker)

    @property
    def first_token_at_s(self) -> float | None:
        """When the first tokens came, by the loop's clock."""
        return None if self.first_tokens_s is None else self.started_s + self.first_tokens_s

    def add_tracker(self, tracker: RequestTracker | None) -> None:
        """Add the tracker of a prompt that was sent; its workers' gauges are set when the request is over."""
        if tracker is not None:
            self.trackers.append(tracker)

    def add_tokens(self, count: int) -> None:
        """Count the tokens of one item. The first tokens give the time to the first token and no gap."""
        if not count:
            return
        series = self._series
        now = series.at(self._now())
        if self._has_begun:
            series.gaps_s((now - self._last_s) / count, count)
        else:
            self._has_begun = True
            self.first_tokens_s = now - self.started_s
            series.queued(-1)
            series.active(1)
            series.first_token_s(self.first_tokens_s)
        self._last_s = now
        self.output_tokens += count

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
        labels, metrics = self._series.labels, self._telemetry.metrics
        if problem.kind == "overload":
            metrics.add("model_rejection_total", model=labels["model"], endpoint=labels["endpoint"])
        if problem is CLIENT_GONE:
            metrics.add("disconnected_clients")
            metrics.add("model_cancellation_total", 1, **labels)
