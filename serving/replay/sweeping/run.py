"""Running a sweep: its replays in processes, their reports in order, existing reports reused.

    runs = sweep_runs(GraphConfig(engine="mocker"), {"router": ["round-robin", "kv"], "workers": [4, 8]})
    done = sweep(runs, read_trace("trace.jsonl"), jobs=2, folder=Path("reports"))
    print(sweep_text(done))

Each report has the bytes of `run_config`, however many run at a time and whichever ends first.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument, wire
from pipeline.testing import run_in_virtual_time

from ...secrets import NOT_SHOWN
from ..faults import Fault, RollingRestart, parse_faults, plan_faults
from ..report import Limits, Report, replay_settings
from ..runner import run_config
from ..samples import INTERVAL_MS
from ..schedule import Schedule
from ..traces import SyntheticLoad, Trace
from .estimate import SweepPlan, estimate_cpu_s, relative_cost
from .grid import SweepRun
from .processes import run_in_processes
from .results import Sweep, SweepResult


@frozen
class ReportsFolder:
    """A folder of JSON reports by file name, each written whole or not at all. The first one creates the folder."""

    path: Path

    def find(self, name: str, settings: Mapping[str, Any], per_request: bool = False) -> Report | None:
        """Return the report of that name if it has these settings, and every request if `per_request`.

        Return None if an argument of the engine is not shown, because its value may have changed.
        """
        if NOT_SHOWN in settings.get("engine_args", {}).values():
            return None
        try:
            report = Report.from_json((self.path / name).read_bytes())
        except (OSError, InvalidArgument):
            return None
        is_whole = report.per_request is not None or not per_request
        as_read = wire.from_json(wire.to_json(dict(settings)), dict[str, Any])
        return report if is_whole and report.settings == as_read else None

    def put(self, name: str, report: bytes) -> None:
        """Write a report, replacing an existing one. Raise OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_bytes(report)
        os.replace(unfinished, self.path / name)


_Shared: TypeAlias = "tuple[Trace | None, Callable[..., Coroutine[Any, Any, Report]]]"
"""What all tasks share: the trace, read once and unpickled once by each process, and the function that replays."""


@frozen
class _Task:
    """A run to replay."""

    run: SweepRun
    requests: int
    """Of its load."""
    settings: Mapping[str, Any]
    """Of its report."""


def sweep(
    runs: Sequence[SweepRun],
    trace: Trace | None = None,
    *,
    trace_name: str | None = None,
    environment: Mapping[str, str] | None = None,
    faults: Sequence[str] = (),
    limits: Limits | None = None,
    interval_ms: float = INTERVAL_MS,
    per_request: bool = False,
    gpus_per_worker: int = 1,
    gpus_per_prefill_worker: int | None = None,
    jobs: int | None = None,
    folder: Path | None = None,
    on_plan: Callable[[SweepPlan], object] | None = None,
    on_progress: Callable[[int, int], object] = lambda ended, of: None,
    on_result: Callable[[SweepResult], object] = lambda result: None,
) -> Sweep:
    """Return the results of all runs; a run that fails gets its error and the others continue.

    `trace` is the load of runs without their own, and `trace_name` its name in reports. `faults` are sentences of
    `parse_faults`. `environment` is for all graphs, default empty as in `run_config`, and is part of the reports.
    `jobs` runs at most run at a time, default one for each core, in processes of their own; with 1 in this process.
    Processes import the script that calls this: it needs its `if __name__ == "__main__"`. `folder` receives each report
    as its run ends, and provides the reports that it has already with the same settings. `on_plan` is called before
    the first run with what all will take, for which heads of the load are replayed here. `on_progress` is called with
    the number of requests that have ended and that of all, `on_result` with each result as it comes. An interrupt ends
    the processes and is raised.

    Raise InvalidArgument before anything runs: for an invalid load, for a script that does not fit the workers of a
    run, and for two runs of one name. Raise BackendError if no process can be started. The call blocks: in an async
    program, call it in a thread.
    """
    _check(runs, jobs)
    script = parse_faults(faults)
    how: dict[str, Any] = {
        "environment": dict(environment or {}),
        "limits": limits,
        "interval_ms": interval_ms,
        "gpus_per_worker": gpus_per_worker,
        "gpus_per_prefill_worker": gpus_per_prefill_worker,
    }
    tasks = _tasks(runs, trace, script, partial(replay_settings, trace=trace_name, faults=faults, **how))
    shared = trace, partial(run_config, faults=script, per_request=per_request, **how)
    collector = _Collector(None if folder is None else ReportsFolder(folder), on_progress, on_result)
    missing = collector.missing = [task for task in tasks if not collector.find(task, per_request)]
    jobs = min(jobs or cores(), len(missing))
    if jobs > 1:
        # The longest first: all processes end at about the same time.
        missing.sort(key=lambda task: relative_cost(task.run, _load(task.run, trace)), reverse=True)
    if on_plan is not None and missing:
        on_plan(_plan(missing, shared, jobs))
    if jobs > 1:
        run_in_processes(_replay, shared, missing, jobs, collector.progress, collector.ended)
    else:
        for place, task in enumerate(missing):
            collector.ended(place, _replay(shared, task, partial(collector.progress, place)))
    return Sweep.of(runs, collector.results)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(runs: Sequence[SweepRun], jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise InvalidArgument(f"must be at least 1, got {jobs}", field="jobs")
    for what in ("name", "file_name"):
        twice = [name for name, count in Counter(getattr(run, what) for run in runs).items() if count > 1]
        if twice:
            raise InvalidArgument(f"two runs are called {twice[0]}", field="runs")


def _tasks(
    runs: Sequence[SweepRun],
    trace: Trace | None,
    script: Sequence[Fault | RollingRestart],
    settings: Callable[..., dict[str, Any]],
) -> list[_Task]:
    """Return the tasks. Raise InvalidArgument if one of them cannot be run."""
    checked: set[tuple[SyntheticLoad | None, float, int | None]] = set()
    tasks = []
    for run in runs:
        load, key, config = _load(run, trace), (run.load, run.speed_up, run.concurrency), run.config
        try:
            plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)
            if key not in checked:
                Schedule.of(load, speed_up=run.speed_up, sessions_at_a_time=run.concurrency)
                checked.add(key)
        except InvalidArgument as error:
            raise InvalidArgument(f"{run.name}: {error}", field=error.field) from error
        of_run = settings(config, load, speed_up=run.speed_up, concurrency=run.concurrency)
        tasks.append(_Task(run, load.requests, of_run))
    return tasks


