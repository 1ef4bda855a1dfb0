"""Python function calls of a request and of a token, by package and file, beside another version of the source.

    python -m benchmarks.calls [--mode kv-prefill] [--files 15] [--against ../before] [--json FILE]

A chat with a streamed answer goes through the ASGI app and the standard graph to a mock engine, one after the other on
asyncio's own loop. A call is an entry into a Python function: a resumed coroutine or generator counts again, a function
in C does not. Three routers are counted: round robin and `kv` over two workers, and `kv` over two workers and one
prefill worker. The figure of a request is for an answer of one token; each further token adds the second figure. With
`--against` the other checkout is counted by its own interpreter.

Calls are counted, not timed: the figures are the same in every run, but for a few calls of the loop's timers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
from attrs import field, frozen
from rich.console import Console
from rich.table import Table

MODES: Mapping[str, Mapping[str, Any]] = {
    "round-robin": {"router": "round-robin", "workers": 2},
    "kv": {"router": "kv", "workers": 2},
    "kv-prefill": {"router": "kv", "workers": 2, "prefill_workers": 1},
}
"""What differs between the configs of the graphs."""
PACKAGES = ("pipeline", "operators", "engines", "serving")
SIMULATION = "engines/mocker"
"""The simulated engine, listed apart from the package it is in."""
PROMPT = "x" * 80
"""More than one KV block of 64 tokens; a character is a token."""
FEW, MANY = 1, 65
"""Tokens of the two answers whose difference is what a token costs."""
WARM_UP, REQUESTS = 10, 10
SETTLE_S = 0.2
"""Time for what goes on behind an answer."""

Scope = MutableMapping[str, Any]
Messages = list[MutableMapping[str, Any]]


def public(name: str, *modules: str) -> Any:
    """The object of this name in the first of the modules that has it: older checkouts have it elsewhere."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"none of {', '.join(modules)} has {name}")


@frozen
class Calls:
    """Calls of one mode, by file: `pipeline/stream.py`, or the name of a library."""

    request: Mapping[str, float]
    """Of a request answered with one token."""
    token: Mapping[str, float]
    """Of each further token."""

    def of(self, part: str) -> tuple[float, float]:
        """The calls of a request and of a token below this part; "" is everything."""
        return _sum(self.request, part), _sum(self.token, part)

    @property
    def product(self) -> tuple[float, float]:
        """The calls of a request and of a token in the four packages."""
        request, token = zip(*(self.of(f"{package}/") for package in PACKAGES), strict=True)
        return sum(request), sum(token)

    def parts(self) -> Iterator[tuple[str, float, float]]:
        """The calls of each package, the simulated engine apart, and of all libraries."""
        for package in PACKAGES:
            request, token = self.of(f"{package}/")
            if package == SIMULATION.partition("/")[0]:
                simulated = self.of(f"{SIMULATION}/")
                request, token = request - simulated[0], token - simulated[1]
                yield (SIMULATION, *simulated)
            yield package, request, token
        every, product = self.of(""), self.product
        yield "libraries", every[0] - product[0], every[1] - product[1]

    def files(self, count: int) -> list[tuple[str, float, float]]:
        """The files of the product with the most calls in an answer of `MANY` tokens."""
        names = {name for name in (*self.request, *self.token) if name.startswith(PACKAGES) and "/" in name}
        rows = [(name, self.request.get(name, 0.0), self.token.get(name, 0.0)) for name in names]
        return sorted(rows, key=lambda row: (-(row[1] + (MANY - FEW) * row[2]), row[0]))[:count]


def _sum(calls: Mapping[str, float], part: str) -> float:
    return sum(number for name, number in calls.items() if name.startswith(part))


@frozen
class Counting:
    """Counts the calls of this thread by the function's code."""

    calls: Counter[CodeType] = field(factory=Counter)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def by_file(self, requests: int) -> Counter[str]:
        """Calls of one request, of `requests` that were counted."""
        files: Counter[str] = Counter()
        for code, number in self.calls.items():
            files[_place(code.co_filename)] += number
        return Counter({name: number / requests for name, number in files.items()})


def _place(filename: str) -> str:
    """A file of the product from its root, or the library that another file is of."""
    root = Path(import_module("pipeline").__file__ or "").parents[1]
    path = Path(filename)
    if path.is_relative_to(root) and path.relative_to(root).parts[0] in PACKAGES:
        return path.relative_to(root).as_posix()
    if "site-packages" in path.parts:
        return path.parts[path.parts.index("site-packages") + 1]
    return "python"


