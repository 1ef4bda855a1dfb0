"""Sweeps: many replays of one trace, run in processes, and how their results compare."""

from .fronts import FRONTS, unbeaten, unbeaten_in
from .grid import SweepRun, label_of, sweep_runs, text_of
from .output import sweep_json, sweep_text
from .processes import run_in_processes
from .run import ReportsFolder, Sweep, SweepResult, error_text, sweep

__all__ = [
    "FRONTS",
    "ReportsFolder",
    "Sweep",
    "SweepResult",
    "SweepRun",
    "error_text",
    "label_of",
    "run_in_processes",
    "sweep",
    "sweep_json",
    "sweep_runs",
    "sweep_text",
    "text_of",
    "unbeaten",
    "unbeaten_in",
]