def _load(run: SweepRun, trace: Trace | None) -> Trace:
    if run.load is not None:
        return _made(run.load)
    if trace is None:
        raise InvalidArgument("is needed by runs that have no load of their own", field="trace")
    return trace


@lru_cache(maxsize=8)
def _made(load: SyntheticLoad) -> Trace:
    """Return the trace of a load, made once for all its runs."""
    return load.make()


def error_text(error: BaseException) -> str:
    """Return an error in one line; a penstock error without its class."""
    text = " ".join(str(error).split())
    own = type(error).__module__.startswith("pipeline")
    return text if own and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plan(tasks: Sequence[_Task], shared: _Shared, jobs: int) -> SweepPlan:
    trace, replay = shared

    def replay_head(run: SweepRun, head: Trace) -> None:
        drive = {"speed_up": run.speed_up, "sessions_at_a_time": run.concurrency}
        run_in_virtual_time(partial(replay, run.config, head, **drive), backend="asyncio")

    runs_s = estimate_cpu_s([(task.run, _load(task.run, trace)) for task in tasks], replay_head)
    return SweepPlan.of(sum(task.requests for task in tasks), jobs, len(tasks), runs_s)


def _replay(
    shared: _Shared,
    task: _Task,
    on_progress: Callable[[int], object],
) -> bytes | str:
    """Return the report of one run as JSON, or its error as text. Runs in any process."""
    (trace, replay), run = shared, task.run
    try:
        load, drive = _load(run, trace), {"speed_up": run.speed_up, "sessions_at_a_time": run.concurrency}
        main = partial(replay, run.config, load, settings=task.settings, on_progress=on_progress, **drive)
        return run_in_virtual_time(main, backend="asyncio").to_json()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as text, because not every error can be pickled
        logging.getLogger(__name__).debug("%s failed", run.name, exc_info=error)
        return error_text(error)


@define
class _Collector:
    """Results of the tasks as they come."""

    folder: ReportsFolder | None
    on_progress: Callable[[int, int], object]
    on_result: Callable[[SweepResult], object]
    missing: list[_Task] = field(factory=list)
    """The tasks without an existing report."""
    results: list[SweepResult] = field(factory=list)
    counts: Counter[int] = field(factory=Counter)
    """Ended requests by missing task."""

    def find(self, task: _Task, per_request: bool) -> bool:
        """Take the result of a task if the folder has it; return whether it has."""
        found = None if self.folder is None else self.folder.find(task.run.file_name, task.settings, per_request)
        if found is not None:
            self._add(SweepResult(task.run, found, is_found=True))
        return found is not None

    def progress(self, at: int, count: int) -> None:
        """`count` requests of a missing task have ended."""
        self.counts[at] = count
        self.on_progress(self.counts.total(), sum(task.requests for task in self.missing))

    def ended(self, at: int, result: bytes | str | None, error: BaseException | None = None) -> None:
        """A missing task has ended with a report as JSON, the error of its run as text, or an error of its process."""
        task = self.missing[at]
        if isinstance(result, bytes) and self.folder is not None:
            self.folder.put(task.run.file_name, result)
        self.progress(at, task.requests)
        if isinstance(result, bytes):
            self._add(SweepResult(task.run, Report.from_json(result)))
        else:
            self._add(SweepResult(task.run, problem=result if error is None else error_text(error)))

    def _add(self, result: SweepResult) -> None:
        small = None if result.report is None else evolve(result.report, per_request=None)
        self.results.append(evolve(result, report=small))
        self.on_result(self.results[-1])
