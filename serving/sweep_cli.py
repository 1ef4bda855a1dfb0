"""`penstock replay sweep`: routers, fleets and settings in all combinations, on all cores.

    penstock replay sweep TRACE --router round-robin --router kv --workers 4 --workers 8 \\
        --vary overlap_score_credit=0.5,1,2 --reports reports --html sweep.html
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline import PenstockError

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
    fail,
    named,
    routing_of,
    says_its_options,
)
from .replay_options import (
    ArrivalInterval,
    BlockSize,
    Concurrency,
    Faults,
    Format,
    Gpus,
    InputTokens,
    LimitE2e,
    LimitItl,
    LimitTtft,
    OutputTokens,
    PrefillGpus,
    PrefixGroups,
    PrefixRatio,
    ReplaySeed,
    RequestRate,
    Requests,
    SkipBad,
    SpeedUp,
    TraceFiles,
    TurnDelay,
    Turns,
)
from .replay_work import limits_of
from .sweep_work import SweepFiles, axes_of, load_of, run_sweep
from .terminal import log_to_stderr

SWEEP_EXAMPLE = (
    "Example: penstock replay sweep TRACE --router kv --workers 4 --workers 8 --vary router_temperature=0,0.5"
)

Routers = Annotated[
    list[Router],
    typer.Option(
        "--router",
        metavar=f"[{'|'.join(Router)}]",
        help="How a worker is chosen; repeatable. [default: round-robin]",
    ),
]
WorkerCounts = Annotated[
    list[int], typer.Option("--workers", metavar="N", help="Number of engine instances; repeatable. [default: 1]")
]
Vary = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=VALUE,VALUE",
        help="Of a setting of the router kv, an argument of the engine, or an option such as speed-up; repeatable.",
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Runs at a time. [default: one for each core]")]
ReportsFolderOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Each report goes there as it ends; those there of the same settings stand."),
]
SweepPerRequest = Annotated[bool, typer.Option("--per-request", help="Every request is in the reports of --reports.")]
SweepJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the runs there, as a JSON list.")]
SweepHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page there: the runs that no other beats.")
]


@says_its_options
def sweep(
    trace: TraceFiles = None,
    format: Format = "mooncake",
    trace_block_size: BlockSize = None,
    skip_bad: SkipBad = False,
    requests: Requests = None,
    router: Routers = [],  # noqa: B006  (typer reads it, nobody changes it)
    workers: WorkerCounts = [],  # noqa: B006
    vary: Vary = [],  # noqa: B006
    speed_up: SpeedUp = 1.0,
    concurrency: Concurrency = None,
    prefill_workers: PrefillWorkers = 0,
    enforce_disagg: EnforceDisagg = False,
    engine: Engine = "mocker",
    engine_arg: EngineArg = [],  # noqa: B006
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
    jobs: Jobs = None,
    reports: ReportsFolderOption = None,
    json: SweepJson = None,
    html: SweepHtml = None,
    per_request: SweepPerRequest = False,
    gpus_per_worker: Gpus = 1,
    gpus_per_prefill_worker: PrefillGpus = None,
    log_level: LogLevelOption = LogLevel.ERROR,
) -> None:
    """Replay a trace in every combination of routers, worker counts and what else varies; show which no other beats."""
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
        "engine": engine,
    }
    made_up = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "turns": turns,
        "arrival_interval_ms": arrival_interval_ms,
        "request_rate": request_rate,
        "inter_turn_delay_ms": inter_turn_delay_ms,
    }
    prefixes = {"shared_prefix_ratio": shared_prefix_ratio, "num_prefix_groups": num_prefix_groups}
    try:
        files = SweepFiles(json, html, reports)
        files.check(per_request=per_request)
        axes = axes_of([one.value for one in router], workers, vary)
        main = Router.KV if Router.KV.value in axes["router"] else Router.ROUND_ROBIN
        base = routing_of(main, router_config, kv_events, seed, thresholds, others)
        base |= {"router": axes["router"][0], "workers": 1, "engine_args": named(engine_arg)}
        load = load_of(trace, format, trace_block_size, skip_bad, requests, seed, made_up, prefixes, axes)
        how: dict[str, Any] = {"speed_up": speed_up, "concurrency": concurrency}
        given = {
            "environment": of_graphs(os.environ),
            "faults": fault,
            "limits": limits_of(sla_ttft_ms, sla_itl_ms, sla_e2e_ms),
            "per_request": per_request,
            "gpus_per_worker": gpus_per_worker,
            "gpus_per_prefill_worker": gpus_per_prefill_worker,
        }
        code = run_sweep(base, axes, load, how, files, jobs=jobs, **given)
    except (PenstockError, OSError) as error:
        fail(error)
    if code:
        raise typer.Exit(code)
