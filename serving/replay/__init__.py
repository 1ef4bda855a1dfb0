"""A trace through a graph, and what it would have cost: traces, load, faults and the report.

`run` drives any graph, `run_config` a standard one with its workers and their faults. All else neither waits nor knows
a graph: `read_trace` or `SyntheticLoad` says what is asked, `Schedule` when, `plan_faults` which workers fail
meanwhile; `Samples` notes what happens and `make_report` sums it up. `sweep_runs` says what many runs are made with,
`sweep` makes them on all cores.
"""

from .driver import request_of
from .faults import Action, Fault, RollingRestart, parse_fault, parse_faults, plan_faults, read_faults
from .report import (
    Balance,
    Distribution,
    Goodput,
    Limits,
    LoadFacts,
    Report,
    RequestReport,
    Series,
    WorkerReport,
    WorkerSeries,
    comparison_text,
    make_report,
    report_text,
)
from .runner import GraphFactory, run, run_config
from .samples import RequestSample, Role, Samples, Status
from .schedule import Due, Schedule
from .sweeping import Sweep, SweepRun, sweep, sweep_json, sweep_runs, sweep_text
from .traces import BadLine, Prompt, Session, SyntheticLoad, Trace, TraceFormat, Turn, first_requests, read_trace

__all__ = [
    "Action",
    "BadLine",
    "Balance",
    "Distribution",
    "Due",
    "Fault",
    "Goodput",
    "GraphFactory",
    "Limits",
    "LoadFacts",
    "Prompt",
    "Report",
    "RequestReport",
    "RequestSample",
    "Role",
    "RollingRestart",
    "Samples",
    "Schedule",
    "Series",
    "Session",
    "Status",
    "Sweep",
    "SweepRun",
    "SyntheticLoad",
    "Trace",
    "TraceFormat",
    "Turn",
    "WorkerReport",
    "WorkerSeries",
    "comparison_text",
    "first_requests",
    "make_report",
    "parse_fault",
    "parse_faults",
    "plan_faults",
    "read_faults",
    "read_trace",
    "report_text",
    "request_of",
    "run",
    "run_config",
    "sweep",
    "sweep_json",
    "sweep_runs",
    "sweep_text",
]
