"""Replays: the requests of a trace through a graph, in virtual or real time, with a report.

`run` drives any graph, `run_config` a standard one with its workers and their faults. The rest does not wait and is
independent of graphs: `read_trace` and `SyntheticLoad` make the requests, `Schedule` decides when each is due,
`plan_faults` which workers fail, `Samples` records events, and `make_report` computes the figures. `sweep` replays all
`sweep_runs` on all cores. Pages with charts are in `serving.replay.page`.
"""

from .faults import Action, Fault, RollingRestart, parse_faults, plan_faults
from .report import (
    Limits,
    Report,
    RequestReport,
    comparison_text,
    make_report,
    read_reports,
    replay_settings,
    report_text,
)
from .runner import run, run_config
from .samples import Role, Samples
from .schedule import Schedule
from .sweeping import Sweep, SweepRun, sweep, sweep_json, sweep_runs, sweep_text
from .traces import Prompt, Session, SyntheticLoad, Trace, Turn, first_requests, read_trace

__all__ = [
    "Action",
    "Fault",
    "Limits",
    "Prompt",
    "Report",
    "RequestReport",
    "Role",
    "RollingRestart",
    "Samples",
    "Schedule",
    "Session",
    "Sweep",
    "SweepRun",
    "SyntheticLoad",
    "Trace",
    "Turn",
    "comparison_text",
    "first_requests",
    "make_report",
    "parse_faults",
    "plan_faults",
    "read_reports",
    "read_trace",
    "replay_settings",
    "report_text",
    "run",
    "run_config",
    "sweep",
    "sweep_json",
    "sweep_runs",
    "sweep_text",
]
