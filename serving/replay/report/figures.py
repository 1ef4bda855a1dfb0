"""The figures of a report: name, label, unit and which way is better, once for every table and page.

A view picks figures from here by their names: the tables of the terminal, the comparison, the sweep, and both pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from attrs import frozen

from .distribution import Distribution
from .report import Report

LOWER, HIGHER, NEITHER = -1, 1, 0
NOT_KNOWN = "N/A"
WORKER_COUNT = "worker_count"
"""Workers of a run, of both roles: no figure of a report, but one of a sweep."""


@frozen
class Figure:
    """One figure of a report."""

    name: str
    """As in the JSON of a report."""
    label: str
    """What a table calls it, without unit and statistic."""
    unit: str = ""
    better: int = NEITHER
    """LOWER, HIGHER or NEITHER."""
    short: str = ""
    """The heading of a narrow column."""
    scale: float = 1
    """What the value in JSON is divided by."""
    distribution: str = ""
    """The field of the report it is a statistic of."""
    statistic: str = ""
    """Which statistic, such as `p99`."""

    @property
    def title(self) -> str:
        """The label with unit and statistic."""
        return titled(self.label, self.unit) + (f", {self.statistic}" if self.statistic else "")

    def value(self, report: Report, plain: Mapping[str, Any]) -> float | None:
        """Return the figure of a report and its `plain_figures`; None if it has no sample, or no such figure."""
        samples: Distribution | None = getattr(report, self.distribution) if self.distribution else None
        value = plain.get(self.name)
        if (samples is not None and not samples.samples) or not isinstance(value, int | float):
            return None
        return value / self.scale if self.scale != 1 else value


@frozen
class DistributionFigure:
    """A distribution of a report; each of its statistics is a figure."""

    name: str
    """The field of the report."""
    label: str
    unit: str = "ms"
    better: int = LOWER
    is_optional: bool = False
    """Whether a report without a sample leaves it out."""

    def statistic(self, name: str, short: str = "") -> Figure:
        """Return the figure of one statistic, such as `p99`."""
        figure = f"{name}_{self.name}{'_ms' if self.unit == 'ms' else ''}"
        return Figure(figure, self.label, self.unit, self.better, short, distribution=self.name, statistic=name)


DISTRIBUTIONS = (
    DistributionFigure("ttft", "Time to first token"),
    DistributionFigure("ttst", "Time to second token"),
    DistributionFigure("e2e_latency", "End to end"),
    DistributionFigure("tpot", "Time per output token"),
    DistributionFigure("itl", "Gap between tokens"),
    DistributionFigure("output_token_throughput_per_user", "Output tokens/s of a user", "", HIGHER, is_optional=True),
    DistributionFigure("queue_wait", "Wait for a worker", is_optional=True),
    DistributionFigure("prefill_wait", "Wait for the prompt", is_optional=True),
    DistributionFigure("prefill_time", "Prompt", is_optional=True),
    DistributionFigure("kv_transfer", "KV transfer", is_optional=True),
)
RATES = (
    Figure("request_throughput_rps", "Requests/s", "", HIGHER),
    Figure("input_throughput_tok_s", "Input tokens/s", "", HIGHER),
    Figure("output_throughput_tok_s", "Output tokens/s", "", HIGHER, "output tok/s"),
    Figure("total_throughput_tok_s", "Tokens/s", "", HIGHER),
    Figure("prefix_cache_reused_ratio", "Prefix reuse", "", HIGHER, "reuse"),
    Figure("first_admission_prefix_cache_reused_ratio", "Prefix reuse, first admission", "", HIGHER),
)
GOODPUT = (
    Figure("goodput_request_throughput_rps", "Good requests/s", "", HIGHER),
    Figure("goodput_output_throughput_tok_s", "Good output tokens/s", "", HIGHER),
)
BALANCES = (
    Figure("request_balance_max_over_mean", "Requests, greatest over mean", "", LOWER),
    Figure("token_balance_max_over_mean", "Computed tokens, greatest over mean", "", LOWER),
    Figure("load_balance_max_over_mean", "Running, greatest over mean", "", LOWER),
)
COUNTS = (
    Figure("num_requests", "Requests"),
    Figure("completed_requests", "Completed"),
    Figure("rejected_requests", "Rejected", "", LOWER),
    Figure("failed_requests", "Failed", "", LOWER),
    Figure("cancelled_requests", "Cancelled"),
    Figure("unfinished_requests", "Unfinished", "", LOWER),
    Figure("unsent_requests", "Never sent", "", LOWER),
    Figure("skipped_lines", "Bad lines left out"),
    Figure("migrations", "Migrations", "", LOWER),
    Figure("preemptions", "Preemptions", "", LOWER),
    Figure("max_router_queue_depth", "Deepest router queue", "", LOWER),
)
"""Left out of a comparison in which no report has one."""
DURATION = Figure("duration_ms", "Duration", "s", LOWER, scale=1000)
COSTS = (
    Figure("gpu_hours", "GPU hours", "", LOWER),
    Figure("wall_time_ms", "Time of the machine", "s", LOWER, scale=1000),
)
STATISTICS_COMPARED = ("mean", "median", "p99")

_TTFT, _TPOT = DISTRIBUTIONS[0], DISTRIBUTIONS[3]
SWEEP_COLUMNS = (
    (_TTFT.statistic("mean", "mean TTFT"), 1),
    (_TTFT.statistic("p99", "p99 TTFT"), 1),
    (_TPOT.statistic("mean", "mean TPOT"), 2),
    (RATES[4], 3),
    (RATES[2], 0),
)
"""The columns of a sweep, each with its digits behind the point."""

_BY_NAME = {
    figure.name: figure
    for figure in (
        *(one.statistic(name) for one in DISTRIBUTIONS for name in ("mean", "min", "max", "median", "p90", "p99")),
        *RATES,
        *GOODPUT,
        *BALANCES,
        *COUNTS,
        *COSTS,
        DURATION,
        Figure(WORKER_COUNT, "Workers", "", LOWER),
    )
}


def titled(label: str, unit: str) -> str:
    """Return a label with its unit."""
    return f"{label} ({unit})" if unit else label


def figure_named(name: str) -> Figure:
    """Return the figure of that name; of one that is not listed, a time is better low and anything else high."""
    return _BY_NAME.get(name) or Figure(name, name, "", LOWER if name.endswith("_ms") else HIGHER)


def plain_figures(report: Report) -> dict[str, Any]:
    """Return the figures by their names in JSON, without series, workers, requests and percentiles."""
    left_out = ("series", "workers", "per_request")
    plain = report.to_plain()
    return {name: one for name, one in plain.items() if name not in left_out and not name.endswith("_percentiles")}


def compared(reports: Sequence[Report], more: Sequence[Figure] = ()) -> Iterator[tuple[Figure, list[float | None]]]:
    """Yield the figures of a comparison, each with its value in every report; `more` stand before the duration."""
    plains = [plain_figures(report) for report in reports]
    for one in DISTRIBUTIONS:
        if any(getattr(report, one.name).samples for report in reports):
            for name in STATISTICS_COMPARED:
                yield one.statistic(name), _values(one.statistic(name), reports, plains)
    for figure in (*RATES, *BALANCES):
        yield figure, _values(figure, reports, plains)
    for figure in (*COUNTS, *more):
        values = _values(figure, reports, plains)
        if any(values):
            yield figure, values
    yield DURATION, _values(DURATION, reports, plains)


def _values(figure: Figure, reports: Sequence[Report], plains: Sequence[Mapping[str, Any]]) -> list[float | None]:
    return [figure.value(report, plain) for report, plain in zip(reports, plains, strict=True)]


def sweep_cells(report: Report) -> list[str]:
    """Return the cells of a run in the table of a sweep: completed requests, then SWEEP_COLUMNS."""
    done, total, plain = report.completed_requests, report.num_requests, plain_figures(report)
    return [
        f"{done:,}" if done == total else f"{done:,} of {total:,}",
        *(number(figure.value(report, plain), digits) for figure, digits in SWEEP_COLUMNS),
    ]


def best(values: Sequence[float | None], better: int) -> list[bool]:
    """Return which of the values are best: none if all that are known are equal."""
    known = [value for value in values if value is not None]
    if better == NEITHER or len(set(known)) < 2:
        return [False] * len(values)
    top = max(known) if better == HIGHER else min(known)
    return [value == top for value in values]


def number(value: float | None, digits: int | None = None) -> str:
    """Return a number with thousands separators; without `digits` behind the point, three digits count at least."""
    if value is None or not isfinite(value):
        return NOT_KNOWN
    if digits is not None:
        return f"{value:,.{digits}f}"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    size = abs(value)
    if size < 1:
        return f"{value:#.3g}"
    return f"{value:,.2f}" if size < 100 else f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"


def difference(first: float | None, other: float | None) -> str:
    """Return by how many percent the other is more than the first, `=` if it rounds to none.

    Return an empty text if one of them is not known, or only the first is 0.
    """
    if first is None or other is None or not isfinite(first) or not isfinite(other) or (first == 0 and other != 0):
        return ""
    percent = 0.0 if first == other else 100.0 * (other - first) / abs(first)
    return f"{percent:+,.1f} %" if round(percent, 1) else "="
