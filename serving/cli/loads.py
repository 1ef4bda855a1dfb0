"""Steps of the commands of `penstock replay`: read the load, replay it, read and write reports and pages."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pipeline import InvalidArgument

if TYPE_CHECKING:
    from ..deployment import GraphConfig
    from ..replay import Fault, Limits, Report, RollingRestart, SyntheticLoad, Trace
    from .replay_options import GoodputOptions, LoadOptions

INTERRUPTED_EXIT = 130
"""Exit code of a program that was interrupted, as shells give it."""


def check_place(path: Path | None, field: str) -> None:
    """Raise InvalidArgument if no report can be written there: known before the work, not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in no folder that is there"
        raise InvalidArgument(f"{path} {what}", field=field)


def check_page(path: Path | None, field: str) -> None:
    """Raise InvalidArgument as `check_place` does, and ModuleNotFoundError if the extra that draws pages is missing."""
    check_place(path, field)
    if path is not None:
        importlib.import_module("serving.replay.page")


def write_page(path: Path, reports: dict[str, Report]) -> None:
    from ..replay.page import report_page

    path.write_text(report_page(reports), encoding="utf-8")


def write_pareto(path: Path, reports: dict[str, Report]) -> None:
    from ..replay.page import pareto_page

    path.write_text(pareto_page(reports), encoding="utf-8")


def script_of(faults: Sequence[str], config: GraphConfig) -> list[Fault | RollingRestart]:
    """Return the faults of the options. Raise InvalidArgument for one that does not fit the workers."""
    from ..replay import parse_faults, plan_faults

    script = parse_faults(list(faults))
    plan_faults(script, workers=config.workers, prefill_workers=config.prefill_workers)
    return script


def load_of(options: LoadOptions, seed: int) -> Trace:
    """Return the requests of the trace files, or synthetic ones. Raise InvalidArgument for options that do not fit."""
    if options.trace:
        return read_load(options)
    check_no_trace(options)
    return synthetic_load(options.synthetic | options.prefixes, options, seed).make()


def synthetic_load(given: Mapping[str, Any], options: LoadOptions, seed: int) -> SyntheticLoad:
    """Return the synthetic load of this shape. Raise InvalidArgument for load that cannot be, or lacks its size."""
    from ..replay import SyntheticLoad

    shape = {"request_count": options.requests, "trace_block_size": options.trace_block_size, **given}
    for name, field in (("input_tokens",) * 2, ("output_tokens",) * 2, ("request_count", "requests")):
        if shape[name] is None:
            raise InvalidArgument("is needed to make up load; or give a TRACE", field=field)
    return SyntheticLoad(seed=seed, **{name: value for name, value in shape.items() if value is not None})


def check_no_trace(options: LoadOptions) -> None:
    """Raise InvalidArgument for options that shape how a trace is read."""
    for name, is_given in (("format", options.format != "mooncake"), ("skip_bad", options.skip_bad)):
        if is_given:
            raise InvalidArgument("is for a TRACE, and there is none", field=name)


def read_load(options: LoadOptions) -> Trace:
    """Return the first requests of the trace files. Raise InvalidArgument for options that shape synthetic load."""
    from ..replay import first_requests, read_trace

    for name, value in options.synthetic.items():
        if value is not None:
            raise InvalidArgument("is for made up load, and there is a trace", field=name)
    shared = {name: value for name, value in options.prefixes.items() if value is not None}
    paths = list(options.trace)
    trace = read_trace(
        paths, options.format, trace_block_size=options.trace_block_size, skip_bad=options.skip_bad, **shared
    )
    return trace if options.requests is None else first_requests(trace, options.requests)


def limits_of(options: GoodputOptions) -> Limits:
    """Return the limits that good requests keep."""
    from ..replay import Limits

    return Limits(ttft_ms=options.sla_ttft_ms, itl_ms=options.sla_itl_ms, e2e_ms=options.sla_e2e_ms)


def trace_name(paths: Sequence[Path]) -> str | None:
    """What a report calls the files of a trace; None for load that was made up."""
    return ", ".join(path.name for path in paths) if paths else None


def load_settings(options: LoadOptions, load: Trace, seed: int | None) -> dict[str, Any]:
    """Return the settings of the load for the report of a replay to a server; they are those of any other replay."""
    from ..replay import LoadFacts

    return {
        "trace": trace_name(options.trace),
        "format": load.format.value,
        "seed": seed,
        "speed_up": options.speed_up,
        "concurrency": options.concurrency,
        "load_digest": LoadFacts.of(load).digest,
    }


def replayed(config: GraphConfig, trace: Trace, real_time: bool, **how: Any) -> Report:
    """Return the report with the time that it took, and show a progress bar meanwhile.

    In real time an interrupt ends the load; the report covers the requests until then.
    """
    import anyio

    from pipeline.virtual_time import run_in_virtual_time

    from ..replay import run_config
    from .progress import progress

    began_s = perf_counter()
    with progress(trace.requests, sys.stderr) as on_progress:
        main = partial(run_config, config, trace, on_progress=on_progress, **how)
        report = (
            anyio.run(partial(main, stop_when=interrupted))
            if real_time
            else run_in_virtual_time(main, backend="asyncio")
        )
    return evolve(report, wall_time_ms=round(1000 * (perf_counter() - began_s), 3))


async def interrupted() -> None:
    """Wait for an interrupt of the program. A second one has its usual effect."""
    import anyio

    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        await anext(aiter(signals))


def named_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Return the reports of the files by short names. Raise InvalidArgument for fewer than two, or one given twice."""
    named = {short_name(path, paths): read_report(path) for path in paths}
    if len(named) < max(2, len(paths)):
        what = "needs two reports at least" if len(paths) < 2 else "a report is given twice"
        raise InvalidArgument(what, field="A.json B.json")
    return named


def short_name(path: Path, paths: Sequence[Path]) -> str:
    """Return the name without folder and suffix, or the whole path if another file has that name too."""
    return path.stem if [other.stem for other in paths].count(path.stem) == 1 else str(path)


def read_report(path: Path) -> Report:
    """Return the report of a file. Raise InvalidArgument with the path if it cannot be read or is not a report."""
    from ..replay import Report

    try:
        return Report.from_json(path.read_bytes())
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is no report: {error}", cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", cause=error) from error
