"""`penstock replay`: a trace through a graph in virtual time, or to a server, reports side by side, and sweeps.

    penstock replay TRACE --router kv --workers 8 --json kv.json
    penstock replay TRACE --live http://127.0.0.1:8000
    penstock replay compare round_robin.json kv.json
    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8

The first is the command `run`, whose name may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve
from cyclopts import App

from pipeline.protocols.limits import BusyThresholds

from ..terminal import echo, table_width
from .commands import command
from .live import check_options, replayed_live
from .loads import (
    INTERRUPTED_EXIT,
    check_page,
    check_place,
    limits_of,
    load_of,
    load_settings,
    named_reports,
    replayed,
    script_of,
    trace_name,
    write_page,
    write_pareto,
)
from .options import MockerOptions, QuietLogOption, ReplayPool, RoutingOptions, engine_args_named, graph_config
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
    pool: ReplayPool,
    engine: MockerOptions,
    routing: RoutingOptions,
    busy: BusyThresholds,
    faults: RunOptions,
    goodput: GoodputOptions,
    report: ReportOptions,
    server: LiveOptions,
    log: QuietLogOption,
    settled: Settled,
) -> int:
    """Replay a trace, or made up load, through the graph that `serve` would run or to a server; report what it cost."""
    check_options(settled.options, server.live, per_request=report.per_request, has_json=report.json is not None)
    check_place(report.json, "json")
    check_page(report.html, "html")
    how = {"speed_up": load.speed_up, "sessions_at_a_time": load.concurrency, "limits": limits_of(goodput)}
    if server.live is None:
        routed = routing.graph_fields(pool.router, busy, settled.environment)
        config = graph_config(None, engine, settled.environment, workers=pool.workers, seed=pool.seed, **routed)
        from ..variables import of_graphs

        with engine_args_named(config):
            made = _of_graph(config, load, faults, report, server.real_time, of_graphs(settled.environment), how)
    else:
        made = _of_server(server, load, pool.seed, report, how)
    from ..replay import report_text

    if not report.wall_time:
        made = evolve(made, wall_time_ms=None)  # all else has the same bytes every time
    if report.json is not None:
        report.json.write_bytes(made.to_json())
    if report.html is not None:
        write_page(report.html, {"live" if server.live else pool.router: made})
    echo(report_text(made, table_width()), nl=False)
    return INTERRUPTED_EXIT if made.is_interrupted else 0


def _of_graph(
    config: GraphConfig,
    load: LoadOptions,
    faults: RunOptions,
    report: ReportOptions,
    real_time: bool,
    environment: Mapping[str, str],
    how: dict[str, Any],
) -> Report:
    """Return the report of the load through the graph, with the settings that the same run of a sweep has."""
    from ..replay import SweepRun

    script, trace = script_of(faults.fault, config), load_of(load, config.seed or 0)
    settings = SweepRun(config.router, {}, config, load.speed_up, load.concurrency).settings(
        trace,
        trace=trace_name(load.trace),
        faults=list(faults.fault),
        limits=how["limits"],
        gpus=(faults.gpus_per_worker, faults.gpus_per_prefill_worker),
        environment=environment,
    )
    return replayed(
        config,
        trace,
        real_time,
        faults=script,
        per_request=report.per_request,
        settings=settings,
        environment=environment,
        gpus_per_worker=faults.gpus_per_worker,
        gpus_per_prefill_worker=faults.gpus_per_prefill_worker,
        **how,
    )


def _of_server(server: LiveOptions, load: LoadOptions, seed: int, report: ReportOptions, how: dict[str, Any]) -> Report:
    """Return the report of the load sent to the server."""
    trace = load_of(load, seed)
    lines = report.json if report.per_request else None
    return replayed_live(server, trace, lines, load_settings(load, trace, seed), **how)


@command(replay)
def compare(options: CompareOptions) -> None:
    """Show the figures of two or more reports side by side, and by how much each differs from the first."""
    from ..replay import comparison_text

    check_page(options.html, "html")
    check_page(options.pareto, "pareto")
    named = named_reports(options.reports)
    echo(comparison_text(list(named.items())), nl=False)
    if options.html is not None:
        write_page(options.html, named)
    if options.pareto is not None:
        write_pareto(options.pareto, named)


command(replay, help_epilogue=SWEEP_EXAMPLE)(sweep)
