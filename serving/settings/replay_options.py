"""The options of `penstock replay` and its commands as records; `graph_options` has those of other commands too."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import frozen

from pipeline import InvalidArgument
from pipeline.settings import ANY, above, at_least, setting, settings_of

if TYPE_CHECKING:
    from ..replay import Limits, SyntheticLoad, Trace

_MADE_UP = "Synthetic load: "
_SHAPE = ("input_tokens", "output_tokens", "turns", "arrival_interval_ms", "request_rate", "inter_turn_delay_ms")
"""What shapes synthetic load only."""
_PREFIXES = ("shared_prefix_ratio", "num_prefix_groups")
"""What shapes synthetic load, and the prompts of a trace that has none of its own."""
_IDS = re.compile(r"(\d{1,10})-(\d{1,10})")


@frozen
class LoadOptions:
    """What is replayed: files of a trace, or synthetic load."""

    group: ClassVar[str] = "Load"
    variable_prefix: ClassVar[str] = ""

    trace: tuple[Path, ...] = setting(
        (), "Trace file, or all files of a dynamo trace; without one the load is synthetic.", option=(), metavar="TRACE"
    )
    format: str = setting(
        "mooncake",
        "mooncake, mooncake-delta, agentic_mooncake, applied_compute_agentic or dynamo.",
        option=("--format", "--trace-format"),
    )
    trace_block_size: int | None = setting(
        None,
        "Tokens that a hash id of the trace stands for. [default: 512, or as the trace has it]",
        ANY,
        metavar="TOKENS",
    )
    skip_bad: bool = setting(False, "Leave out lines that are not requests.", has_negative=False)
    requests: int | None = setting(
        None,
        "The first N of the trace; of synthetic load, N sessions.",
        at_least(1),
        option=("--requests", "--request-count"),
        metavar="N",
    )
    speed_up: float = setting(
        1.0, "Arrivals X times as fast.", above(0), option=("--speed-up", "--arrival-speedup-ratio"), metavar="X"
    )
    concurrency: int | None = setting(
        None,
        "N sessions at a time, whenever they arrived.",
        at_least(1),
        option=("--concurrency", "--replay-concurrency"),
        metavar="N",
    )
    input_tokens: int | None = setting(None, f"{_MADE_UP}tokens of a prompt.", at_least(1), metavar="N")
    output_tokens: int | None = setting(None, f"{_MADE_UP}tokens of an answer.", at_least(1), metavar="N")
    turns: int | None = setting(None, f"{_MADE_UP}requests of a session. [default: 1]", metavar="N")
    arrival_interval_ms: float | None = setting(None, f"{_MADE_UP}time between two arrivals.", metavar="MS")
    request_rate: float | None = setting(None, f"{_MADE_UP}arrivals a second on average, at random times.", metavar="X")
    inter_turn_delay_ms: float | None = setting(None, f"{_MADE_UP}time between two turns. [default: 0]", metavar="MS")
    shared_prefix_ratio: float | None = setting(
        None, "Part of a first prompt that its group shares. [default: 0]", metavar="FRACTION"
    )
    num_prefix_groups: int | None = setting(None, "Groups that share prefixes. [default: 0]", metavar="N")

    @property
    def trace_name(self) -> str | None:
        """What a report calls the files of the trace; None for load that was made up."""
        return ", ".join(path.name for path in self.trace) or None

    def made(self, seed: int) -> Trace:
        """Return the requests of the trace files, or synthetic ones. Raise InvalidArgument as the two below."""
        trace = self.recorded()
        return self.synthetic(seed).make() if trace is None else trace

    def recorded(self) -> Trace | None:
        """Return the first requests of the trace files, None if none is given.

        Raise InvalidArgument for a file that is not a trace, and for options of the other kind of load.
        """
        if not self.trace:
            for name, is_given in (("format", self.format != "mooncake"), ("skip_bad", self.skip_bad)):
                if is_given:
                    raise InvalidArgument("is for a TRACE, and there is none", field=name)
            return None
        if shape := self._given(*_SHAPE):
            raise InvalidArgument("is for made up load, and there is a trace", field=next(iter(shape)))
        from ..replay import first_requests, read_trace

        how = {"trace_block_size": self.trace_block_size, "skip_bad": self.skip_bad, **self._given(*_PREFIXES)}
        trace = read_trace(list(self.trace), self.format, **how)
        return trace if self.requests is None else first_requests(trace, self.requests)

    def synthetic(self, seed: int, axes: Mapping[str, Sequence[Any]] | None = None) -> SyntheticLoad:
        """Return the synthetic load of this shape, with the first value of each of the axes that are of a load.

        Raise InvalidArgument for one that cannot be, or lacks its size.
        """
        from ..deployment import converted
        from ..replay import SyntheticLoad

        shape = self._given("trace_block_size", *_SHAPE, *_PREFIXES)
        if self.requests is not None:
            shape["request_count"] = self.requests
        names = {one.name for one in attrs.fields(SyntheticLoad)} - {"seed"}
        first = {name: values[0] for name, values in (axes or {}).items() if name in names}
        try:
            shape |= converted(SyntheticLoad, first)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field=f"vary.{error.field}") from error
        for name, field in (("input_tokens",) * 2, ("output_tokens",) * 2, ("request_count", "requests")):
            if name not in shape:
                raise InvalidArgument("is needed to make up load; or give a TRACE", field=field)
        return SyntheticLoad(seed=seed, **shape)

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@frozen
class RunOptions:
    """What happens to workers while a load is replayed, and what they cost."""

    group: ClassVar[str] = "Load"
    variable_prefix: ClassVar[str] = ""

    fault: tuple[str, ...] = setting(
        (), "'worker 3 dies at 120 s, returns at 300 s', or @FILE of such; repeatable.", metavar="TEXT"
    )
    gpus_per_worker: int = setting(1, "GPUs of a worker, for the GPU hours.", metavar="N")
    gpus_per_prefill_worker: int | None = setting(
        None, "The same of a prefill worker. [default: as of the others]", at_least(0), metavar="N"
    )


@frozen
class GoodputOptions:
    """The limits that a good request keeps."""

    group: ClassVar[str] = "Report"
    variable_prefix: ClassVar[str] = ""

    sla_ttft_ms: float | None = setting(None, "A good request has its first token by then.", metavar="MS")
    sla_itl_ms: float | None = setting(None, "A good request takes no longer for a token.", metavar="MS")
    sla_e2e_ms: float | None = setting(None, "A good request has ended by then.", metavar="MS")

    def limits(self) -> Limits:
        """Return them as a report has them."""
        from ..replay import Limits

        return Limits(ttft_ms=self.sla_ttft_ms, itl_ms=self.sla_itl_ms, e2e_ms=self.sla_e2e_ms)


def _file(help: str) -> Any:
    return setting(None, help, metavar="FILE")


@frozen
class ReportOptions:
    """Where the report of a replay goes, and what is in it."""

    group: ClassVar[str] = "Report"
    variable_prefix: ClassVar[str] = ""

    json: Path | None = _file("Write the report to this file, as JSON.")
    html: Path | None = _file("Write a page with plots to this file; it needs no other.")
    per_request: bool = setting(
        False,
        "Put every request into the JSON; with --live, as a line each in FILE.requests.jsonl beside it.",
        has_negative=False,
    )
    wall_time: bool = setting(
        False, "Put into the report how long the replay took; then its bytes differ.", has_negative=False
    )


@frozen
class SweepReportOptions:
    """Where the reports of a sweep go, and what is in them."""

    group: ClassVar[str] = "Report"
    variable_prefix: ClassVar[str] = ""

    reports: Path | None = setting(
        None, "Folder for each report as it ends; those in it with the same settings are kept.", metavar="DIR"
    )
    json: Path | None = _file("Write the runs to this file, as a JSON list.")
    html: Path | None = _file("Write a page to this file: the runs that no other beats.")
    per_request: bool = setting(False, "Put every request into the reports of --reports.", has_negative=False)


@frozen
class CompareOptions:
    """The reports that are compared, and where pages of them go."""

    group: ClassVar[str] = "Report"
    variable_prefix: ClassVar[str] = ""

    reports: tuple[Path, ...] = setting((), "Reports that --json wrote.", option=(), metavar="A.json B.json")
    html: Path | None = _file("Write a page with plots to this file; it needs no other.")
    pareto: Path | None = _file("Write a page to this file with the runs that no other beats.")


@frozen
class LiveOptions:
    """The server that a load is replayed against, instead of a graph."""

    group: ClassVar[str] = "Live"
    variable_prefix: ClassVar[str] = ""

    real_time: bool = setting(False, "Let time pass as it does; do not jump to the next event.", has_negative=False)
    live: str | None = setting(
        None, "Replay to the OpenAI-compatible server at this URL, in real time, over HTTP.", metavar="URL"
    )
    model: str | None = setting(None, "With --live: name of the model. [default: the server's first]", metavar="NAME")
    live_ids: str = setting(
        "1000-31999", "With --live: token ids that the model knows, for the prompts.", metavar="FIRST-LAST"
    )
    live_timeout: float = setting(
        600.0, "With --live: seconds without an item after which a request has failed.", above(0), metavar="S"
    )

    @property
    def vocabulary(self) -> range:
        """The token ids of `live_ids`. Raise InvalidArgument for a text that is not FIRST-LAST."""
        found = _IDS.fullmatch(self.live_ids)
        if found is None or int(found[1]) >= int(found[2]):
            raise InvalidArgument(f"expected FIRST-LAST, such as 1000-31999, got {self.live_ids!r}", field="live_ids")
        return range(int(found[1]), int(found[2]) + 1)


def check_files(options: Any) -> None:
    """Check the files and folders to write, by option, before the work and not after it.

    Raise InvalidArgument for one that cannot be written, ModuleNotFoundError for a page if the extra for it is missing.
    """
    for name, known in settings_of(type(options)).items():
        path = getattr(options, name)
        if known.metavar not in ("FILE", "DIR") or path is None:
            continue
        if path.exists() and path.is_dir() == (known.metavar == "FILE"):
            raise InvalidArgument(f"{path} is {'a' if path.is_dir() else 'no'} folder", field=name)
        if not path.absolute().parent.is_dir():
            raise InvalidArgument(f"{path} is in no folder that is there", field=name)
        if name in ("html", "pareto"):
            importlib.import_module("serving.replay.page")
