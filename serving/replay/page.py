"""Reports as one HTML page that needs nothing else: no network, no script, no other file.

    Path("report.html").write_text(report_page([report]))
    Path("compare.html").write_text(report_page({"round robin": one, "kv": other}))

The same reports give the same page, byte for byte. Charts are SVG, drawn here: a library that draws them dates and
numbers its pictures anew each time, or brings megabytes of script along, and none has maps of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .page_figures import comparison, headlines, settings_table
from .page_latency import latency_charts
from .page_maps import worker_maps
from .page_style import STYLE
from .page_text import escaped, folded, number, table
from .page_time import time_charts
from .page_workers import total_charts, worker_tables
from .report import STATISTICS, Distribution, Report

_TITLE = "Penstock replay"
_DISTRIBUTIONS = (
    ("ttft", "Time to first token, ms"),
    ("ttst", "Time to second token, ms"),
    ("tpot", "Time per output token, ms"),
    ("itl", "Gap between tokens, ms"),
    ("e2e_latency", "End to end, ms"),
    ("output_token_throughput_per_user", "Output tokens/s of a user"),
    ("queue_wait", "Wait for a worker, ms"),
    ("prefill_wait", "Wait for the prompt, ms"),
    ("prefill_time", "Prompt, ms"),
    ("kv_transfer", "KV transfer, ms"),
)


def report_page(reports: Mapping[str, Report] | Sequence[Report]) -> str:
    """The page of one report or of some side by side, compared with the first; those without a name get a number."""
    named = named_reports(reports)
    parts = [
        headlines(next(iter(named.values()))) + folded("all figures", comparison(named)) if len(named) == 1 else "",
        _section("Comparison", comparison(named) if len(named) > 1 else ""),
        _section("Latency", _latency(named)),
        _section("Over time", _two(time_charts(named))),
        _section("Workers over time", worker_maps(named)),
        _section("Workers in total", total_charts(named) + worker_tables(named)),
        _section("Settings", settings_table(named)),
    ]
    title = _TITLE if len(named) < 2 else f"{_TITLE}: {len(named)} runs"
    return document(title, _lead(named), "".join(parts))


def named_reports(reports: Mapping[str, Report] | Sequence[Report]) -> dict[str, Report]:
    if isinstance(reports, Mapping):
        return dict(reports)
    return {f"run {at}": report for at, report in enumerate(reports, 1)}


def document(title: str, lead: str, body: str) -> str:
    """A whole page. The title is text; the rest is HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{escaped(title)}</h1>\n<p class="lead">{lead}</p></header>\n'
        f"<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}</section>\n" if body else ""


def _two(charts: Sequence[str]) -> str:
    return f'<div class="two">\n{"".join(charts)}</div>\n' if charts else ""


def _latency(reports: Mapping[str, Report]) -> str:
    if not reports:
        return ""
    return (_two(latency_charts(reports)) or "<p>No request gave a token.</p>\n") + _statistics(reports)


def _lead(reports: Mapping[str, Report]) -> str:
    lines = []
    for run, report in reports.items():
        tokens = f"{number(report.total_input_tokens)} input and {number(report.total_output_tokens)} output tokens"
        lines.append(
            f"{escaped(run)}: {number(report.completed_requests)} of {number(report.num_requests)} requests completed, "
            f"{tokens}, workers: {len(report.workers):,}, {number(report.duration_ms / 1000)} s"
        )
    return "<br>\n".join(lines) if lines else "No reports."


def _statistics(reports: Mapping[str, Report]) -> str:
    parts = []
    for run, report in reports.items():
        figures: list[tuple[str, Distribution]] = [(label, getattr(report, name)) for name, label in _DISTRIBUTIONS]
        rows = [
            (label, [number(one.samples), *(number(getattr(one, statistic)) for statistic in STATISTICS)])
            for label, one in figures
            if one.samples
        ]
        if rows:
            parts.append(folded(f"{escaped(run)}: all statistics", table(["figure", "samples", *STATISTICS], rows)))
    return "".join(parts)
