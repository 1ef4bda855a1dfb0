"""The figures of a report: name, label, unit and which way is better, once for every table and page.

A view picks figures from here by their names: the tables of the terminal, the comparison, the sweep, and both pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from attrs import frozen

from .distribution import Distribution
from .report import Report, WorkerReport
from .series import WorkerSeries

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

    def value(self, report: Report) -> float | None:
        """Return the figure of a report; None if it has no sample, or no such figure."""
        samples: Distribution | None = getattr(report, self.distribution) if self.distribution else None
        value = report.figures.get(self.name)
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
WORKERS = (
    Figure("requests", "requests", short="requests"),
    Figure("input_tokens", "input tokens", short="input"),
    Figure("cached_tokens", "cached"),
    Figure("output_tokens", "output tokens", short="output"),
    Figure("hit_rate", "hit rate", short="hit rate"),
    Figure("mean_running", "running", short="running"),
    Figure("preemptions", "preempted", short="preempted"),
    Figure("worker_seconds", "seconds", short="seconds"),
)
"""The figures of a worker; the table of the terminal has those with a short heading."""
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


def worker_name(worker: WorkerReport | WorkerSeries) -> str:
    """Return what tables and charts call a worker."""
    return f"prefill {worker.worker}" if worker.role == "prefill" else str(worker.worker)


def figure_named(name: str) -> Figure:
    """Return the figure of that name; of one that is not listed, a time is better low and anything else high."""
    return _BY_NAME.get(name) or Figure(name, name, "", LOWER if name.endswith("_ms") else HIGHER)


def compared(reports: Sequence[Report], more: Sequence[Figure] = ()) -> Iterator[tuple[Figure, list[float | None]]]:
    """Yield the figures of a comparison, each with its value in every report; `more` stand before the duration."""
    distributions = [one for one in DISTRIBUTIONS if any(getattr(report, one.name).samples for report in reports)]
    statistics = (one.statistic(name) for one in distributions for name in STATISTICS_COMPARED)
    for figure in (*statistics, *RATES, *BALANCES, *COUNTS, *more, DURATION):
        values = [figure.value(report) for report in reports]
        if any(values) or figure not in (*COUNTS, *more):
            yield figure, values


def differing_settings(reports: Iterable[Report]) -> list[str]:
    """Return the names of the settings that are not equal in all reports."""
    settings = [report.settings for report in reports]
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def sweep_cells(report: Report) -> list[str]:
    """Return the cells of a run in the table of a sweep: completed requests, then SWEEP_COLUMNS."""
    done, total = report.completed_requests, report.num_requests
    return [
        f"{done:,}" if done == total else f"{done:,} of {total:,}",
        *(number(figure.value(report), digits) for figure, digits in SWEEP_COLUMNS),
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
