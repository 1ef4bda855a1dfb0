"""What the commands of `penstock replay` do: read the load, replay it, write reports and pages."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pipeline import InvalidArgument

if TYPE_CHECKING:
    from .deployment import GraphConfig
    from .replay import Fault, Limits, Report, RollingRestart, SyntheticLoad, Trace

INTERRUPTED_EXIT = 130
"""As of a program that a shell's user interrupts."""


def check_place(path: Path | None, field: str) -> None:
    """Raises InvalidArgument where the report could not be written, before all the work is done."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in no folder that is there"
        raise InvalidArgument(f"{path} {what}", field=field)


def check_page(path: Path | None, field: str) -> None:
    """Raise InvalidArgument as `check_place` does, and ModuleNotFoundError if the extra that draws pages is missing."""
    check_place(path, field)
    if path is not None:
        importlib.import_module("serving.replay.page")


def write_page(path: Path, reports: dict[str, Report]) -> None:
    from .replay.page import report_page

    path.write_text(report_page(reports), encoding="utf-8")


def write_pareto(path: Path, reports: dict[str, Report]) -> None:
    from .replay.page import pareto_page

    path.write_text(pareto_page(reports), encoding="utf-8")


def script_of(faults: list[str], config: GraphConfig) -> list[Fault | RollingRestart]:
    """The faults as written, once they are known to fit the workers."""
    from .replay import parse_faults, plan_faults

    script = parse_faults(faults)
    plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)
    return script


def made_up_load(given: dict[str, Any], requests: int | None, seed: int, block_size: int | None) -> Trace:
    return load_to_make(given, requests, seed, block_size).make()


def load_to_make(given: dict[str, Any], requests: int | None, seed: int, block_size: int | None) -> SyntheticLoad:
    """Raises InvalidArgument for load that cannot be, and where something is missing."""
    from .replay import SyntheticLoad

    for name, value in (("input_tokens", given["input_tokens"]), ("output_tokens", given["output_tokens"])):
        if value is None:
            raise InvalidArgument("is needed to make up load; or give a TRACE", field=name)
    if requests is None:
        raise InvalidArgument("is needed to make up load; or give a TRACE", field="requests")
    said = {name: value for name, value in (given | {"trace_block_size": block_size}).items() if value is not None}
    return SyntheticLoad(request_count=requests, seed=seed, **said)


def check_no_trace(format: str, skip_bad: bool) -> None:
    """Raises InvalidArgument for what says how a trace is read, where there is none."""
    for name, is_given in (("format", format != "mooncake"), ("skip_bad", skip_bad)):
        if is_given:
            raise InvalidArgument("is for a TRACE, and there is none", field=name)


def read_load(
    paths: list[Path],
    format: str,
    block_size: int | None,
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
    trace = read_trace(paths, format, trace_block_size=block_size, skip_bad=skip_bad, **said)
    return trace if requests is None else first_requests(trace, requests)


def limits_of(ttft_ms: float | None, itl_ms: float | None, e2e_ms: float | None) -> Limits:
    from .replay import Limits

    return Limits(ttft_ms=ttft_ms, itl_ms=itl_ms, e2e_ms=e2e_ms)


def settings_of(
    config: GraphConfig,
    paths: list[Path] | None,
    load: Trace,
    faults: list[str],
    speed_up: float,
    concurrency: int | None,
    limits: Limits,
    gpus: tuple[int, int | None],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """What the report says of itself; the same as that of the same run of a sweep."""
    from .replay import SweepRun

    run = SweepRun(config.router, {}, config, speed_up, concurrency)
    return run.settings(load, trace=trace_name(paths), faults=faults, limits=limits, gpus=gpus, environment=environment)


def trace_name(paths: list[Path] | None) -> str | None:
    """What a report calls the files of a trace; None for load that was made up."""
    return ", ".join(path.name for path in paths) if paths else None


def load_settings(
    paths: list[Path] | None, load: Trace, seed: int | None, speed_up: float, concurrency: int | None
) -> dict[str, Any]:
    """The part that says what load it was, of a replay to a server as of any other."""
    from .replay import LoadFacts

    return {
        "trace": trace_name(paths),
        "format": load.format.value,
        "seed": seed,
        "speed_up": speed_up,
        "concurrency": concurrency,
        "load_digest": LoadFacts.of(load).digest,
    }


def replayed(config: GraphConfig, trace: Trace, real_time: bool, **how: Any) -> Report:
    """The report, with a bar while it is made and with the time that took. In real time an interrupt ends the load, and
    it is of what was done."""
    import anyio

    from pipeline.testing import run_in_virtual_time

    from .replay import run_config
    from .replay_progress import progress

    began_s = perf_counter()
    with progress(trace.requests, sys.stderr) as heard:
        main = partial(run_config, config, trace, heard=heard, **how)
        report = (
            anyio.run(partial(main, until=told_to_end)) if real_time else run_in_virtual_time(main, backend="asyncio")
        )
    return evolve(report, wall_time_ms=round(1000 * (perf_counter() - began_s), 3))


async def told_to_end() -> None:
    """Returns when the program is told to end; the next time it ends as any does."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        await anext(aiter(signals))


def named_reports(paths: list[Path]) -> dict[str, Report]:
    """The reports of the files by their short names. Raises InvalidArgument for less than two, or one given twice."""
    named = {short_name(path, paths): read_report(path) for path in paths}
    if len(named) < max(2, len(paths)):
        what = "needs two reports at least" if len(paths) < 2 else "a report is given twice"
        raise InvalidArgument(what, field="A.json B.json")
    return named


def short_name(path: Path, paths: list[Path]) -> str:
    """Its name without folder and suffix, unless another one is called the same."""
    return path.stem if [other.stem for other in paths].count(path.stem) == 1 else str(path)


def read_report(path: Path) -> Report:
    """Raises InvalidArgument for a file that cannot be read or is no report, named by its path."""
    from .replay import Report

    try:
        return Report.from_json(path.read_bytes())
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is no report: {error}", cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", cause=error) from error
