"""`penstock replay sweep`: routers, fleets and settings in all combinations, on all cores.

    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8 \\
        --vary overlap_score_credit=0.5,1,2 --reports reports --html sweep.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds

from ..terminal import echo
from .loads import (
    INTERRUPTED_EXIT,
    check_no_trace,
    check_page,
    check_place,
    limits_of,
    read_load,
    synthetic_load,
    trace_name,
)
from .options import MockerOptions, QuietLogOption, RoutingOptions, SweepPool
from .replay_options import GoodputOptions, LoadOptions, RunOptions, SweepReportOptions
from .sources import Settled

if TYPE_CHECKING:
    from ..replay import Sweep, SyntheticLoad, Trace

SWEEP_EXAMPLE = (
    "Example: penstock replay sweep TRACE --router kv --workers 4 --workers 8 --vary router_temperature=0,0.5"
)

_CALLED = {"requests": "request_count"}
"""Options with another name than the field that they set."""
_DEFAULTS: dict[str, Sequence[Any]] = {"router": ["round-robin"], "workers": [1]}


def sweep(
    load: LoadOptions,
    pool: SweepPool,
    engine: MockerOptions,
    routing: RoutingOptions,
    busy: BusyThresholds,
    run: RunOptions,
    goodput: GoodputOptions,
    report: SweepReportOptions,
    log: QuietLogOption,
    settled: Settled,
) -> int:
    """Replay a trace in every combination of routers, worker counts and what else varies; show which no other beats."""
    from ..variables import of_graphs

    _check_files(report)
    axes = _axes_of(pool.router, pool.workers, pool.vary)
    main = "kv" if "kv" in axes["router"] else "round-robin"
    base = routing.graph_fields(main, busy, settled.environment)
    base |= {
        "router": axes["router"][0],
        "workers": 1,
        "seed": pool.seed,
        "engine": engine.engine,
        "engine_args": engine.engine_args,
    }
    return _run_sweep(
        base,
        axes,
        _load_of(load, pool.seed, axes),
        {"speed_up": load.speed_up, "concurrency": load.concurrency},
        report,
        jobs=pool.jobs,
        environment=of_graphs(settled.environment),
        faults=list(run.fault),
        limits=limits_of(goodput),
        per_request=report.per_request,
        gpus_per_worker=run.gpus_per_worker,
        gpus_per_prefill_worker=run.gpus_per_prefill_worker,
    )


def _check_files(report: SweepReportOptions) -> None:
    """Raise InvalidArgument for a place where nothing can be written, and for single requests without a folder."""
    folder = report.reports
    if report.per_request and folder is None:
        raise InvalidArgument("needs --reports DIR, whose reports have them", field="per_request")
    check_place(report.json, "json")
    check_page(report.html, "html")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder", field="reports")
    if folder is not None and not folder.absolute().parent.is_dir():
        raise InvalidArgument(f"{folder} is in no folder that is there", field="reports")


def _write_files(report: SweepReportOptions, done: Sweep) -> None:
    if report.json is not None:
        from ..replay import sweep_json

        report.json.write_bytes(sweep_json(done))
    if report.html is not None:
        from ..replay.page import sweep_page

        report.html.write_text(sweep_page(done), encoding="utf-8")


@frozen
class SweepLoad:
    """The load of a sweep: a trace with the name of its file, or synthetic load that each run makes."""

    trace: Trace | None = None
    name: str | None = None
    synthetic: SyntheticLoad | None = None


def _axes_of(routers: Sequence[str], workers: Sequence[int], vary: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values that vary, by name: routers first, then workers, then the others in the order of the options.

    Raise InvalidArgument for a text that is not NAME=VALUE,VALUE and for a name that is given twice.
    """
    axes: dict[str, Sequence[Any]] = {}
    given: dict[str, Sequence[Any]] = {"router": list(routers), "workers": list(workers)}
    for text in vary:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        name = _CALLED.get(name, name)
        if not (name and equals):
            raise InvalidArgument(f"expected NAME=VALUE,VALUE, got {text!r}", field="vary")
        if name in axes or given.get(name):
            raise InvalidArgument("is given twice", field=f"vary.{name}")
        axes[name] = [value.strip() for value in values.split(",")]
        if not all(axes[name]):
            raise InvalidArgument(f"a value is empty in {text!r}", field=f"vary.{name}")
    return {name: values or axes.get(name) or _DEFAULTS[name] for name, values in given.items()} | {
        name: values for name, values in axes.items() if name not in given
    }


def _load_of(options: LoadOptions, seed: int, axes: Mapping[str, Sequence[Any]]) -> SweepLoad:
    """Return the trace, or the synthetic load; its size may be among the axes. Raise InvalidArgument."""
    if options.trace:
        return SweepLoad(read_load(options), trace_name(options.trace))
    check_no_trace(options)
    from ..deployment import converted
    from ..replay import SyntheticLoad

    given = options.synthetic | options.prefixes
    texts = {name: values[0] for name, values in axes.items() if name in (*given, "request_count")}
    return SweepLoad(synthetic=synthetic_load(given | _placed(converted, SyntheticLoad, texts), options, seed))


def _placed(converted: Any, make: Any, texts: Mapping[str, str]) -> dict[str, Any]:
    try:
        return dict(converted(make, texts))
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=f"vary.{error.field}") from error


def _run_sweep(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    load: SweepLoad,
    how: Mapping[str, Any],
    report: SweepReportOptions,
    *,
    jobs: int | None,
    **given: Any,
) -> int:
    """Run all with a progress bar, print the table, write the files, and return the exit code.

    `given` are arguments of `serving.replay.sweep`. The code is 1 if a run failed; its error is printed at once. An
    interrupt ends the runs under way, and the table has the others.
    """
    from ..replay import Sweep, sweep_runs
    from ..replay import sweep as run_all
    from .progress import sweep_progress

    runs = sweep_runs(base, axes, load=load.synthetic, **how)
    results: list[Any] = []
    code = 0
    with sweep_progress(len(runs), sys.stderr) as (on_progress, run_ended):

        def on_result(result: Any) -> None:
            results.append(result)
            run_ended()
            if result.problem is not None:
                echo(f"Error: {result.run.name}: {result.problem}", err=True)

        hooks: dict[str, Any] = {"on_progress": on_progress, "on_result": on_result, "trace_name": load.name}
        try:
            run_all(runs, load.trace, jobs=jobs, folder=report.reports, **given, **hooks)
        except KeyboardInterrupt:
            code = INTERRUPTED_EXIT
            echo(f"Interrupted: {len(results)} of {len(runs)} runs have ended", err=True)
    done = Sweep.of(runs, results)
    if found := sum(result.is_found for result in results):
        echo(f"{found} of {len(runs)} runs were in {report.reports}", err=True)
    from ..replay import sweep_text

    echo(sweep_text(done), nl=False)
    _write_files(report, done)
    return code or int(any(result.problem is not None for result in results))
