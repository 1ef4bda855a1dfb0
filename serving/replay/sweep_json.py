"""A sweep as JSON: a list of runs, each flat, so that it is a table to whoever reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import codec

from .sweeping import Sweep, SweepResult
from .unbeaten import FRONTS, unbeaten_in

_LEFT_TO_REPORTS = ("series", "workers", "per_request")


def sweep_json(sweep: Sweep) -> bytes:
    """A line for each run: its `name`, `parameters`, `error` where it failed, and the figures as a report calls them.

    `unbeaten_in` are the figures in which no other run beats it. Series, workers and single requests are left to the
    reports. A run that was not reached is not in it.
    """
    marks = unbeaten_in(sweep.runs, sweep.reports)
    lines = [codec.to_json(_plain(one, marks.get(one.run.name, ()))).decode() for one in sweep.results]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def _plain(result: SweepResult, marks: Sequence[str]) -> Mapping[str, Any]:
    run, report = result.run, result.report
    plain: dict[str, Any] = {"name": run.name, "parameters": dict(run.parameters), "error": result.problem}
    if report is None:
        return plain
    figures = {
        name: value
        for name, value in report.to_plain().items()
        if name not in _LEFT_TO_REPORTS and not name.endswith("_percentiles")
    }
    return plain | {"unbeaten_in": [FRONTS[mark] for mark in marks], "worker_count": run.workers} | figures
