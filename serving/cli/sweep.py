"""`penstock replay sweep`: routers, fleets and settings in all combinations, on all cores.

    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8 \\
        --vary overlap_score_credit=0.5,1,2 --reports reports --html sweep.html
"""

from __future__ import annotations

import sys
from typing import Any

from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds

from ..settings import (
    GoodputOptions,
    LoadOptions,
    MockerOptions,
    QuietLogOption,
    RoutingOptions,
    RunOptions,
    Settled,
    SweepPool,
    SweepReportOptions,
    check_files,
)
from ..terminal import echo
from .commands import INTERRUPTED_EXIT

SWEEP_EXAMPLE = (
    "Example: penstock replay sweep TRACE --router kv --workers 4 --workers 8 --vary router_temperature=0,0.5"
)


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
    from ..garbage import settle
    from ..replay import Sweep, sweep_runs, sweep_text
    from ..replay import sweep as run_all
    from ..variables import of_graphs
    from .progress import sweep_progress

    if report.per_request and report.reports is None:
        raise InvalidArgument("needs --reports DIR, whose reports have them", field="per_request")
    check_files(report)
    axes = pool.axes()
    router = "kv" if "kv" in axes["router"] else "round-robin"
    base = routing.graph_fields(router, busy, settled.environment, varied=axes)
    base |= {"router": axes["router"][0], "workers": 1, "seed": pool.seed}
    base |= {"engine": engine.engine, "engine_args": engine.engine_args}
    trace = load.recorded()
    synthetic = load.synthetic(pool.seed, axes) if trace is None else None
    runs = sweep_runs(base, axes, speed_up=load.speed_up, concurrency=load.concurrency, load=synthetic)
    settle()
    results: list[Any] = []
    code = 0
    with sweep_progress(len(runs), sys.stderr) as (on_progress, run_ended):

        def on_result(result: Any) -> None:
            results.append(result)
            run_ended()
            if result.problem is not None:
                echo(f"Error: {result.run.name}: {result.problem}", err=True)

        def on_plan(plan: Any) -> None:
            if plan.wall_s is not None:
                echo(plan.text, err=True)

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
                on_plan=on_plan,
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
