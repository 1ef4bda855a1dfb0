"""What a short chat costs the server's CPU, beside another version of the source.

    python -m benchmarks.request_cost --against ../before [--rounds 40] [--requests 200] [--json FILE]

Both trees serve at once, each from a process of its own, and take turns: A B B A A B ... For each engine and form of
answer the CPU seconds of a thousand chats of 64 tokens are given, over connections that are kept, and the ratio of this
tree to the other. The ratio is the median over the rounds, with the quartiles: what disturbs the machine disturbs both
sides of a round, and waiting is not CPU time. Nothing is exported, and no limit is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

from attrs import asdict, define, frozen

HERE = Path(__file__).parents[1]
TOKENS = 64
CONNECTIONS = 8
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
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
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


async def _chats(port: int, data: bytes, form: Form, count: int) -> None:
    """That many chats one after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _ in range(count):
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a chat was answered with {head[:200]!r}")
            if form == "streaming":
                await reader.readuntil(b"0\r\n\r\n")
            else:
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
    finally:
        writer.close()
        await writer.wait_closed()


async def _cost_s(server: Server, form: Form, requests: int) -> float:
    """CPU seconds of a thousand requests."""
    data, each = request(form), max(1, requests // CONNECTIONS)
    begun = server.cpu_s()
    await asyncio.gather(*(_chats(server.port, data, form, each) for _ in range(CONNECTIONS)))
    return (server.cpu_s() - begun) / (each * CONNECTIONS) * 1000


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
    """The quartiles."""

    def __str__(self) -> str:
        return (
            f"{self.engine:>8} {self.form:>10} {self.here_s:8.3f} s {self.other_s:8.3f} s"
            f" {self.ratio:7.3f}   {self.ratio_low:.3f} to {self.ratio_high:.3f}"
        )


async def compare(engine: str, form: Form, pair: tuple[Server, Server], rounds: int, requests: int) -> Row:
    """Rounds of both servers by turns; the first is for warming up."""
    costs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        turn = pair if number % 2 else pair[::-1]
        taken = {id(server): await _cost_s(server, form, requests) for server in turn}
        if number:
            costs.append((taken[id(pair[0])], taken[id(pair[1])]))
    ratios = [here / other for here, other in costs]
    low, _, high = quantiles(ratios, n=4)
    here_s, other_s = (median(side) for side in zip(*costs, strict=True))
    return Row(engine, form, here_s, other_s, median(ratios), low, high)


async def measure(against: Path, engines: Sequence[str], rounds: int, requests: int) -> list[Row]:
    """A row for each engine and form, printed as it is known."""
    rows: list[Row] = []
    print(
        f"{'engine':>8} {'form':>10} {'this tree':>10} {'the other':>10} {'ratio':>7}   quartiles; CPU of 1,000 chats"
    )
    for engine in engines:
        with serving(HERE, ENGINES[engine]) as here, serving(against, ENGINES[engine]) as other:
            for form in FORMS:
                rows.append(await compare(engine, form, (here, other), rounds, requests))
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    about = "Compares what a short chat costs in this tree and in another."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_cost", description=about)
    parser.add_argument("--against", type=Path, required=True, metavar="TREE", help="the root of the other tree")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200, help="in a round, for each tree")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("there must be two rounds for quartiles")
    rows = asyncio.run(measure(given.against.resolve(), given.engines, given.rounds, given.requests))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
