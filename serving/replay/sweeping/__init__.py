"""Sweeps: many replays over a grid of settings, in several processes."""

from .grid import SweepRun, label_of, sweep_runs, text_of
from .processes import run_in_processes
from .run import ReportsFolder, Sweep, SweepResult, said_of, sweep

__all__ = [
    "ReportsFolder",
    "Sweep",
    "SweepResult",
    "SweepRun",
    "label_of",
    "run_in_processes",
    "said_of",
    "sweep",
    "sweep_runs",
    "text_of",
]
