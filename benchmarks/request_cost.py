"""What a short chat costs the server's CPU, beside another version of the source.

    python -m benchmarks.request_cost --against ../before [--launches 8] [--rounds 25] [--requests 40] [--json FILE]

Both trees serve at once, each from a process of its own, and take turns: A B B A A B ... For each engine and form of
answer the CPU seconds of a thousand chats of 64 tokens are given, over connections that are kept, and the ratio of this
tree to the other. The ratio is the median over many short rounds, with an interval that holds it by 95 %: what disturbs
the machine disturbs both sides of a round, and waiting is not CPU time. Each launch is a new process, for where its
memory happens to lie is worth some percent. Nothing is exported, and no limit is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

from attrs import asdict, define, field, frozen

HERE = Path(__file__).parents[1]
TOKENS = 64
CONNECTIONS = 4
WARMING_UP = 10
"""Rounds that are not counted."""
ENGINES: Mapping[str, tuple[str, ...]] = {
    "echo": ("--engine", "echo"),
    "mocker": ("--engine", "mocker", "--engine-arg", "speedup_ratio=20"),
}
"""The one has all tokens at once, the other one after the other as a real engine has."""
FORMS: tuple[Form, ...] = ("unary", "streaming")

Form = Literal["unary", "streaming"]


@define(eq=False)
class Server:
    """A tree's server."""

    process: subprocess.Popen[str]
    port: int

    def cpu_s(self) -> float:
        """The CPU time of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def serving(tree: Path, options: Sequence[str]) -> Iterator[Server]:
    """A server of this tree, run by this interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
    found = subprocess.run(
        [sys.executable, "-c", "import serving; print(serving.__file__)"],
        env=environment, cwd=tree, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not Path(found.stdout.strip()).is_relative_to(tree):
        raise SystemExit(f"{tree} is not what would be served, but {found.stdout.strip()}")
    command = [sys.executable, "-m", "serving", "serve", "--host", "127.0.0.1", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http://" not in line:
                raise SystemExit(f"{tree} does not serve: {line}")
            yield Server(process, int(line.split("http://")[1].partition(";")[0].strip().rpartition(":")[2]))
        finally:
            process.terminate()


def request(form: Form) -> bytes:
    """The bytes of a chat that is answered with `TOKENS` tokens by either engine."""
    body = json.dumps(
        {
            "model": "echo",
            "messages": [{"role": "user", "content": "a" * TOKENS}],
            "max_completion_tokens": TOKENS,
            "stream": form == "streaming",
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@define(eq=False)
class Clients:
    """Some connections to a server, which are kept."""

    server: Server
    data: bytes
    form: Form
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(factory=list)

    async def cost_s(self, requests: int) -> float:
        """CPU seconds of a thousand requests, by so many as they come to on each connection."""
        each = max(1, requests // CONNECTIONS)
        begun = self.server.cpu_s()
        await asyncio.gather(*(self._chats(reader, writer, each) for reader, writer in self.streams))
        return (self.server.cpu_s() - begun) / (each * CONNECTIONS) * 1000

    async def _chats(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
        """That many chats one after the other."""
        for _ in range(count):
            writer.write(self.data)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a chat was answered with {head[:200]!r}")
            if self.form == "streaming":
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))


@frozen
class Size:
    """How much is measured: `requests` of each tree in a round."""

    launches: int
    rounds: int
    requests: int


@asynccontextmanager
async def connected(server: Server, form: Form) -> AsyncIterator[Clients]:
    """Open connections that send chats of this form."""
    streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS)]
    try:
        yield Clients(server, request(form), form, streams)
    finally:
        for _, writer in streams:
            writer.close()


@frozen
class Row:
    """One engine and form: the medians of both trees in CPU seconds of a thousand chats, and of their ratio."""

    engine: str
    form: Form
    here_s: float
    other_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    """Between these the ratio is with a confidence of 95 %."""

    def __str__(self) -> str:
        return (
            f"{self.engine:>8} {self.form:>10} {self.here_s:8.3f} s {self.other_s:8.3f} s"
            f" {self.ratio:7.3f}   {self.ratio_low:.3f} to {self.ratio_high:.3f}"
        )


async def compare(engine: str, form: Form, trees: tuple[Path, Path], size: Size) -> Row:
    """Launches of both servers, in each of them rounds by turns, after some for warming up."""
    costs: list[list[tuple[float, float]]] = []
    for _ in range(size.launches):
        with serving(trees[0], ENGINES[engine]) as here, serving(trees[1], ENGINES[engine]) as other:
            costs.append(await _rounds((here, other), form, size))
    ratios = [[one / two for one, two in launch] for launch in costs]
    low, high = confidence(ratios)
    here_s, other_s = (median(side) for side in zip(*(each for launch in costs for each in launch), strict=True))
    return Row(engine, form, here_s, other_s, median(median(launch) for launch in ratios), low, high)


async def _rounds(pair: tuple[Server, Server], form: Form, size: Size) -> list[tuple[float, float]]:
    costs: list[tuple[float, float]] = []
    async with connected(pair[0], form) as here, connected(pair[1], form) as other:
        for number in range(-WARMING_UP, size.rounds):
            turn = (here, other) if number % 2 else (other, here)
            taken = {clients: await clients.cost_s(size.requests) for clients in turn}
            if number >= 0:
                costs.append((taken[here], taken[other]))
    return costs


def confidence(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Where the median over launches of the median over rounds lies in 95 of 100 drawings of both."""
    rng = Random(7)

    def drawn() -> float:
        launches = rng.choices(ratios, k=len(ratios))
        return median(median(rng.choices(launch, k=len(launch))) for launch in launches)

    medians = sorted(drawn() for _ in range(1000))
    return medians[25], medians[974]


async def measure(against: Path, engines: Sequence[str], size: Size) -> list[Row]:
    """A row for each engine and form, printed as it is known."""
    rows: list[Row] = []
    print(f"{'engine':>8} {'form':>10} {'this tree':>10} {'the other':>10} {'ratio':>7}   at 95 %; CPU of 1,000 chats")
    for engine in engines:
        for form in FORMS:
            rows.append(await compare(engine, form, (HERE, against), size))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    about = "Compares what a short chat costs in this tree and in another."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_cost", description=about)
    parser.add_argument("--against", type=Path, required=True, metavar="TREE", help="the root of the other tree")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--launches", type=int, default=8, help="of each tree's server")
    parser.add_argument("--rounds", type=int, default=25, help="in a launch")
    parser.add_argument("--requests", type=int, default=40, help="in a round, for each tree")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    given = parser.parse_args()
    size = Size(given.launches, given.rounds, given.requests)
    rows = asyncio.run(measure(given.against.resolve(), given.engines, size))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
