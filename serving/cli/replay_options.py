"""The options of `penstock replay` and its commands as records; those that other commands share are in `options`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from pipeline.settings import ANY, above, at_least, setting

if TYPE_CHECKING:
    from ..replay import Limits

_MADE_UP = "Synthetic load: "


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

    @property
    def synthetic(self) -> dict[str, Any]:
        """What is given that shapes synthetic load only, by name."""
        return self._given(
            *("input_tokens", "output_tokens", "turns"),
            *("arrival_interval_ms", "request_rate", "inter_turn_delay_ms"),
        )

    @property
    def prefixes(self) -> dict[str, Any]:
        """What is given that shapes synthetic load, and the prompts of a trace that has none of its own."""
        return self._given("shared_prefix_ratio", "num_prefix_groups")

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
