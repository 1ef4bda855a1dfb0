"""What `penstock replay sweep` does: the values that vary, the runs, and what is written of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pipeline import InvalidArgument

from .replay_work import INTERRUPTED_EXIT, check_no_trace, check_page, check_place, load_to_make, read_load, trace_name
from .terminal import echo

if TYPE_CHECKING:
    from .replay import Sweep, SyntheticLoad, Trace

_CALLED = {"requests": "request_count"}
"""Options that are not called like what they set."""
_DEFAULTS: dict[str, Sequence[Any]] = {"router": ["round-robin"], "workers": [1]}


@frozen
class SweepFiles:
    """Where a sweep writes: the runs as JSON, the page, the folder of reports."""

    json: Path | None = None
    html: Path | None = None
    reports: Path | None = None

    def check(self, *, per_request: bool) -> None:
        """Raises InvalidArgument for a place where nothing can be written, and where each request has none."""
        if per_request and self.reports is None:
            raise InvalidArgument("needs --reports DIR, whose reports have them", field="per_request")
        check_place(self.json, "json")
        check_page(self.html, "html")
        if self.reports is not None and self.reports.exists() and not self.reports.is_dir():
            raise InvalidArgument(f"{self.reports} is no folder", field="reports")
        if self.reports is not None and not self.reports.absolute().parent.is_dir():
            raise InvalidArgument(f"{self.reports} is in no folder that is there", field="reports")

    def write(self, done: Sweep) -> None:
        if self.json is not None:
            from .replay import sweep_json

            self.json.write_bytes(sweep_json(done))
        if self.html is not None:
            from .replay.page import sweep_page

            self.html.write_text(sweep_page(done), encoding="utf-8")


@frozen
class SweepLoad:
    """What is replayed: a trace with the name of its file, or load that is made up for each run."""

    trace: Trace | None = None
    name: str | None = None
    made_up: SyntheticLoad | None = None


def axes_of(routers: Sequence[str], workers: Sequence[int], vary: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The values that vary, by name: routers first, then workers, then what else in the order it was given.

    Raises InvalidArgument for a text that is not NAME=VALUE,VALUE and for a name that is given twice.
    """
    axes: dict[str, Sequence[Any]] = {}
    given: dict[str, Sequence[Any]] = {"router": list(routers), "workers": list(workers)}
    for text in vary:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        name = _CALLED.get(name, name)
        if not (name and equals):
            raise InvalidArgument(f"expected NAME=VALUE,VALUE, got {text!r}", field="vary")
        if name in axes or given.get(name):
            raise InvalidArgument("is given twice", field=f"vary.{name}")
        axes[name] = [value.strip() for value in values.split(",")]
        if not all(axes[name]):
            raise InvalidArgument(f"a value is empty in {text!r}", field=f"vary.{name}")
    return {name: values or axes.get(name) or _DEFAULTS[name] for name, values in given.items()} | {
        name: values for name, values in axes.items() if name not in given
    }


def load_of(
    paths: list[Path] | None,
    format: str,
    block_size: int | None,
    skip_bad: bool,
    requests: int | None,
    seed: int,
    made_up: dict[str, Any],
    prefixes: dict[str, Any],
    axes: Mapping[str, Sequence[Any]],
) -> SweepLoad:
    """The trace, or the load to make up: what varies of that needs no option of its own. Raises InvalidArgument."""
    if paths:
        trace = read_load(paths, format, block_size, skip_bad, requests, made_up, prefixes)
        return SweepLoad(trace, trace_name(paths))
    check_no_trace(format, skip_bad)
    from .deployment import converted
    from .replay import SyntheticLoad

    texts = {name: values[0] for name, values in axes.items() if name in (*made_up, *prefixes, "request_count")}
    given = made_up | prefixes | _placed(converted, SyntheticLoad, texts)
    count = given.pop("request_count", requests)
    return SweepLoad(made_up=load_to_make(given, count, seed, block_size))


def _placed(converted: Any, make: Any, texts: Mapping[str, str]) -> dict[str, Any]:
    try:
        return dict(converted(make, texts))
    except InvalidArgument as error:
        raise InvalidArgument(str(error), field=f"vary.{error.field}") from error


def run_sweep(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    load: SweepLoad,
    how: Mapping[str, Any],
    files: SweepFiles,
    *,
    jobs: int | None,
    **given: Any,
) -> int:
    """Runs all of it with a bar, prints the table, writes the files; the exit code. What is `given` is for `sweep`.

    That is 1 if a run failed, which is said when it does. An interrupt ends what runs, and what is done is shown.
    """
    from .replay import Sweep, sweep, sweep_runs
    from .replay_progress import sweep_progress

    runs = sweep_runs(base, axes, load=load.made_up, **how)
    results: list[Any] = []
    code = 0
    with sweep_progress(len(runs), sys.stderr) as (heard, run_ended):

        def ended(result: Any) -> None:
            results.append(result)
            run_ended()
            if result.problem is not None:
                echo(f"Error: {result.run.name}: {result.problem}", err=True)

        told: dict[str, Any] = {"heard": heard, "ended": ended, "trace_name": load.name}
        try:
            sweep(runs, load.trace, jobs=jobs, folder=files.reports, **given, **told)
        except KeyboardInterrupt:
            code = INTERRUPTED_EXIT
            echo(f"Interrupted: {len(results)} of {len(runs)} runs have ended", err=True)
    done = Sweep.of(runs, results)
    if found := sum(result.is_found for result in results):
        echo(f"{found} of {len(runs)} runs were in {files.reports}", err=True)
    from .replay import sweep_text

    echo(sweep_text(done), nl=False)
    files.write(done)
    return code or int(any(result.problem is not None for result in results))
