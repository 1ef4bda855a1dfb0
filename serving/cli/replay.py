"""`penstock replay`: a trace through a graph in virtual time, or to a server, reports side by side, and sweeps.

    penstock replay TRACE --router kv --workers 8 --json kv.json
    penstock replay TRACE --live http://127.0.0.1:8000
    penstock replay compare round_robin.json kv.json
    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8

The first is the command `run`, whose name may be left out.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import evolve
from cyclopts import App

from pipeline import InvalidArgument
from pipeline.settings import settings_of

from ..settings import (
    CompareOptions,
    GoodputOptions,
    LiveOptions,
    LoadOptions,
    QuietLogOption,
    ReplayGraph,
    ReportOptions,
    RunOptions,
    Settled,
    check_files,
    parts_of,
)
from ..terminal import echo, table_width
from .commands import INTERRUPTED_EXIT, command
from .sweep import SWEEP_EXAMPLE, sweep

if TYPE_CHECKING:
    from ..deployment import GraphConfig
    from ..replay import Report

REPLAY_HINT = "Reports side by side: penstock replay compare A.json B.json; many runs: penstock replay sweep"

_OF_THE_GRAPH = {name for record in (*parts_of(ReplayGraph), RunOptions) for name in settings_of(record)} - {"seed"} | {
    "real_time",
    "wall_time",
}
"""Settings of a graph, or of its time, that a server decides for itself."""
_OF_A_SERVER = {"model", "live_ids", "live_timeout"}
"""Settings that need a server."""

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
    _check_given(settled.options, server.live, report)
    check_files(report)
    how: dict[str, Any] = {"speed_up": load.speed_up, "limits": goodput.limits()}
    if server.live is not None:
        made = _sent(server, server.live, load, graph.pool.seed, report, **how)
    else:
        from ..deployment import engine_args_named
        from ..variables import of_graphs

        config = graph.config(settled.environment)
        how["environment"] = of_graphs(settled.environment)
        with engine_args_named(config.engine_args):
            made = _replayed(config, load, workers, report, server.real_time, **how)
    from ..replay import report_text

    if report.json is not None:
        report.json.write_bytes(made.to_json())
    if report.html is not None:
        from ..replay.page import report_page

        report.html.write_text(report_page({"live" if server.live else graph.pool.router: made}), encoding="utf-8")
    echo(report_text(made, table_width()), nl=False)
    return INTERRUPTED_EXIT if made.is_interrupted else 0


def _check_given(given: set[str], live: str | None, report: ReportOptions) -> None:
    """Raise InvalidArgument for an option that has no meaning with a server, without one, or without a file."""
    if wrong := sorted(given & (_OF_A_SERVER if live is None else _OF_THE_GRAPH)):
        what = "is for --live only" if live is None else "cannot go with --live: that server is there, as it is"
        raise InvalidArgument(what, field=wrong[0])
    if report.per_request and report.json is None:
        which = "FILE, which has them" if live is None else "FILE, beside which it writes"
        raise InvalidArgument(f"{'' if live is None else 'with --live '}needs --json {which}", field="per_request")


def _replayed(
    config: GraphConfig, load: LoadOptions, workers: RunOptions, report: ReportOptions, is_real_time: bool, **how: Any
) -> Report:
    """Return the report of the load through the graph, with the settings that the same run of a sweep has.

    A progress bar is shown meanwhile. In real time an interrupt ends the load; the report covers the requests until
    then. Only a report with `wall_time` differs from run to run.
    """
    import anyio

    from pipeline.virtual_time import run_in_virtual_time

    from ..garbage import settle
    from ..replay import parse_faults, plan_faults, replay_settings, run_config
    from .progress import progress

    faults = list(workers.fault)
    script = parse_faults(faults)
    plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)  # before a long trace is read
    trace = load.made(config.seed or 0)
    how |= {name: getattr(workers, name) for name in ("gpus_per_worker", "gpus_per_prefill_worker")}
    settings = replay_settings(config, trace, trace=load.trace_name, faults=faults, concurrency=load.concurrency, **how)
    how |= {"faults": script, "sessions_at_a_time": load.concurrency, "per_request": report.per_request}
    settle()
    began_s = perf_counter()
    with progress(trace.requests, sys.stderr) as on_progress:
        main = partial(run_config, config, trace, settings=settings, on_progress=on_progress, **how)
        if is_real_time:
            made = anyio.run(partial(main, stop_when=_interrupted))
        else:
            made = run_in_virtual_time(main, backend="asyncio")
    return evolve(made, wall_time_ms=round(1000 * (perf_counter() - began_s), 3)) if report.wall_time else made


def _sent(
    server: LiveOptions, url: str, load: LoadOptions, seed: int, report: ReportOptions, speed_up: float, limits: Any
) -> Report:
    """Return the report of the load sent to the server, with a progress bar meanwhile.

    With single requests each is written to a file beside that of the report when it ends, as a line. An interrupt ends
    the load; the report covers the requests until then. Raise as `replay_live`.
    """
    from ..live import replay_live
    from .progress import progress

    trace, vocabulary = load.made(seed), server.vocabulary
    settings: dict[str, Any] = {"trace": load.trace_name, "format": trace.format.value, "seed": seed}
    settings |= {"speed_up": speed_up, "concurrency": load.concurrency}
    lines = report.json.with_suffix(".requests.jsonl") if report.json is not None and report.per_request else None
    with progress(trace.requests, sys.stderr) as on_progress:
        return replay_live(
            url,
            trace,
            vocabulary,
            model=server.model,
            api_key=os.environ.get("OPENAI_API_KEY") or None,
            silence_s=server.live_timeout,
            settings=settings,
            requests_file=lines,
            speed_up=speed_up,
            sessions_at_a_time=load.concurrency,
            limits=limits,
            stop_when=_interrupted,
            on_progress=on_progress,
        )


async def _interrupted() -> None:
    """Wait for an interrupt of the program. A second one has its usual effect."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        await anext(aiter(signals))


@command(replay)
def compare(options: CompareOptions) -> None:
    """Show the figures of two or more reports side by side, and by how much each differs from the first."""
    from ..replay import comparison_text, read_reports

    check_files(options)
    named = read_reports(options.reports)
    echo(comparison_text(list(named.items())), nl=False)
    if options.html is not None:
        from ..replay.page import report_page

        options.html.write_text(report_page(named), encoding="utf-8")
    if options.pareto is not None:
        from ..replay.page import pareto_page

        options.pareto.write_text(pareto_page(named), encoding="utf-8")


command(replay, help_epilogue=SWEEP_EXAMPLE)(sweep)
