"""A whole trace replayed, beside the offline replay of another router, where it is there: seconds, memory, figures.

    python -m benchmarks.replay trace.jsonl --workers 8 --requests 3000
    pip install ai-dynamo-runtime==1.2.1        the peer; without it the figures stand alone

Each replay is a process of its own; the two take turns. Both read the file, and both count all they do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from attrs import frozen
from rich.console import Console
from rich.table import Table

from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, RouterName
from serving.replay import read_trace, run_config

from .kv_index import peer_library

BLOCK_TOKENS, TRACE_BLOCK_TOKENS = 64, 512
ROUTERS: tuple[RouterName, ...] = ("round-robin", "kv")


@frozen
class Run:
    """One replay: seconds on the clock and of the processor, resident megabytes at most, and what it reported."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    report: dict[str, Any]


def ours(trace: str, router: RouterName, workers: int) -> dict[str, Any]:
    config = GraphConfig(
        engine="mocker", engine_args={"block_size": str(BLOCK_TOKENS)}, workers=workers, router=router, seed=42
    )
    load = read_trace(trace, trace_block_size=TRACE_BLOCK_TOKENS)
    report = run_in_virtual_time(partial(run_config, config, load), backend="asyncio")
    figures: dict[str, Any] = json.loads(report.to_json())
    return figures


def peer(trace: str, router: RouterName, workers: int) -> dict[str, Any]:
    library = peer_library()
    mode = "kv_router" if router == "kv" else "round_robin"
    figures: dict[str, Any] = library.run_mocker_trace_replay(
        trace,
        extra_engine_args=library.MockEngineArgs(block_size=BLOCK_TOKENS),
        num_workers=workers,
        router_mode=mode,
        trace_block_size=TRACE_BLOCK_TOKENS,
    )
    return figures


def in_its_own_process(whose: str, trace: Path, router: str, workers: int) -> Run:
    command = [sys.executable, "-m", "benchmarks.replay", str(trace), "--only", whose, router, str(workers)]
    began_s = perf_counter()
    quiet = {**os.environ, "DYN_LOG": "error"}  # the peer writes a line for each request otherwise
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=quiet) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall_s = perf_counter() - began_s
    if child.returncode:
        raise SystemExit(f"the replay of {whose} ended with {child.returncode}")
    return Run(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, json.loads(output.splitlines()[-1]))


def compare(trace: Path, worker_counts: Sequence[int], repeats: int) -> Table:
    table = Table(
        *("workers", "router", "whose", "wall s", "CPU s", "ratio", "MB"),
        *("mean ms to first token", "p99", "reuse"),
        title=f"replay of {trace.name}",
    )
    subjects = ["ours"] if peer_library() is None else ["ours", "peer"]
    for workers in worker_counts:
        for router in ROUTERS:
            runs: dict[str, list[Run]] = {whose: [] for whose in subjects}
            for _ in range(repeats):
                for whose in subjects:
                    runs[whose].append(in_its_own_process(whose, trace, router, workers))
            floor_s = median(run.cpu_s for run in runs[subjects[-1]])
            for whose in subjects:
                table.add_row(str(workers), router, whose, *_cells(runs[whose], floor_s))
    return table


def _cells(runs: list[Run], floor_s: float) -> list[str]:
    report, cpu_s = runs[0].report, median(run.cpu_s for run in runs)
    return [
        f"{median(run.wall_s for run in runs):.1f}",
        f"{cpu_s:.1f}",
        f"{cpu_s / floor_s:.1f}",
        f"{max(run.peak_mb for run in runs):.0f}",
        f"{report['mean_ttft_ms']:.1f}",
        f"{report['p99_ttft_ms']:.1f}",
        f"{report['prefix_cache_reused_ratio']:.3f}",
    ]


def _first(trace: Path, requests: int | None, folder: str) -> Path:
    if requests is None:
        return trace
    shorter = Path(folder) / trace.name
    with trace.open("rb") as lines:
        shorter.write_bytes(b"".join(islice(lines, requests)))
    return shorter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[8])
    parser.add_argument("--requests", type=int, help="the first so many of the trace")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs=3, metavar=("WHOSE", "ROUTER", "WORKERS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only is not None:
        whose, router, workers = given.only
        report = (ours if whose == "ours" else peer)(str(given.trace), router, int(workers))
        print(json.dumps({name: value for name, value in report.items() if isinstance(value, int | float)}))
        return
    with TemporaryDirectory() as folder:
        Console(width=140).print(compare(_first(given.trace, given.requests, folder), given.workers, given.repeats))


if __name__ == "__main__":
    main()
