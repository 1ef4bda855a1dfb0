"""The figures of a report that a page compares, each with its name and which way is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from .page_text import escaped, number, percent, setting, table, value_cell
from .report import Distribution, Report

LOWER, HIGHER, NEITHER = -1, 1, 0


@frozen
class Figure:
    """One figure by its name in JSON; `better` is the way to go, `of` the distribution it belongs to.

    It is shown divided by `unit`.
    """

    name: str
    label: str
    better: int = NEITHER
    of: str = ""
    unit: float = 1


FIGURES = (
    Figure("completed_requests", "Completed requests"),
    Figure("rejected_requests", "Rejected requests", LOWER),
    Figure("failed_requests", "Failed requests", LOWER),
    Figure("cancelled_requests", "Cancelled requests"),
    Figure("unfinished_requests", "Unfinished requests", LOWER),
    Figure("unsent_requests", "Requests never sent", LOWER),
    Figure("duration_ms", "Duration, s", LOWER, unit=1000),
    Figure("request_throughput_rps", "Requests/s", HIGHER),
    Figure("output_throughput_tok_s", "Output tokens/s", HIGHER),
    Figure("goodput_request_throughput_rps", "Good requests/s", HIGHER),
    Figure("mean_ttft_ms", "Time to first token, mean, ms", LOWER, "ttft"),
    Figure("median_ttft_ms", "Time to first token, median, ms", LOWER, "ttft"),
    Figure("p90_ttft_ms", "Time to first token, p90, ms", LOWER, "ttft"),
    Figure("p99_ttft_ms", "Time to first token, p99, ms", LOWER, "ttft"),
    Figure("mean_tpot_ms", "Time per output token, mean, ms", LOWER, "tpot"),
    Figure("p99_tpot_ms", "Time per output token, p99, ms", LOWER, "tpot"),
    Figure("mean_itl_ms", "Gap between tokens, mean, ms", LOWER, "itl"),
    Figure("p99_itl_ms", "Gap between tokens, p99, ms", LOWER, "itl"),
    Figure("mean_e2e_latency_ms", "End to end, mean, ms", LOWER, "e2e_latency"),
    Figure("p99_e2e_latency_ms", "End to end, p99, ms", LOWER, "e2e_latency"),
    Figure("mean_queue_wait_ms", "Wait for a worker, mean, ms", LOWER, "queue_wait"),
    Figure("prefix_cache_reused_ratio", "Prefix reuse", HIGHER),
    Figure("request_balance_max_over_mean", "Requests of workers, greatest over mean", LOWER),
    Figure("token_balance_max_over_mean", "Computed tokens of workers, greatest over mean", LOWER),
    Figure("load_balance_max_over_mean", "Load of workers, greatest over mean", LOWER),
    Figure("max_router_queue_depth", "Deepest router queue", LOWER),
    Figure("preemptions", "Preemptions", LOWER),
    Figure("migrations", "Migrations", LOWER),
    Figure("gpu_hours", "GPU hours", LOWER),
    Figure("wall_time_ms", "Took the machine, s", LOWER, unit=1000),
)
HEADLINES = (
    "completed_requests",
    "request_throughput_rps",
    "output_throughput_tok_s",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2e_latency_ms",
    "prefix_cache_reused_ratio",
    "load_balance_max_over_mean",
    "duration_ms",
)
_IF_ANY = {
    *("rejected_requests", "failed_requests", "cancelled_requests", "unfinished_requests", "unsent_requests"),
    *("max_router_queue_depth", "preemptions", "migrations", "mean_queue_wait_ms", "gpu_hours"),
}
"""Shown only where one report has some."""
WORKER_COUNT = "worker_count"
"""How many workers a report has, of both kinds: no figure of it, but one of a sweep."""
_BY_NAME = {figure.name: figure for figure in (*FIGURES, Figure(WORKER_COUNT, "Workers", LOWER))}


def figure_named(name: str) -> Figure:
    """What is known of a figure; of another, a time is better low and anything else high."""
    return _BY_NAME.get(name) or Figure(name, name, LOWER if name.endswith("_ms") else HIGHER)


def values_of(report: Report) -> dict[str, float | None]:
    """Figures by name; None where there was nothing to take them of."""
    plain = report.to_plain()
    return {figure.name: value_of(report, figure, plain) for figure in FIGURES}


def value_of(report: Report, figure: Figure, plain: Mapping[str, object]) -> float | None:
    sample: Distribution | None = getattr(report, figure.of) if figure.of else None
    value = plain.get(figure.name)
    if (sample is not None and not sample.samples) or not isinstance(value, int | float):
        return None
    return value / figure.unit if figure.unit != 1 else value


def comparison(reports: Mapping[str, Report]) -> str:
    """A row for each figure, a column for each report: its value, how far from the first, and which is best."""
    values = {run: values_of(report) for run, report in reports.items()}
    rows = []
    for figure in FIGURES:
        found = [each[figure.name] for each in values.values()]
        if any(value is not None for value in found) and (figure.name not in _IF_ANY or any(found)):
            rows.append((escaped(figure.label), _compared(found, figure.better)))
    first = next(iter(values), "")
    several = len(values) > 1
    caption = f"Percentages are differences from {escaped(first)}; ★ marks the best of a row." if several else ""
    return table(["figure", *map(escaped, values)], rows, caption=caption)


def best(values: Sequence[float | None], better: int) -> list[bool]:
    """Which of the values are best: none where there is nothing to choose between."""
    known = [value for value in values if value is not None]
    if better == NEITHER or len(set(known)) < 2:
        return [False] * len(values)
    top = max(known) if better == HIGHER else min(known)
    return [value == top for value in values]


def _compared(values: Sequence[float | None], better: int) -> list[str]:
    base = values[0]
    cells = []
    for at, (value, is_best) in enumerate(zip(values, best(values, better), strict=True)):
        change = _change(value, base, better) if at else ""
        star = '<span class="best" role="img" aria-label="best">★</span> ' if is_best else ""
        shown = f"<strong>{number(value)}</strong>" if is_best else number(value)
        cells.append(f"{star}{shown}{change}")
    return cells


def _change(value: float | None, base: float | None, better: int) -> str:
    text = percent(value, base)
    if not text:
        return ""
    assert value is not None
    assert base is not None
    way = (value - base) * better
    kind = "good" if way > 0 else "bad" if way < 0 else "same"
    return f' <span class="change {kind}">{text}</span>'


def headlines(report: Report) -> str:
    """The figures to look at first, as cards."""
    values = values_of(report)
    cards = "".join(
        f"<div><dt>{escaped(_BY_NAME[name].label)}</dt><dd>{number(values[name])}</dd></div>\n" for name in HEADLINES
    )
    return f'<dl class="cards">\n{cards}</dl>\n'


def settings_table(reports: Mapping[str, Report]) -> str:
    """What was replayed; where the reports differ is marked."""
    names = list(dict.fromkeys(name for report in reports.values() for name in report.settings))
    rows = []
    for name in names:
        cells = [setting(report.settings[name]) if name in report.settings else "" for report in reports.values()]
        differ = len(set(cells)) > 1
        shown = [f"<mark>{value_cell(cell)}</mark>" if differ and cell else value_cell(cell) for cell in cells]
        rows.append((escaped(name), shown))
    return table(["setting", *map(escaped, reports)], rows) if rows else ""
