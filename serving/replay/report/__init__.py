"""Reports of a replay: samples to figures, tables and comparison."""

from .distribution import STATISTICS, Distribution, gaps_and_rates, rank
from .report import INTERRUPTED, Balance, ErrorReport, Goodput, Report, RequestReport, WorkerReport, side_by_side
from .settings import GPUS, LoadFacts, settings_of
from .summary import Limits, make_report, request_report
from .tables import NOT_KNOWN, TITLE, difference

__all__ = [
    "GPUS",
    "INTERRUPTED",
    "NOT_KNOWN",
    "STATISTICS",
    "TITLE",
    "Balance",
    "Distribution",
    "ErrorReport",
    "Goodput",
    "Limits",
    "LoadFacts",
    "Report",
    "RequestReport",
    "WorkerReport",
    "difference",
    "gaps_and_rates",
    "make_report",
    "rank",
    "request_report",
    "settings_of",
    "side_by_side",
]
