"""What a router in front of OpenAI-compatible servers costs, beside other routers in the same run.

    python -m benchmarks.upstream_proxy [--streams 64] [--seconds 8] [--rounds 3] [--peers DIR] [--json FILE]

Two scripted upstreams answer each chat with 64 tokens at once, one event a token. In front of them stand, in turns:

| row                | what it is                                                                               |
|--------------------|------------------------------------------------------------------------------------------|
| direct             | nothing: the load goes to the upstreams by turns                                         |
| aiohttp            | a proxy of thirty lines that reads nothing of what it passes on                          |
| penstock           | `penstock serve --upstream ... --router kv`: tokenizes, chooses by KV cache, detokenizes |
| penstock, by turns | the same with `--router round-robin`                                                     |
| vllm-router        | its policy `cache_aware`, by text; and `round_robin`                                     |
| sglang-router      | the same                                                                                 |

Peers that are not installed in the environment DIR are left out, and named. Each row is the median over
the rounds; in each round all rows have their turn, so what disturbs the machine disturbs them all. CPU time is that of
the router's processes. The load is closed: each stream sends its next chat when the one before has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from .chat_load import TOKENS, cpu_s, free_port, load, running
from .scripted_upstream import MODEL


@frozen
class Contender:
    """A router: its name, and the command that starts it on a port; without one the load goes to the upstreams."""

    name: str
    command: tuple[str, ...] = ()


@frozen
class Figures:
    """One turn of one contender."""

    requests_per_s: float
    cpu_s_per_1000: float | None
    """CPU seconds of the router for a thousand chats; None without a router."""
    ttft_p50_ms: float
    ttft_p99_ms: float


def contenders(port: int, urls: Sequence[str], peers: Path, model_path: Path) -> list[Contender]:
    """Return the routers that can run here, and name on the standard error those that cannot."""
    upstreams = tuple(text for url in urls for text in ("--upstream", url))
    ours = (sys.executable, "-m", "serving", "serve", "--port", str(port), "--model-path", str(model_path), *upstreams)
    found = [Contender("direct"), Contender("penstock", (*ours, "--router", "kv"))]
    found.append(Contender("penstock, by turns", (*ours, "--router", "round-robin")))
    python = str(peers / "bin" / "python")
    here = ("--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls)
    foreign = {
        "aiohttp": ("aiohttp", (python, str(Path(__file__).with_name("bare_proxy.py")), str(port), *urls)),
        "vllm-router": ("vllm_router", (python, "-m", "vllm_router.launch_router", *here)),
        "sglang-router": ("sglang_router", (python, "-m", "sglang_router.launch_router", *here)),
    }
    for name, (module, command) in foreign.items():
        looked = [python, "-c", f"import {module}"]
        if not Path(python).exists() or subprocess.run(looked, capture_output=True, check=False).returncode:
            print(f"left out: {name} is not installed in {peers}", file=sys.stderr)
        elif name == "aiohttp":
            found.insert(1, Contender(name, command))
        else:
            metrics = ("--prometheus-port", str(free_port()))
            found += [Contender(f"{name}, {kind}", (*command, *metrics, "--policy", kind)) for kind in _POLICIES]
    return found


_POLICIES = ("cache_aware", "round_robin")


def turn(contender: Contender, port: int, upstream_ports: Sequence[int], streams: int, seconds: float) -> Figures:
    """Return the figures of one contender, warmed up."""
    with ExitStack() as stack:
        process = stack.enter_context(running(contender.command, port, MODEL)) if contender.command else None
        ports = upstream_ports if process is None else [port]
        asyncio.run(load(ports, streams, seconds / 4, MODEL))
        before_s = 0.0 if process is None else cpu_s(process)
        count, took_s, times = asyncio.run(load(ports, streams, seconds, MODEL))
        spent_s = None if process is None else (cpu_s(process) - before_s) / count * 1000
    return Figures(count / took_s, spent_s, times[len(times) // 2], times[int(len(times) * 0.99)])


def measure(streams: int, seconds: float, rounds: int, peers: Path, model_path: Path) -> dict[str, Figures]:
    """Return the medians by contender."""
    upstream_ports, port = [free_port(), free_port()], free_port()
    urls = [f"http://127.0.0.1:{each}" for each in upstream_ports]
    turns: dict[str, list[Figures]] = {}
    with ExitStack() as stack:
        for each in upstream_ports:
            command = (sys.executable, "-m", "benchmarks.scripted_upstream", "--port", str(each))
            stack.enter_context(running(command, each, MODEL))
        for _ in range(rounds):
            for contender in contenders(port, urls, peers, model_path):
                turns.setdefault(contender.name, []).append(turn(contender, port, upstream_ports, streams, seconds))
    return {name: _median(figures) for name, figures in turns.items()}


def _median(figures: Sequence[Figures]) -> Figures:
    rows = [asdict(each) for each in figures]
    middles: dict[str, Any] = {
        name: None if rows[0][name] is None else median(row[name] for row in rows) for name in rows[0]
    }
    return Figures(**middles)


def table(rows: dict[str, Figures], streams: int) -> Table:
    shown = Table(title=f"{streams} streams, chats of {TOKENS} tokens, two upstreams")
    for column in ("in front", "requests/s", "CPU s per 1,000", "first text p50 ms", "p99 ms"):
        shown.add_column(column, justify="left" if column == "in front" else "right")
    for name, figures in rows.items():
        cpu = "" if figures.cpu_s_per_1000 is None else f"{figures.cpu_s_per_1000:.2f}"
        shown.add_row(
            name, f"{figures.requests_per_s:,.0f}", cpu, f"{figures.ttft_p50_ms:.1f}", f"{figures.ttft_p99_ms:.1f}"
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environment with the other routers")
    parser.add_argument("--model-path", type=Path, required=True, help="folder with a tokenizer and a chat template")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = measure(asked.streams, asked.seconds, asked.rounds, asked.peers, asked.model_path)
    Console().print(table(rows, asked.streams))
    if asked.json is not None:
        asked.json.write_text(json.dumps({name: asdict(figures) for name, figures in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
