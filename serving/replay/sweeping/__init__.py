"""Sweeps: many replays of one trace, run in processes, and how their results compare."""

from .grid import SweepRun, label_of, sweep_runs, text_of
from .processes import run_in_processes
from .results import FRONTS, Sweep, SweepResult, sweep_json, sweep_text, unbeaten, unbeaten_in
from .run import ReportsFolder, error_text, sweep

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
