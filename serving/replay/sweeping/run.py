"""Running a sweep: its replays in processes, their reports in order, what is there already taken up.

    runs = sweep_runs(GraphConfig(engine="mocker"), {"router": ["round-robin", "kv"], "workers": [4, 8]})
    done = sweep(runs, read_trace("trace.jsonl"), jobs=2, folder=Path("reports"))
    print(sweep_text(done))

Each report is that of `run_config`: how many run at a time, and which ends first, changes no byte of it.

Reports in a folder, each written whole or not at all, and found again if it is of the same settings.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument, wire
from pipeline.testing import run_in_virtual_time

from ...secrets import NOT_SHOWN
from ..faults import Fault, RollingRestart, parse_faults, plan_faults
from ..report import Limits, LoadFacts, Report
from ..runner import check_load, run_config
from ..samples import INTERVAL_MS
from ..traces import SyntheticLoad, Trace
from .grid import SweepRun
from .processes import run_in_processes


@frozen
class ReportsFolder:
    """A folder of JSON reports by their file names; it is made when the first one comes."""

    path: Path

    def find(self, name: str, settings: Mapping[str, Any], per_request: bool = False) -> Report | None:
        """The report of that name, if it is one of these settings, and has every request where that is asked.

        Where an argument of the engine is not shown, none is: what it stands for may have changed.
        """
        if NOT_SHOWN in settings.get("engine_args", {}).values():
            return None
        try:
            report = Report.from_json((self.path / name).read_bytes())
        except (OSError, InvalidArgument):
            return None
        is_whole = report.per_request is not None or not per_request
        return report if is_whole and report.settings == _as_read(settings) else None

    def put(self, name: str, report: bytes) -> None:
        """Writes it in the place of what is there. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_bytes(report)
        os.replace(unfinished, self.path / name)


def _as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    return wire.from_json(wire.to_json(dict(settings)), dict[str, Any])


@frozen
class SweepResult:
    """What became of a run: its report, without single requests, or what went wrong."""

    run: SweepRun
    report: Report | None = None
    problem: str | None = None
    is_found: bool = False
    """Whether the report was there already."""


@frozen
class Sweep:
    """The runs of a sweep and their results, in one order; a run that was not reached has none."""

    runs: Sequence[SweepRun]
    results: Sequence[SweepResult]

    @classmethod
    def of(cls, runs: Sequence[SweepRun], results: Iterable[SweepResult]) -> Sweep:
        """Of results as they came."""
        by_name = {result.run.name: result for result in results}
        return cls(runs, [by_name[run.name] for run in runs if run.name in by_name])

    @property
    def reports(self) -> dict[str, Report]:
        """Those there are, by the names of their runs."""
        return {result.run.name: result.report for result in self.results if result.report is not None}


@frozen
class _Shared:
    """What all runs have in common. Each process has it once."""

    trace: Trace | None
    script: tuple[Fault | RollingRestart, ...]
    limits: Limits | None
    interval_ms: float
    per_request: bool
    gpus: tuple[int, int | None]
    """Of a worker, and of a prefill worker."""
    environment: Mapping[str, str]


