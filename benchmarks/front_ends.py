"""What a front end costs whose workers are other processes.

    python -m benchmarks.front_ends [--streams 64] [--seconds 8] [--rounds 3] [--workers 2] [--router kv]
                                    [--real-time] [--front-ends 1 2] [--front-end-share 0.2]
                                    [--dynamo DIR --model-path DIR] [--json FILE]

A closed load of chats, 64 tokens each, goes to simulated engines. In turns stand in front of them:

| row            | what it is                                                                              |
|----------------|-----------------------------------------------------------------------------------------|
| one process    | `penstock serve`: the engines are in the front end's process                            |
| 1 front end    | `penstock up --frontends 1`: each engine is a worker process, found by files in a folder |
| 2 front ends   | the same with two front ends behind the port; `--front-ends` names other numbers        |
| dynamo         | its front end, and its simulated engines in one process; with file discovery             |

Nothing takes time in the engines, so tokens come together as fast as they are read; with `--real-time` each one comes
alone, when a real engine would have it. With `--model-path` all have that model's tokenizer and chat template. CPU time
is that of the processes of each kind, for a token and for a thousand chats. Each row is the median over the rounds, in
each of which all rows have their turn.

With `--front-end-share` each front end may use only that share of a core, in a control group of its own, which needs
Linux and root. So several front ends are compared with one on a machine whose cores they would otherwise share with
workers and load: `of its share` shows whether they were what limits. The row without workers is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from .chat_load import TOKENS, free_port, load, running
from .cpu_shares import CpuGroups


@frozen
class Contender:
    """A deployment: its name, the command that starts it on a port, and the name of its model."""

    name: str
    command: tuple[str, ...]
    model: str = "echo"
    front_ends: int = 1
    """Its front ends."""


@frozen
class Figures:
    """One turn of one contender."""

    requests_per_s: float
    front_cpu_us_per_token: float
    worker_cpu_us_per_token: float
    cpu_s_per_1000: float
    """CPU seconds of all its processes for a thousand chats."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    front_busy: float
    """CPU of the front ends, of all that they may use: their shares, or a core each."""


def contenders(port: int, asked: argparse.Namespace) -> list[Contender]:
    """Return the deployments."""
    workers, router, real_time = asked.workers, asked.router, asked.real_time
    engine = ("--engine", "mocker", "--engine-arg", f"speedup_ratio={int(real_time)}")  # with 0 nothing takes time
    model = ("--model-path", str(asked.model_path), "--model-name", "echo") if asked.model_path is not None else ()
    common = (*engine, *model, "--router", router, "--workers", str(workers), "--port", str(port))
    ours = (sys.executable, "-m", "serving")
    found = [Contender("one process", (*ours, "serve", *common))] if asked.front_end_share is None else []
    for count in asked.front_ends:
        name = f"{count} front end{'s' * (count > 1)}"
        found.append(Contender(name, (*ours, "up", *common, "--frontends", str(count)), front_ends=count))
    if asked.dynamo is not None:
        python, ratio = asked.dynamo / "bin" / "python", 1 if real_time else 1_000_000
        engines = f"{python} -m dynamo.mocker --model-path {asked.model_path} --speedup-ratio {ratio}"
        front = f"{python} -m dynamo.frontend --http-port {port} --router-mode {router}"
        command = ("sh", "-c", f"{engines} --num-workers {workers} & exec {front}")
        found.append(Contender("dynamo", command, str(asked.model_path)))
    return found


@frozen
class Processes:
    """The processes of a deployment, by their ids."""

    front: frozenset[int]
    """Front ends, and the one that starts all."""
    workers: frozenset[int]
    serving: tuple[int, ...]
    """The front ends alone."""

    @classmethod
    def below(cls, root: int) -> Processes:
        """Return the process and those that it has started."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
        words = {pid: _words(pid) for pid in sorted(parents) if root in _ancestors(pid, parents)}
        workers = frozenset(pid for pid, own in words.items() if {b"worker", b"dynamo.mocker"} & own)
        serving = tuple(pid for pid, own in words.items() if {b"serve", b"dynamo.frontend"} & own)
        return cls(frozenset(words) - workers, workers, serving)

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the front ends and of the workers so far."""
        return sum(map(_cpu_s, self.front)), sum(map(_cpu_s, self.workers))


