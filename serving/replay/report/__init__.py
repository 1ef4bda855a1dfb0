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
    Figure,
    best,
    compared,
    difference,
    figure_named,
    number,
    plain_figures,
    sweep_cells,
    titled,
)
from .report import INTERRUPTED, Balance, ErrorReport, Goodput, Report, RequestReport, WorkerReport
from .series import Series, WorkerSeries
from .settings import GPUS, LoadFacts, settings_of
from .summary import Limits, make_report, request_report
from .tables import comparison_text, console_to, new_table, report_text

__all__ = [
    "COSTS",
    "COUNTS",
    "DISTRIBUTIONS",
    "GOODPUT",
    "GPUS",
    "HIGHER",
    "INTERRUPTED",
    "STATISTICS",
    "SWEEP_COLUMNS",
    "WORKER_COUNT",
    "Balance",
    "Distribution",
    "ErrorReport",
    "Figure",
    "Goodput",
    "Limits",
    "LoadFacts",
    "Report",
    "RequestReport",
    "Series",
    "WorkerReport",
    "WorkerSeries",
    "best",
    "compared",
    "comparison_text",
    "console_to",
    "difference",
    "figure_named",
    "gaps_and_rates",
    "make_report",
    "new_table",
    "number",
    "plain_figures",
    "rank",
    "report_text",
    "request_report",
    "settings_of",
    "sweep_cells",
    "titled",
]