@frozen
class _Task:
    """A run, how many requests it has, and what its report says of itself."""

    run: SweepRun
    requests: int
    settings: Mapping[str, Any]


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
    heard: Callable[[int, int], object] = lambda ended, of: None,
    ended: Callable[[SweepResult], object] = lambda result: None,
) -> Sweep:
    """The results of all runs; a run that fails has its problem and the others go on.

    `trace` is what runs replay that have no load of their own, `faults` are sentences as `parse_faults` reads them;
    `environment` is for all graphs, and none unless given, as in `run_config`: reports say what is in it.
    At most `jobs` run at a time, by default one for each core, in processes of their own; with 1 in this one. Processes
    import the script that calls this: it needs its `if __name__ == "__main__"`. `folder` gets each report as it ends
    and gives those it has already, if they are of the same settings. `heard` is told how many requests have ended of
    all that are to be replayed, `ended` each result as it comes. An interrupt ends the processes and is raised.

    Raises InvalidArgument before anything runs: for a load that cannot be, or a script that does not fit the workers
    of a run; for runs of one name; BackendError where no process can be started. It is no coroutine, and takes its
    time: in a program of tasks, call it in a thread.
    """
    _check(runs, jobs)
    gpus = (gpus_per_worker, gpus_per_prefill_worker)
    shared = _Shared(
        trace, tuple(parse_faults(faults)), limits, interval_ms, per_request, gpus, dict(environment or {})
    )
    tasks = _tasks(runs, shared, faults, trace_name)
    listener = _Listener(tasks, None if folder is None else ReportsFolder(folder), heard, ended)
    listener.take_up(per_request)
    missing, jobs = [tasks[at] for at in listener.missing], jobs or cores()
    if min(jobs, len(missing)) > 1:
        run_in_processes(_replay, shared, missing, jobs, listener.heard, listener.ended)
    else:
        for place, task in enumerate(missing):
            listener.ended(place, _replay(shared, task, partial(listener.heard, place)))
    return Sweep.of(runs, listener.results)


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(runs: Sequence[SweepRun], jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise InvalidArgument(f"must be at least 1, got {jobs}", field="jobs")
    for what in ("name", "file_name"):
        twice = [name for name, count in Counter(getattr(run, what) for run in runs).items() if count > 1]
        if twice:
            raise InvalidArgument(f"two runs are called {twice[0]}", field="runs")


def _tasks(runs: Sequence[SweepRun], shared: _Shared, faults: Sequence[str], trace_name: str | None) -> list[_Task]:
    """What is to be done, once it is known that it can be."""
    facts: dict[SyntheticLoad | None, LoadFacts] = {}
    checked: set[tuple[SyntheticLoad | None, float, int | None]] = set()
    tasks = []
    for run in runs:
        load, key, config = _load(run, shared), (run.load, run.speed_up, run.concurrency), run.config
        try:
            plan_faults(shared.script, workers=config.workers, prefill_workers=config.prefill_workers)
            if key not in checked:
                check_load(load, run.speed_up, run.concurrency)
                checked.add(key)
        except InvalidArgument as error:
            raise InvalidArgument(f"{run.name}: {error}", field=error.field) from error
        if run.load not in facts:
            facts[run.load] = LoadFacts.of(load)
        settings = run.settings(
            facts[run.load],
            trace=trace_name,
            faults=faults,
            limits=shared.limits,
            interval_ms=shared.interval_ms,
            gpus=shared.gpus,
            environment=shared.environment,
        )
        tasks.append(_Task(run, load.requests, settings))
    return tasks


def _load(run: SweepRun, shared: _Shared) -> Trace:
    if run.load is not None:
        return _made(run.load)
    if shared.trace is None:
        raise InvalidArgument("is needed by runs that have no load of their own", field="trace")
    return shared.trace


@lru_cache(maxsize=8)
def _made(load: SyntheticLoad) -> Trace:
    """Once for the runs that have it."""
    return load.make()


def said_of(error: BaseException) -> str:
    """An error in one line; what it is only where its text alone would not say it."""
    text = " ".join(str(error).split())
    own = type(error).__module__.startswith("pipeline")
    return text if own and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _replay(shared: _Shared, task: _Task, heard: Callable[[int], object]) -> bytes | str:
    """The report of one run, as JSON, or what went wrong. In any process."""
    run = task.run
    try:
        main = partial(
            run_config,
            run.config,
            _load(run, shared),
            environment=shared.environment,
            faults=shared.script,
            speed_up=run.speed_up,
            sessions_at_a_time=run.concurrency,
            limits=shared.limits,
            interval_ms=shared.interval_ms,
            per_request=shared.per_request,
            gpus_per_worker=shared.gpus[0],
            gpus_per_prefill_worker=shared.gpus[1],
            settings=task.settings,
            heard=heard,
        )
        return run_in_virtual_time(main, backend="asyncio").to_json()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # in words: an error need not survive the way from one process to another
        logging.getLogger(__name__).debug("%s failed", run.name, exc_info=error)
        return said_of(error)


@define
class _Listener:
    """Gathers what becomes of the tasks; `missing` are the places of those that are not there yet."""

    tasks: Sequence[_Task]
    folder: ReportsFolder | None
    on_heard: Callable[[int, int], object]
    on_ended: Callable[[SweepResult], object]
    results: list[SweepResult] = field(factory=list)
    missing: list[int] = field(factory=list)
    counts: Counter[int] = field(factory=Counter)

    def take_up(self, per_request: bool) -> None:
        for at, task in enumerate(self.tasks):
            found = None if self.folder is None else self.folder.find(task.run.file_name, task.settings, per_request)
            if found is None:
                self.missing.append(at)
            else:
                self._result(at, found, is_found=True)

    def heard(self, task: int, count: int) -> None:
        self.counts[task] = count
        self.on_heard(self.counts.total(), sum(self.tasks[at].requests for at in self.missing))

    def ended(self, task: int, result: bytes | str | None, error: BaseException | None = None) -> None:
        """A report as JSON, or what went wrong in the run, or with its process."""
        at = self.missing[task]
        if isinstance(result, bytes) and self.folder is not None:
            self.folder.put(self.tasks[at].run.file_name, result)
        self.heard(task, self.tasks[at].requests)
        if isinstance(result, bytes):
            self._result(at, Report.from_json(result))
        else:
            self._result(at, problem=said_of(error) if error is not None else result)

    def _result(
        self, at: int, report: Report | None = None, problem: str | None = None, is_found: bool = False
    ) -> None:
        small = None if report is None else evolve(report, per_request=None)
        self.results.append(SweepResult(self.tasks[at].run, small, problem, is_found))
        self.on_ended(self.results[-1])
