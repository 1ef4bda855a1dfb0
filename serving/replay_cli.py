"""`penstock replay`: a trace through a graph in virtual time, and reports side by side.

    penstock replay TRACE --router kv --workers 8 --json kv.json
    penstock replay compare round_robin.json kv.json

The first is the command `run` of the group, whose name need not be said.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline import InvalidArgument, PenstockError

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

if TYPE_CHECKING:
    from .config import GraphConfig
    from .replay import Fault, Report, RollingRestart, Trace


class _Replay(TyperGroup):
    """Whatever does not begin with the name of a command is for `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


replay = typer.Typer(
    name="replay",
    cls=_Replay,
    help="Replay a trace through a graph in virtual time, or compare the reports of replays.",
    rich_markup_mode=None,
)

TraceFile = Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Trace file; without one, load is made up.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        "--trace-format",
        help="mooncake, mooncake-delta, agentic_mooncake or applied_compute_agentic.",
    ),
]
BlockSize = Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that a hash id of the trace stands for.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that are no requests.")]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests", "--request-count", metavar="N", help="The first N of the trace; of made up load, N sessions."
    ),
]
SpeedUp = Annotated[
    float, typer.Option("--speed-up", "--arrival-speedup-ratio", metavar="X", help="Arrivals X times as fast.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", "--replay-concurrency", metavar="N", help="N sessions at a time, whenever they arrived."
    ),
]
InputTokens = Annotated[int | None, typer.Option(metavar="N", help="Made up load: tokens of a prompt.")]
OutputTokens = Annotated[int | None, typer.Option(metavar="N", help="Made up load: tokens of an answer.")]
Turns = Annotated[int | None, typer.Option(metavar="N", help="Made up load: requests of a session. [default: 1]")]
ArrivalInterval = Annotated[float | None, typer.Option(metavar="MS", help="Made up load: between two arrivals.")]
RequestRate = Annotated[
    float | None, typer.Option(metavar="X", help="Made up load: arrivals a second on average, at random.")
]
TurnDelay = Annotated[float | None, typer.Option(metavar="MS", help="Made up load: between two turns. [default: 0]")]
PrefixRatio = Annotated[
    float | None, typer.Option(metavar="FRACTION", help="Part of a first prompt that its group shares. [default: 0]")
]
PrefixGroups = Annotated[int | None, typer.Option(metavar="N", help="Groups that share prefixes. [default: 0]")]
Faults = Annotated[
    list[str],
    typer.Option(
        "--fault", metavar="TEXT", help="'worker 3 dies at 120 s, returns at 300 s', or @FILE of such; repeatable."
    ),
]
LimitTtft = Annotated[float | None, typer.Option(metavar="MS", help="A good request has its first token by then.")]
LimitItl = Annotated[float | None, typer.Option(metavar="MS", help="A good request takes no longer for a token.")]
LimitE2e = Annotated[float | None, typer.Option(metavar="MS", help="A good request has ended by then.")]
ReplaySeed = Annotated[int, typer.Option(help="The same seed gives the same report.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report there, as JSON.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots there, whole in itself.")
]
ParetoFile = Annotated[
    Path | None, typer.Option("--pareto", metavar="FILE", help="Write a page there with the runs that no other beats.")
]
PerRequest = Annotated[bool, typer.Option("--per-request", help="Every request is in the JSON.")]
RealTime = Annotated[bool, typer.Option("--real-time", help="Let time pass as it does, not jump to what is next.")]


@replay.command(epilog="Reports side by side: penstock replay compare A.json B.json")
@says_its_options
def run(
    trace: TraceFile = None,
    format: Format = "mooncake",
    trace_block_size: BlockSize = 512,
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
    real_time: RealTime = False,
    log_level: LogLevelOption = LogLevel.ERROR,
) -> None:
    """Replay a trace, or load made up from lengths, through the graph that `serve` would run; report what it cost."""
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
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
    config = config_of(None, None, engine, engine_arg, workers, routing)
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
        _check_place(json, "json")
        _check_place(html, "html")
        script = _script(fault, config)
        if trace is None:
            load = _made_up(made_up | prefixes, requests, seed, trace_block_size)
        else:
            load = _read(trace, format, trace_block_size, skip_bad, requests, made_up, prefixes)
        report = _replayed(
            config,
            load,
            real_time,
            faults=script,
            speed_up=speed_up,
            sessions_at_a_time=concurrency,
            limits=_limits(sla_ttft_ms, sla_itl_ms, sla_e2e_ms),
            per_request=per_request,
            settings=_settings(config, trace, load, router.value, fault, speed_up, concurrency),
        )
        if json is not None:
            json.write_bytes(report.to_json())
        if html is not None:
            _write_page(html, {router.value: report})
    except (PenstockError, OSError) as error:
        fail(of_engine(error, config))
    typer.echo(report.table(), nl=False)


@replay.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="A.json B.json...", help="Reports that --json wrote.")],
    html: HtmlFile = None,
    pareto: ParetoFile = None,
) -> None:
    """Show the figures of two or more reports side by side, and by how much each differs from the first."""
    from .replay import side_by_side

    try:
        _check_place(html, "html")
        _check_place(pareto, "pareto")
        named = [(_short(path, reports), _report(path)) for path in reports]
        typer.echo(side_by_side(named), nl=False)
        if html is not None:
            _write_page(html, dict(named))
        if pareto is not None:
            _write_pareto(pareto, dict(named))
    except (PenstockError, OSError) as error:
        fail(error)


def _check_place(path: Path | None, field: str) -> None:
    """Raises InvalidArgument where the report could not be written, before all the work is done."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in no folder that is there"
        raise InvalidArgument(f"{path} {what}", field=field)


def _write_page(path: Path, reports: dict[str, Report]) -> None:
    from .replay import report_page

    path.write_text(report_page(reports), encoding="utf-8")


def _write_pareto(path: Path, reports: dict[str, Report]) -> None:
    from .replay import pareto_page

    path.write_text(pareto_page(reports), encoding="utf-8")


def _script(faults: list[str], config: GraphConfig) -> list[Fault | RollingRestart]:
    """The faults as written, once they are known to fit the workers."""
    from .replay import parse_faults, plan_faults

    script = parse_faults(faults)
    plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)
    return script


def _made_up(given: dict[str, Any], requests: int | None, seed: int, block_size: int) -> Trace:
    from .replay import SyntheticLoad

    for name, value in (("input_tokens", given["input_tokens"]), ("output_tokens", given["output_tokens"])):
        if value is None:
            raise InvalidArgument("is needed to make up load; or give a TRACE", field=name)
    if requests is None:
        raise InvalidArgument("is needed to make up load; or give a TRACE", field="requests")
    said = {name: value for name, value in given.items() if value is not None}
    return SyntheticLoad(request_count=requests, seed=seed, trace_block_size=block_size, **said).make()


def _read(
    path: Path,
    format: str,
    block_size: int,
    skip_bad: bool,
    requests: int | None,
    made_up: dict[str, Any],
    prefixes: dict[str, Any],
) -> Trace:
    from .replay import first_requests, read_trace

    for name, value in made_up.items():
        if value is not None:
            raise InvalidArgument("is for made up load, and there is a trace", field=name)
    if requests is not None and requests < 1:
        raise InvalidArgument(f"must be at least 1, got {requests}", field="requests")
    said = {name: value for name, value in prefixes.items() if value is not None}
    trace = read_trace(path, format, trace_block_size=block_size, skip_bad=skip_bad, **said)
    return trace if requests is None else first_requests(trace, requests)


def _limits(ttft_ms: float | None, itl_ms: float | None, e2e_ms: float | None) -> Any:
    from .replay import Limits

    return Limits(ttft_ms=ttft_ms, itl_ms=itl_ms, e2e_ms=e2e_ms)


def _settings(
    config: GraphConfig,
    path: Path | None,
    load: Trace,
    router: str,
    faults: list[str],
    speed_up: float,
    concurrency: int | None,
) -> dict[str, Any]:
    """What the report says of itself. Nothing of the machine or the day: the same replay gives the same bytes."""
    return {
        "trace": None if path is None else path.name,
        "format": load.format.value,
        "router": router,
        "workers": config.workers,
        "prefill_workers": config.prefill_workers,
        "engine": config.engine,
        "engine_args": dict(config.engine_args),
        "seed": config.seed,
        "speed_up": speed_up,
        "concurrency": concurrency,
        "faults": faults,
    }


def _replayed(config: GraphConfig, trace: Trace, real_time: bool, **how: Any) -> Report:
    """The report, with a bar while it is made."""
    import anyio

    from pipeline.testing import run_in_virtual_time

    from .replay import run_config
    from .replay_progress import progress

    with progress(trace.requests, sys.stderr) as heard:
        main = partial(run_config, config, trace, heard=heard, **how)
        return anyio.run(main) if real_time else run_in_virtual_time(main, backend="asyncio")


def _short(path: Path, paths: list[Path]) -> str:
    """Its name without folder and suffix, unless another one is called the same."""
    return path.stem if [other.stem for other in paths].count(path.stem) == 1 else str(path)


def _report(path: Path) -> Report:
    """Raises InvalidArgument for a file that cannot be read or is no report, named by its path."""
    from .replay import Report

    try:
        return Report.from_json(path.read_bytes())
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is no report: {error}", cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", cause=error) from error


called(
    trace="TRACE",
    trace_format="--format",
    request_count="--requests",
    replay_concurrency="--concurrency",
    arrival_speedup_ratio="--speed-up",
)
