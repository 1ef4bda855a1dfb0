"""`penstock replay`: a trace through a graph in virtual time, or to a server, reports side by side, and sweeps.

    penstock replay TRACE --router kv --workers 8 --json kv.json
    penstock replay TRACE --live http://127.0.0.1:8000
    penstock replay compare round_robin.json kv.json
    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8

The first is the command `run`, whose name may be left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import evolve
from cyclopts import App

from ..terminal import echo, table_width
from .commands import command
from .live import check_options, interrupted, replayed_live
from .loads import INTERRUPTED_EXIT, check_files, load_of, named_reports
from .options import QuietLogOption, ReplayGraph, engine_args_named
from .replay_options import CompareOptions, GoodputOptions, LiveOptions, LoadOptions, ReportOptions, RunOptions
from .sources import Settled
from .sweep import SWEEP_EXAMPLE, sweep

if TYPE_CHECKING:
    from ..deployment import GraphConfig
    from ..replay import Report

REPLAY_HINT = "Reports side by side: penstock replay compare A.json B.json; many runs: penstock replay sweep"

replay = App(
    name="replay",
    help="Replay a trace through a graph in virtual time or to a server, compare reports, or make many in one go.",
    help_epilogue=REPLAY_HINT,
)


@command(replay, "")
@command(replay)
def run(
    load: LoadOptions,
    graph: ReplayGraph,
    workers: RunOptions,
    goodput: GoodputOptions,
    report: ReportOptions,
    server: LiveOptions,
    log: QuietLogOption,
    settled: Settled,
) -> int:
    """Replay a trace, or made up load, through the graph that `serve` would run or to a server; report what it cost."""
    check_options(settled.options, server.live, report)
    check_files(json=report.json, html=report.html)
    how = {"speed_up": load.speed_up, "sessions_at_a_time": load.concurrency, "limits": goodput.limits()}
    if server.live is not None:
        made = replayed_live(server, load, graph.pool.seed, report, **how)
    else:
        from ..variables import of_graphs

        config = graph.config(settled.environment)
        environment = of_graphs(settled.environment)
        with engine_args_named(config):
            made = _replayed(config, load, workers, report, server.real_time, environment=environment, **how)
    from ..replay import report_text

    if report.json is not None:
        report.json.write_bytes(made.to_json())
    if report.html is not None:
        from ..replay.page import report_page

        report.html.write_text(report_page({"live" if server.live else graph.pool.router: made}), encoding="utf-8")
    echo(report_text(made, table_width()), nl=False)
    return INTERRUPTED_EXIT if made.is_interrupted else 0


def _replayed(
    config: GraphConfig,
    load: LoadOptions,
    workers: RunOptions,
    report: ReportOptions,
    is_real_time: bool,
    *,
    environment: Mapping[str, str],
    limits: Any,
    **how: Any,
) -> Report:
    """Return the report of the load through the graph, with the settings that the same run of a sweep has.

    A progress bar is shown meanwhile. In real time an interrupt ends the load; the report covers the requests until
    then. Only a report with `wall_time` differs from run to run.
    """
    import anyio

    from pipeline.virtual_time import run_in_virtual_time

    from ..replay import parse_faults, plan_faults, replay_settings, run_config
    from .progress import progress

    script = parse_faults(list(workers.fault))
    plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)  # before a long trace is read
    trace = load_of(load, config.seed or 0)
    common: dict[str, Any] = {"environment": environment, "limits": limits}
    common |= {name: getattr(workers, name) for name in ("gpus_per_worker", "gpus_per_prefill_worker")}
    settings = replay_settings(
        config,
        trace,
        trace=load.trace_name,
        faults=list(workers.fault),
        speed_up=load.speed_up,
        concurrency=load.concurrency,
        **common,
    )
    how |= {"faults": script, "per_request": report.per_request, **common}
    began_s = perf_counter()
    with progress(trace.requests, sys.stderr) as on_progress:
        main = partial(run_config, config, trace, settings=settings, on_progress=on_progress, **how)
        if is_real_time:
            made = anyio.run(partial(main, stop_when=interrupted))
        else:
            made = run_in_virtual_time(main, backend="asyncio")
    return evolve(made, wall_time_ms=round(1000 * (perf_counter() - began_s), 3)) if report.wall_time else made


@command(replay)
def compare(options: CompareOptions) -> None:
    """Show the figures of two or more reports side by side, and by how much each differs from the first."""
    from ..replay import comparison_text

    check_files(html=options.html, pareto=options.pareto)
    named = named_reports(options.reports)
    echo(comparison_text(list(named.items())), nl=False)
    if options.html is not None:
        from ..replay.page import report_page

        options.html.write_text(report_page(named), encoding="utf-8")
    if options.pareto is not None:
        from ..replay.page import pareto_page

        options.pareto.write_text(pareto_page(named), encoding="utf-8")


command(replay, help_epilogue=SWEEP_EXAMPLE)(sweep)
