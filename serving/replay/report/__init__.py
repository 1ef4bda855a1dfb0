"""The report of a replay: its figures, how they are computed, and how they are shown as text."""

from .distribution import STATISTICS, Distribution, gaps_and_rates, rank
from .figures import (
    COSTS,
    COUNTS,
    DISTRIBUTIONS,
    GOODPUT,
    HIGHER,
    SWEEP_COLUMNS,
    WORKER_COUNT,
    WORKERS,
    Figure,
    best,
    compared,
    difference,
    differing_settings,
    figure_named,
    number,
    sweep_cells,
    titled,
    worker_name,
)
from .report import INTERRUPTED, Balance, ErrorReport, Report, RequestReport, WorkerReport, read_reports
from .series import Series
from .settings import replay_settings
from .summary import Limits, make_report, request_report
from .tables import comparison_text, console_to, new_table, report_text

__all__ = [
    "COSTS",
    "COUNTS",
    "DISTRIBUTIONS",
    "GOODPUT",
    "HIGHER",
    "INTERRUPTED",
    "STATISTICS",
    "SWEEP_COLUMNS",
    "WORKERS",
    "WORKER_COUNT",
    "Balance",
    "Distribution",
    "ErrorReport",
    "Figure",
    "Limits",
    "Report",
    "RequestReport",
    "Series",
    "WorkerReport",
    "best",
    "compared",
    "comparison_text",
    "console_to",
    "difference",
    "differing_settings",
    "figure_named",
    "gaps_and_rates",
    "make_report",
    "new_table",
    "number",
    "rank",
    "read_reports",
    "replay_settings",
    "report_text",
    "request_report",
    "sweep_cells",
    "titled",
    "worker_name",
]
