"""The load of a replay or a sweep, and the files that reports are read from and written to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import InvalidArgument

if TYPE_CHECKING:
    from ..replay import Report, SyntheticLoad, Trace
    from .replay_options import LoadOptions

INTERRUPTED_EXIT = 130
"""Exit code of a program that was interrupted, as shells give it."""


def load_of(options: LoadOptions, seed: int) -> Trace:
    """Return the requests of the trace files, or synthetic ones. Raise InvalidArgument for options that do not fit."""
    trace = trace_of(options)
    return synthetic_of(options, seed).make() if trace is None else trace


def trace_of(options: LoadOptions) -> Trace | None:
    """Return the first requests of the trace files, None if none is given.

    Raise InvalidArgument for a file that is not a trace, and for options of the other kind of load.
    """
    if not options.trace:
        for name, is_given in (("format", options.format != "mooncake"), ("skip_bad", options.skip_bad)):
            if is_given:
                raise InvalidArgument("is for a TRACE, and there is none", field=name)
        return None
    if options.synthetic:
        raise InvalidArgument("is for made up load, and there is a trace", field=next(iter(options.synthetic)))
    from ..replay import first_requests, read_trace

    shared, size = options.prefixes, options.trace_block_size
    trace = read_trace(list(options.trace), options.format, trace_block_size=size, skip_bad=options.skip_bad, **shared)
    return trace if options.requests is None else first_requests(trace, options.requests)


def synthetic_of(options: LoadOptions, seed: int, **varied: Any) -> SyntheticLoad:
    """Return the synthetic load of this shape. Raise InvalidArgument for load that cannot be, or lacks its size."""
    from ..replay import SyntheticLoad

    size = {"request_count": options.requests, "trace_block_size": options.trace_block_size}
    shape = {name: value for name, value in size.items() if value is not None}
    shape |= options.synthetic | options.prefixes | varied
    for name, field in (("input_tokens",) * 2, ("output_tokens",) * 2, ("request_count", "requests")):
        if name not in shape:
            raise InvalidArgument("is needed to make up load; or give a TRACE", field=field)
    return SyntheticLoad(seed=seed, **shape)


def check_files(**files: Path | None) -> None:
    """Check the files to write, by option, before the work and not after it.

    Raise InvalidArgument for one that cannot be written, ModuleNotFoundError for a page if the extra for it is missing.
    """
    for field, path in files.items():
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            what = "is a folder" if path.is_dir() else "is in no folder that is there"
            raise InvalidArgument(f"{path} {what}", field=field)
        if path is not None and field != "json":
            importlib.import_module("serving.replay.page")


def named_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Return the reports of the files, named after them; by the whole path if two files have one name.

    Raise InvalidArgument for fewer than two, or one given twice.
    """
    stems = [path.stem for path in paths]
    named = {path.stem if stems.count(path.stem) == 1 else str(path): _read_report(path) for path in paths}
    if len(named) < max(2, len(paths)):
        what = "needs two reports at least" if len(paths) < 2 else "a report is given twice"
        raise InvalidArgument(what, field="A.json B.json")
    return named


def _read_report(path: Path) -> Report:
    from ..replay import Report

    try:
        return Report.from_json(path.read_bytes())
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is no report: {error}", cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", cause=error) from error
