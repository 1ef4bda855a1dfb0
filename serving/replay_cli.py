"""`penstock replay`: a trace through a graph in virtual time, or to a server, reports side by side, and sweeps.

    penstock replay TRACE --router kv --workers 8 --json kv.json
    penstock replay TRACE --live http://127.0.0.1:8000
    penstock replay compare round_robin.json kv.json
    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8

The first is the command `run` of the group, whose name need not be said.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import evolve
from typer.core import TyperGroup

from pipeline import InvalidArgument, PenstockError

from .environment import of_graphs
from .options import (
    BusyBlocks,
    BusyTokens,
    BusyTokensFraction,
    EnforceDisagg,
    Engine,
    EngineArg,
    KvEvents,
    LogLevel,
    LogLevelOption,
    MigrationLimit,
    MigrationMaxSeqLen,
    PrefillWorkers,
    Router,
    RouterConfig,
    RouterOption,
    Workers,
    called,
    config_of,
    fail,
    of_engine,
    routing_of,
    says_its_options,
)
from .replay_live import Live, check_options, ids_of, replayed_live
from .replay_options import (
    ArrivalInterval,
    BlockSize,
    Concurrency,
    Faults,
    Format,
    Gpus,
    HtmlFile,
    InputTokens,
    JsonFile,
    LimitE2e,
    LimitItl,
    LimitTtft,
    LiveIds,
    LiveModel,
    LiveTimeout,
    LiveUrl,
    OutputTokens,
    ParetoFile,
    PerRequest,
    PrefillGpus,
    PrefixGroups,
    PrefixRatio,
    RealTime,
    ReplaySeed,
    RequestRate,
    Requests,
    SkipBad,
    SpeedUp,
    TraceFiles,
    TurnDelay,
    Turns,
    WallTime,
)
from .replay_work import (
    INTERRUPTED_EXIT,
    check_no_trace,
    check_page,
    check_place,
    limits_of,
    load_settings,
    made_up_load,
    named_reports,
    read_load,
    replayed,
    script_of,
    settings_of,
    write_page,
    write_pareto,
)
from .sweep_cli import SWEEP_EXAMPLE, sweep
from .terminal import echo, log_to_stderr, table_width


class _Replay(TyperGroup):
    """Whatever does not begin with the name of a command is for `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


replay = typer.Typer(
    name="replay",
    cls=_Replay,
    help="Replay a trace through a graph in virtual time or to a server, compare reports, or make many in one go.",
    rich_markup_mode=None,
)


@replay.command(epilog="Reports side by side: penstock replay compare A.json B.json; many runs: penstock replay sweep")
@says_its_options
def run(
    context: typer.Context,
    trace: TraceFiles = None,
    format: Format = "mooncake",
    trace_block_size: BlockSize = None,
    skip_bad: SkipBad = False,
    requests: Requests = None,
    speed_up: SpeedUp = 1.0,
    concurrency: Concurrency = None,
    router: RouterOption = Router.ROUND_ROBIN,
    workers: Workers = 1,
    prefill_workers: PrefillWorkers = 0,
    enforce_disagg: EnforceDisagg = False,
    engine: Engine = "mocker",
    engine_arg: EngineArg = [],  # noqa: B006  (typer reads it, nobody changes it)
    router_config: RouterConfig = None,
    kv_events: KvEvents = None,
    migration_limit: MigrationLimit = 3,
    migration_max_seq_len_tokens: MigrationMaxSeqLen = None,
    active_decode_blocks_threshold: BusyBlocks = None,
    active_prefill_tokens_threshold: BusyTokens = None,
    active_prefill_tokens_threshold_frac: BusyTokensFraction = None,
    fault: Faults = [],  # noqa: B006
    seed: ReplaySeed = 42,
    input_tokens: InputTokens = None,
    output_tokens: OutputTokens = None,
    turns: Turns = None,
    arrival_interval_ms: ArrivalInterval = None,
    request_rate: RequestRate = None,
    inter_turn_delay_ms: TurnDelay = None,
    shared_prefix_ratio: PrefixRatio = None,
    num_prefix_groups: PrefixGroups = None,
    sla_ttft_ms: LimitTtft = None,
    sla_itl_ms: LimitItl = None,
    sla_e2e_ms: LimitE2e = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    per_request: PerRequest = False,
    wall_time: WallTime = False,
    gpus_per_worker: Gpus = 1,
    gpus_per_prefill_worker: PrefillGpus = None,
    real_time: RealTime = False,
    live: LiveUrl = None,
    model: LiveModel = None,
    live_ids: LiveIds = "1000-31999",
    live_timeout: LiveTimeout = 600.0,
    log_level: LogLevelOption = LogLevel.ERROR,
) -> None:
    """Replay a trace, or made up load, through the graph that `serve` would run or to a server; report what it cost."""
    _check_given(context, live, per_request, json)
    log_to_stderr(log_level.upper())
    thresholds = (
        active_decode_blocks_threshold,
        active_prefill_tokens_threshold,
        active_prefill_tokens_threshold_frac,
    )
    others = {
        "prefill_workers": prefill_workers,
        "enforce_disagg": enforce_disagg,
        "migration_limit": migration_limit,
        "migration_max_seq_len_tokens": migration_max_seq_len_tokens,
    }
    routing = partial(routing_of, router, router_config, kv_events, seed, thresholds, others)
    config = config_of(None, None, engine, engine_arg, workers, routing) if live is None else None
    made_up = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "turns": turns,
        "arrival_interval_ms": arrival_interval_ms,
        "request_rate": request_rate,
        "inter_turn_delay_ms": inter_turn_delay_ms,
    }
    prefixes = {"shared_prefix_ratio": shared_prefix_ratio, "num_prefix_groups": num_prefix_groups}
    from .replay import report_text

    try:
        check_place(json, "json")
        check_page(html, "html")
        script = [] if config is None else script_of(fault, config)
        if not trace:
            check_no_trace(format, skip_bad)
            load = made_up_load(made_up | prefixes, requests, seed, trace_block_size)
        else:
            load = read_load(trace, format, trace_block_size, skip_bad, requests, made_up, prefixes)
        limits = limits_of(sla_ttft_ms, sla_itl_ms, sla_e2e_ms)
        how: dict[str, Any] = {"speed_up": speed_up, "sessions_at_a_time": concurrency, "limits": limits}
        if config is not None:
            how |= {"gpus_per_worker": gpus_per_worker, "gpus_per_prefill_worker": gpus_per_prefill_worker}
            gpus = (gpus_per_worker, gpus_per_prefill_worker)
            how["environment"] = environment = of_graphs(os.environ)
            settings = settings_of(config, trace, load, fault, speed_up, concurrency, limits, gpus, environment)
            report = replayed(config, load, real_time, faults=script, per_request=per_request, settings=settings, **how)
        else:
            asked = Live(live or "", model, ids_of(live_ids), live_timeout)
            settings = load_settings(trace, load, seed, speed_up, concurrency)
            report = replayed_live(asked, load, json if per_request else None, settings, **how)
        if not wall_time:
            report = evolve(report, wall_time_ms=None)  # all else is the same again
        if json is not None:
            json.write_bytes(report.to_json())
        if html is not None:
            write_page(html, {router.value if config is not None else "live": report})
    except (PenstockError, OSError) as error:
        fail(error if config is None else of_engine(error, config))
    echo(report_text(report, table_width()), nl=False)
    if report.is_interrupted:
        raise typer.Exit(INTERRUPTED_EXIT)


def _check_given(context: typer.Context, live: str | None, per_request: bool, json: Path | None) -> None:
    """Ends the program where options were given that do not go together."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    try:
        check_options(given, live, per_request=per_request, has_json=json is not None)
    except InvalidArgument as error:
        fail(error)


replay.command(epilog=SWEEP_EXAMPLE)(sweep)


@replay.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="A.json B.json...", help="Reports that --json wrote.")],
    html: HtmlFile = None,
    pareto: ParetoFile = None,
) -> None:
    """Show the figures of two or more reports side by side, and by how much each differs from the first."""
    from .replay import comparison_text

    try:
        check_page(html, "html")
        check_page(pareto, "pareto")
        named = named_reports(reports)
        echo(comparison_text(list(named.items())), nl=False)
        if html is not None:
            write_page(html, named)
        if pareto is not None:
            write_pareto(pareto, named)
    except (PenstockError, OSError) as error:
        fail(error)


called(
    trace="TRACE",
    trace_format="--format",
    request_count="--requests",
    replay_concurrency="--concurrency",
    arrival_speedup_ratio="--speed-up",
    vocabulary="--live-ids",
)