@asynccontextmanager
async def _served(mode: str) -> AsyncIterator[Any]:
    """The ASGI app over the standard graph of this mode."""
    graph_config = public("GraphConfig", "serving.deployment", "serving.config")
    standard_graph = public("standard_graph", "serving.deployment", "serving.graphs")
    # Steps of 8 ms: the engine makes up for at most 5 ms of a late one, so that each token comes alone, however busy
    # the machine is. Tokens of faster steps are joined as time allows.
    arguments = {"speedup_ratio": "0.8"}
    async with standard_graph(graph_config(engine="mocker", engine_args=arguments, seed=1, **MODES[mode])) as graph:
        yield public("app", "serving.http")(graph)


async def _chat(app: Any, tokens: int) -> int:
    """Send a chat and read its answer; return the number of events with text."""
    content = {"model": "echo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": True}
    body = json.dumps(content).encode()
    path = "/v1/chat/completions"
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    bodies, sent = iter([body]), Messages()

    async def receive() -> Scope:
        for part in bodies:
            return {"type": "http.request", "body": part, "more_body": False}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if sent[0]["status"] != 200:
        raise SystemExit(f"a chat was answered with {sent}")
    return b"".join(bytes(message.get("body", b"")) for message in sent).count(b'"content":"')


async def _count(mode: str) -> Calls:
    counted: list[Counter[str]] = []
    async with _served(mode) as app:
        for _ in range(WARM_UP):
            await _chat(app, MANY)
        for tokens in (FEW, MANY):
            await anyio.sleep(SETTLE_S)
            counting = Counting()
            with counting.running():
                for _ in range(REQUESTS):
                    await _chat(app, tokens)
            counted.append(counting.by_file(REQUESTS))
    few, many = counted
    token = {name: (many[name] - few[name]) / (MANY - FEW) for name in sorted(few | many)}
    return Calls(dict(few), token)


def count(mode: str) -> Calls:
    """Count the calls of this checkout in one mode."""
    return anyio.run(partial(_count, mode))


def count_in(folder: Path, modes: Sequence[str]) -> dict[str, Calls]:
    """Count the calls of another checkout, by its own interpreter where it has one."""
    python = folder / ".venv/bin/python"
    command = [str(python) if python.exists() else sys.executable, __file__, "--json", "-", "--mode", *modes]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{folder} cannot be counted: {done.stderr}")
    report = json.loads(done.stdout)
    if Path(report["root"]) != folder:
        raise SystemExit(f"{folder} is not what would be counted, but {report['root']}")
    return {mode: Calls(**calls) for mode, calls in report["modes"].items()}


def summary(here: Mapping[str, Calls], other: Mapping[str, Calls]) -> Table:
    """A row for each mode and part of the product, beside the other checkout where there is one."""
    table = Table(title="Python calls of a request for one token, and of each further token")
    for column in ("mode", "calls in", "request", "token"):
        table.add_column(column, justify="left" if column in ("mode", "calls in") else "right")
    for column in ("request, other", "ratio", "token, other", "ratio") if other else ():
        table.add_column(column, justify="right")
    for mode, calls in here.items():
        there = {name: (request, token) for name, request, token in other[mode].parts()} if other else {}
        compared = other[mode].product if other else None
        table.add_row(mode, "the product", *_figures(calls.product, compared), style="bold")
        for name, *figures in calls.parts():
            table.add_row("", name, *_figures((figures[0], figures[1]), there.get(name)))
    return table


def _figures(here: tuple[float, float], there: tuple[float, float] | None) -> Iterator[str]:
    yield f"{here[0]:,.0f}"
    yield f"{here[1]:,.1f}"
    for mine, other, places in zip(here, there or (), (0, 1), strict=False):
        yield f"{other:,.{places}f}"
        yield f"{mine / other:.2f}" if other >= 1 else ""


def by_file(mode: str, calls: Calls, number: int) -> Table:
    """The files of the product that are entered most."""
    table = Table(title=f"{mode}, by file")
    for column in ("file", "request", "token"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for name, request, token in calls.files(number):
        table.add_row(name, f"{request:,.1f}", f"{token:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls", description="Counts the Python calls of a request and of a token."
    )
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--files", type=int, default=0, metavar="N", help="list the N files with the most calls")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="the root of another checkout")
    parser.add_argument("--json", metavar="FILE", help="where the figures are written; -: to standard output, alone")
    arguments = parser.parse_args()
    modes = {mode: count(mode) for mode in arguments.mode}
    root = Path(import_module("pipeline").__file__ or "").parents[1]
    described = {mode: {"request": calls.request, "token": calls.token} for mode, calls in modes.items()}
    report = json.dumps({"root": str(root), "modes": described}, indent=2) + "\n"
    if arguments.json == "-":
        print(report, end="")
        return
    other = {} if arguments.against is None else count_in(arguments.against.resolve(), arguments.mode)
    console = Console(width=120)
    console.print(summary(modes, other))
    for mode, calls in modes.items() if arguments.files else ():
        console.print(by_file(mode, calls, arguments.files))
    if arguments.json is not None:
        Path(arguments.json).write_text(report)


if __name__ == "__main__":
    main()
