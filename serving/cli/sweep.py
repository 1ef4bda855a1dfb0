"""`penstock replay sweep`: routers, fleets and settings in all combinations, on all cores.

    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8 \\
        --vary overlap_score_credit=0.5,1,2 --reports reports --html sweep.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds

from ..terminal import echo
from .loads import INTERRUPTED_EXIT, check_files, synthetic_of, trace_of
from .options import MockerOptions, QuietLogOption, RoutingOptions, SweepPool
from .replay_options import GoodputOptions, LoadOptions, RunOptions, SweepReportOptions
from .sources import Settled

if TYPE_CHECKING:
    from ..replay import SyntheticLoad

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
    workers: RunOptions,
    goodput: GoodputOptions,
    report: SweepReportOptions,
    log: QuietLogOption,
    settled: Settled,
) -> int:
    """Replay a trace in every combination of routers, worker counts and what else varies; show which no other beats."""
    from ..replay import Sweep, sweep_runs, sweep_text
    from ..replay import sweep as run_all
    from ..variables import of_graphs
    from .progress import sweep_progress

    _check_files(report)
    axes = _axes_of(pool)
    base = routing.graph_fields("kv" if "kv" in axes["router"] else "round-robin", busy, settled.environment)
    base |= {"router": axes["router"][0], "workers": 1, "seed": pool.seed}
    base |= {"engine": engine.engine, "engine_args": engine.engine_args}
    trace = trace_of(load)
    synthetic = _synthetic(load, pool.seed, axes) if trace is None else None
    runs = sweep_runs(base, axes, speed_up=load.speed_up, concurrency=load.concurrency, load=synthetic)
    results: list[Any] = []
    code = 0
    with sweep_progress(len(runs), sys.stderr) as (on_progress, run_ended):

        def on_result(result: Any) -> None:
            results.append(result)
            run_ended()
            if result.problem is not None:
                echo(f"Error: {result.run.name}: {result.problem}", err=True)

        try:
            run_all(
                runs,
                trace,
                trace_name=load.trace_name,
                environment=of_graphs(settled.environment),
                faults=list(workers.fault),
                limits=goodput.limits(),
                per_request=report.per_request,
                gpus_per_worker=workers.gpus_per_worker,
                gpus_per_prefill_worker=workers.gpus_per_prefill_worker,
                jobs=pool.jobs,
                folder=report.reports,
                on_progress=on_progress,
                on_result=on_result,
            )
        except KeyboardInterrupt:  # has ended the runs under way
            code = INTERRUPTED_EXIT
            echo(f"Interrupted: {len(results)} of {len(runs)} runs have ended", err=True)
    if found := sum(result.is_found for result in results):
        echo(f"{found} of {len(runs)} runs were in {report.reports}", err=True)
    done = Sweep.of(runs, results)
    echo(sweep_text(done), nl=False)
    if report.json is not None:
        from ..replay import sweep_json

        report.json.write_bytes(sweep_json(done))
    if report.html is not None:
        from ..replay.page import sweep_page

        report.html.write_text(sweep_page(done), encoding="utf-8")
    return code or int(any(result.problem is not None for result in results))


def _check_files(report: SweepReportOptions) -> None:
    """Raise InvalidArgument for a place where nothing can be written, and for single requests without a folder."""
    folder = report.reports
    if report.per_request and folder is None:
        raise InvalidArgument("needs --reports DIR, whose reports have them", field="per_request")
    check_files(json=report.json, html=report.html)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder", field="reports")
    if folder is not None and not folder.absolute().parent.is_dir():
        raise InvalidArgument(f"{folder} is in no folder that is there", field="reports")


def _axes_of(pool: SweepPool) -> dict[str, Sequence[Any]]:
    """Return the values that vary, by name: routers first, then workers, then the others in the order of the options.

    Raise InvalidArgument for a text that is not NAME=VALUE,VALUE and for a name that is given twice.
    """
    axes: dict[str, Sequence[Any]] = {}
    given: dict[str, Sequence[Any]] = {"router": list(pool.router), "workers": list(pool.workers)}
    for text in pool.vary:
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


def _synthetic(options: LoadOptions, seed: int, axes: Mapping[str, Sequence[Any]]) -> SyntheticLoad:
    """Return the synthetic load with the first value of each of its axes. Raise InvalidArgument."""
    from ..deployment import converted
    from ..replay import SyntheticLoad

    names = {one.name for one in attrs.fields(SyntheticLoad)} - {"seed"}
    try:
        varied = converted(SyntheticLoad, {name: values[0] for name, values in axes.items() if name in names})
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=f"vary.{error.field}") from error
    return synthetic_of(options, seed, **varied)