def _words(pid: int) -> set[bytes]:
    """Return the words of a command; none if the process has ended."""
    try:
        return set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """Give the process and those above it."""
    current: int | None = pid
    while current:
        yield current
        current = parents.get(current)


def turn(contender: Contender, port: int, asked: argparse.Namespace) -> Figures:
    """Return the figures of one contender, warmed up. Raise SystemExit if a process ended meanwhile."""
    share = asked.front_end_share
    with ExitStack() as stack:
        root = stack.enter_context(running(contender.command, port, contender.model)).pid
        asyncio.run(load([port], asked.streams, asked.seconds / 4, contender.model))
        processes = Processes.below(root)
        if len(processes.serving) != contender.front_ends:
            raise SystemExit(f"{contender.name}: {len(processes.serving)} serve")
        if share is not None:
            stack.enter_context(CpuGroups.find().limited(processes.serving, share))
        front_before_s, workers_before_s = processes.cpu_s()
        count, took_s, times = asyncio.run(load([port], asked.streams, asked.seconds, contender.model))
        if Processes.below(root) != processes:
            raise SystemExit(f"{contender.name}: a process ended or was started while it was measured")
        front_s, workers_s = processes.cpu_s()
    front_s, workers_s = front_s - front_before_s, workers_s - workers_before_s
    return Figures(
        count / took_s,
        front_s / count / TOKENS * 1e6,
        workers_s / count / TOKENS * 1e6,
        (front_s + workers_s) / count * 1000,
        times[len(times) // 2],
        times[int(len(times) * 0.99)],
        front_s / took_s / contender.front_ends / (share or 1.0),
    )


def measure(asked: argparse.Namespace) -> dict[str, Figures]:
    """Return the medians by contender."""
    port, turns = free_port(), dict[str, list[Figures]]()
    for _ in range(asked.rounds):
        with TemporaryDirectory() as folder:
            os.environ |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": folder}
            for contender in contenders(port, asked):
                turns.setdefault(contender.name, []).append(turn(contender, port, asked))
    return {name: _median(figures) for name, figures in turns.items()}


def _median(figures: Sequence[Figures]) -> Figures:
    rows = [asdict(each) for each in figures]
    middles: dict[str, Any] = {name: median(row[name] for row in rows) for name in rows[0]}
    return Figures(**middles)


def table(rows: dict[str, Figures], asked: argparse.Namespace) -> Table:
    title = f"{asked.streams} streams, chats of {TOKENS} tokens, {asked.workers} workers, {asked.router}"
    by, columns = (
        "of a core",
        ["", "requests/s", "front µs a token", "workers", "CPU s per 1,000", "TTFT p50 ms", "p99 ms"],
    )
    if asked.front_end_share is not None:
        title += f", {asked.front_end_share:g} of a core for each front end"
        by = "of its share"
    shown = Table(title=title)
    for column in (*columns, by):
        shown.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        costs = (f"{row.front_cpu_us_per_token:.1f}", f"{row.worker_cpu_us_per_token:.1f}", f"{row.cpu_s_per_1000:.2f}")
        times = (f"{row.ttft_p50_ms:.1f}", f"{row.ttft_p99_ms:.1f}", f"{row.front_busy:.2f}")
        shown.add_row(name, f"{row.requests_per_s:,.0f}", *costs, *times)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--router", default="kv")
    parser.add_argument("--real-time", action="store_true", help="tokens take the time of a real engine")
    parser.add_argument(
        "--front-ends", type=int, nargs="+", default=[1, 2], help="how many stand behind the port, by row"
    )
    parser.add_argument("--front-end-share", type=float, help="of a core, for each front end: needs Linux and root")
    parser.add_argument("--dynamo", type=Path, help="environment with ai-dynamo")
    parser.add_argument("--model-path", type=Path, help="folder with a tokenizer and a chat template")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.front_end_share is not None:
        CpuGroups.find()  # fail before anything is started
    rows = measure(asked)
    Console().print(table(rows, asked))
    if asked.json is not None:
        asked.json.write_text(json.dumps({name: asdict(figures) for name, figures in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
