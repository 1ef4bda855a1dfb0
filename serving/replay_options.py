"""The options of `penstock replay` and its commands, beside those that all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TraceFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="TRACE", help="Trace file, or all files of a dynamo trace; without, load is made up."),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        "--trace-format",
        help="mooncake, mooncake-delta, agentic_mooncake, applied_compute_agentic or dynamo.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS", help="Tokens that a hash id of the trace stands for. [default: 512, or what the trace says]"
    ),
]
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
PerRequest = Annotated[
    bool,
    typer.Option(
        "--per-request", help="Every request is in the JSON; with --live, a line each in FILE.requests.jsonl beside it."
    ),
]
WallTime = Annotated[
    bool, typer.Option("--wall-time", help="The report says how long the replay took, so it is not the same again.")
]
Gpus = Annotated[int, typer.Option(metavar="N", help="GPUs of a worker, for the GPU hours.")]
PrefillGpus = Annotated[
    int | None, typer.Option(metavar="N", help="The same of a prefill worker. [default: as of the others]")
]
RealTime = Annotated[bool, typer.Option("--real-time", help="Let time pass as it does, not jump to what is next.")]
LiveUrl = Annotated[
    str | None,
    typer.Option(
        "--live", metavar="URL", help="Replay against the OpenAI-compatible server there, in real time, over HTTP."
    ),
]
LiveModel = Annotated[str | None, typer.Option(metavar="NAME", help="With --live: model to ask. [default: its first]")]
LiveIds = Annotated[
    str,
    typer.Option(
        metavar="FIRST-LAST",
        help="With --live: token ids that the model knows; prompts are spelled in them.",
    ),
]
LiveTimeout = Annotated[
    float, typer.Option(metavar="S", help="With --live: a request has failed when nothing comes for so long.")
]
