"""What an open HTTP stream that waits costs: its memory by owner, its tasks, and the resident memory of the server.

python -m benchmarks.open_streams [--engine echo|mocker] [--streams 1000] [--router kv] [--top 30] [--pause-s 30]

The server runs in this process as `penstock serve` would, over its standard graph; a second process opens the streams,
reads the first token of each and waits. An allocation belongs to the last function of this project, uvicorn or
starlette on its stack, so a task that anyio makes counts for the one that started it. Resident memory is measured in a
run of its own, for tracing allocations takes memory too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path

import anyio
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import Telemetry, app
from serving.server import HttpServer, listen

PATH = "/v1/chat/completions"
ROOT = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "benchmarks.open_streams")
FRAMES = 10
"""Calls kept of the stack of each allocation."""
PARTS = ("pipeline", "operators", "engines", "serving")
OTHERS = "loop and libraries"

ENGINE_ARGS = {
    "echo": {"delay_s": ""},  # before each token: all are opened and measured between the first and the second
    "mocker": {"decode_speedup_ratio": "0.001", "max_num_seqs": "none", "num_gpu_blocks": "1000000"},
}
"""Of engines whose streams wait."""


@frozen
class Measured:
    """`bytes_by_owner` and `bytes_by_line` of all streams together, traced; `resident_bytes` untraced."""

    streams: int
    bytes_by_owner: Mapping[str, int]
    bytes_by_line: Mapping[str, int]
    tasks: int
    resident_bytes: int


# -- the client's process


async def hold(port: int, streams: int) -> None:
    """Open the streams, print a line when each has its first event, and wait for the end of the input."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 5}
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    request = head.encode() + content
    writers = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(request)
        await reader.readuntil(b"data: ")

    waiting = set()
    for _ in range(streams):
        waiting.add(asyncio.create_task(one()))
        await asyncio.sleep(0.001)
    await asyncio.gather(*waiting)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the server's


@asynccontextmanager
async def served(config: GraphConfig) -> AsyncIterator[int]:
    """The standard graph behind HTTP, as a program serves it; the port."""
    telemetry, listener = Telemetry(), listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with hosted_graph(config, HostOptions({}, telemetry.component_metrics)) as opened:
        server = HttpServer(app(opened.graph, telemetry=telemetry), listener)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            yield port
            server.stop(at_once=True)


def _open(port: int, streams: int) -> subprocess.Popen[str]:
    """The client's process, once all its streams wait."""
    client = subprocess.Popen(
        [*PROGRAM, "--hold", str(port), "--streams", str(streams)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert client.stdout is not None
    line = client.stdout.readline()
    if line != "open\n":
        raise RuntimeError(f"the client could not open its streams: {line!r}")
    return client


def _closed(client: subprocess.Popen[str]) -> None:
    client.communicate()


async def measure(config: GraphConfig, streams: int, *, traced: bool) -> Measured:
    """What so many streams cost above a server that had some already, which are gone."""
    in_thread = anyio.to_thread.run_sync
    async with served(config) as port:
        await in_thread(_closed, await in_thread(_open, port, 50))
        await anyio.sleep(0.3)
        gc.collect()
        if traced:
            tracemalloc.start(FRAMES)
        resident, tasks = _resident_bytes(), len(asyncio.all_tasks())
        await in_thread(_open, port, streams)
        gc.collect()
        resident, tasks = _resident_bytes() - resident, len(asyncio.all_tasks()) - tasks
        by_owner, by_line = _by_owner(tracemalloc.take_snapshot()) if traced else (Counter[str](), Counter[str]())
        print(json.dumps(asdict(Measured(streams, by_owner, by_line, tasks, resident))), flush=True)
        os._exit(0)  # the streams would be waited for


def _measured(arguments: argparse.Namespace, *, traced: bool) -> Measured:
    """The same in a process of its own."""
    options = ["--engine", arguments.engine, "--router", arguments.router, "--streams", str(arguments.streams)]
    options += ["--pause-s", arguments.pause_s]
    command = [*PROGRAM, *options, "--here", "traced" if traced else "plain"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return Measured(**found)


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no resident memory in /proc/self/status")


def _by_owner(snapshot: tracemalloc.Snapshot) -> tuple[Counter[str], Counter[str]]:
    owners: Counter[str] = Counter()
    by_line: Counter[str] = Counter()
    for trace in snapshot.traces:
        owner, where = _owner(trace.traceback)
        owners[owner] += trace.size
        by_line[where] += trace.size
    return owners, by_line


def _owner(stack: tracemalloc.Traceback) -> tuple[str, str]:
    """The part of the program that allocated, and its file and line."""
    for frame in reversed(stack):
        if (found := _part(frame.filename)) is not None:
            return found[0], f"{found[1]}:{frame.lineno}"
    last = stack[-1]
    return OTHERS, f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"


@cache
def _part(filename: str) -> tuple[str, str] | None:
    """The part of the program with this file, and the file's name in it; None for the loop and most libraries."""
    for library in ("uvicorn", "starlette"):
        if f"/{library}/" in filename:
            return library, f"{library}/{filename.rpartition(f'/{library}/')[2]}"
    path = Path(filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PARTS:
        return None
    path = path.relative_to(ROOT)
    return "/".join(path.parts[: 2 if path.parts[0] == "serving" else 1]), str(path)


def _table(name: str, traced: Measured, plain: Measured, top: int) -> Table:
    table = Table(title=f"An open stream that waits, {name}")
    table.add_column("owner")
    table.add_column("KiB", justify="right")
    kib = 1024 * traced.streams
    for owner, size in Counter(traced.bytes_by_owner).most_common():
        table.add_row(owner, f"{size / kib:.2f}")
    table.add_row("all that is traced", f"{sum(traced.bytes_by_owner.values()) / kib:.2f}")
    table.add_row("resident memory", f"{plain.resident_bytes / 1024 / plain.streams:.2f}")
    table.add_row("tasks", f"{traced.tasks / traced.streams:.2f}")
    for where, size in Counter(traced.bytes_by_line).most_common(top):
        table.add_row(f"  {where}", f"{size / kib:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_streams")
    parser.add_argument("--engine", choices=list(ENGINE_ARGS), default="echo")
    parser.add_argument("--router", default="round-robin")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--top", type=int, default=0, help="lines of code that allocated most")
    parser.add_argument("--pause-s", default="30", help="seconds that echo waits before each token")
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--here", choices=["traced", "plain"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold is not None:
        asyncio.run(hold(arguments.hold, arguments.streams))
    elif arguments.here is not None:
        engine_args = dict(ENGINE_ARGS[arguments.engine])
        if "delay_s" in engine_args:
            engine_args["delay_s"] = arguments.pause_s
        config = GraphConfig(engine=arguments.engine, engine_args=engine_args, router=arguments.router, workers=2)
        run = partial(measure, config, arguments.streams, traced=arguments.here == "traced")
        anyio.run(run, backend_options={"use_uvloop": True})
    else:
        plain, traced = _measured(arguments, traced=False), _measured(arguments, traced=True)
        Console(width=120).print(_table(f"{arguments.engine}, {arguments.router}", traced, plain, arguments.top))


if __name__ == "__main__":
    main()
