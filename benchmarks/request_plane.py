"""What a token costs that crosses processes by the request plane, beside a floor in the same run.

    python -m benchmarks.request_plane [--streams 64] [--seconds 5] [--rounds 3] [--only 'NAME;...'] [--json FILE]

A worker process answers with one token an item; a client process reads all streams. In turns:

| row           | what it is                                                                                     |
|---------------|------------------------------------------------------------------------------------------------|
| floor         | a protocol of asyncio: a length and MessagePack, one write a turn of the loop, credit for each |
|               | stream. Items are small dicts, counted by a function: no stream, no task to wake               |
| floor, read   | the same between records: the worker sends chunks of an engine, and a task for each stream     |
|               | reads chunks                                                                                   |
| penstock fed  | `TcpRequestPlane` as a server uses it: an engine with a scheduler, which offers the token of   |
|               | each request, and at the caller a function that each stream is fed to                          |
| penstock tcp  | the same with items, `Annotated[LLMEngineOutput]`: an engine with a task for each stream, read |
|               | by a task for each stream                                                                      |
| penstock unix | the same over a unix socket                                                                    |
| in process    | the same engine and readers in one process, called directly                                    |

Loads: `saturated`, each stream as fast as it goes; `paced`, all streams a token each 10 ms, as an engine's steps have
it. CPU is that of both processes together. The hop is the time from the moment at which the worker makes the token to
that at which its reader has it, in the paced load. uvloop where it is installed, and asyncio's own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from engines import EngineConfig, GenerateContext, LLMEngine, as_engine
from engines.ready_tokens import ReadyTokens
from pipeline import Annotated, AsyncEngine, Context, Gate, ResponseStream
from pipeline.network.names import EndpointId, Instance
from pipeline.network.tcp import TcpOptions, TcpRequestPlane
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.rx import AnyIOScheduler
from pipeline.wire import from_json, to_json

ENDPOINT = EndpointId("bench", "worker", "generate")
STEP_S = 0.01
WINDOW, GRANT = 256, 128
ITEM = {"token_ids": [12345], "index": 0}
FED = "penstock fed"
ROWS = ("floor", "floor, read", FED, "penstock tcp", "penstock unix", "in process")
LOADS = ("saturated", "paced")
LOOPS = ("uvloop", "asyncio")


class Steps:
    """The steps of an engine: all that wait go on at once, each 10 ms."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += STEP_S
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due, self._next = self._next, loop.create_future()
            due.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        return self._next


class Load:
    """What one turn reads, and when that began and ended: connections are made and records prepared before."""

    def __init__(self, streams: int, tokens: int, is_paced: bool, worker_cpu_s: Callable[[], float]) -> None:
        self.streams, self.tokens, self.is_paced = streams, tokens, is_paced
        self.hops_us: list[int] | None = [] if is_paced else None
        self._worker_cpu_s = worker_cpu_s
        self.took_s = self.client_s = self.worker_s = 0.0

    def begins(self) -> None:
        self._before = time.monotonic(), time.process_time(), self._worker_cpu_s()

    def ends(self) -> None:
        now = time.monotonic(), time.process_time(), self._worker_cpu_s()
        self.took_s, self.client_s, self.worker_s = (b - a for a, b in zip(self._before, now, strict=True))


# -- the floor


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Frames(asyncio.Protocol):
    """Messages over a connection: a length, then MessagePack; what is sent in a turn of the loop is one write."""

    def __init__(self, on_message: Callable[[Frames, Any], None]) -> None:
        self._on_message = on_message
        self._rest = bytearray()
        self._out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        rest = self._rest
        rest += data
        at, end = 0, len(rest)
        view = memoryview(rest)
        while end - at >= 4:
            behind = at + 4 + int.from_bytes(view[at : at + 4], "big")
            if behind > end:
                break
            self._on_message(self, _decode(view[at + 4 : behind]))
            at = behind
        view.release()
        del rest[:at]

    def send(self, message: Any) -> None:
        body = _encode(message)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += (len(body).to_bytes(4, "big"), body)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()


class FloorStream:
    """A stream of the floor's worker."""

    def __init__(self) -> None:
        self._credit = WINDOW
        self._granted = asyncio.Event()

    def grant(self, items: int) -> None:
        self._credit += items
        self._granted.set()

    async def send_chunks(self, connection: Frames, stream: int, tokens: int, steps: Steps | None) -> None:
        """Send the items of an engine's stream."""
        sent = 0
        async with await TokenEngine(steps).generate(request_for(tokens)) as chunks:
            async for item in chunks:
                while not self._credit:
                    self._granted.clear()
                    await self._granted.wait()
                self._credit -= 1
                sent += 1
                chunk = item.data
                assert chunk is not None
                connection.send((stream, sent == tokens, {"token_ids": chunk.token_ids, "index": chunk.index}))

    async def send_all(self, connection: Frames, stream: int, tokens: int, steps: Steps | None) -> None:
        for number in range(tokens):
            if steps is not None:
                await steps.wait()
            while not self._credit:
                self._granted.clear()
                await self._granted.wait()
            self._credit -= 1
            connection.send((stream, number == tokens - 1, _stamped(steps)))
            if steps is None and number % 64 == 63:
                await asyncio.sleep(0)


def _stamped(steps: Steps | None) -> Any:
    return ITEM if steps is None else {"token_ids": [_now_us()], "index": 0}


def _now_us() -> int:
    """Microseconds that both processes count alike, as a token id holds them."""
    return (time.monotonic_ns() // 1000) % 2**31


async def floor_worker(is_paced: bool, *, is_read: bool) -> None:
    steps = await _begun_steps(is_paced)
    streams: dict[int, FloorStream] = {}
    tasks: set[asyncio.Task[None]] = set()

    def on_message(connection: Frames, message: Any) -> None:
        kind, stream, number = message
        if kind:
            streams[stream].grant(number)
        else:
            served = streams[stream] = FloorStream()
            send = served.send_chunks if is_read else served.send_all
            task = asyncio.ensure_future(send(connection, stream, number, steps))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.get_running_loop().create_server(lambda: Frames(on_message), "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.Event().wait()


async def floor_client(address: dict[str, Any], load: Load) -> None:
    done = asyncio.Event()
    left, hops_us = load.streams, load.hops_us
    taken = [0] * load.streams

    def on_message(connection: Frames, message: Any) -> None:
        nonlocal left
        stream, is_last, item = message
        if hops_us is not None:
            hops_us.append(_now_us() - item["token_ids"][0])
        taken[stream] += 1
        if taken[stream] == GRANT:
            connection.send((1, stream, GRANT))
            taken[stream] = 0
        if is_last:
            left -= 1
            if not left:
                done.set()

    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Frames(on_message), "127.0.0.1", address["port"]
    )
    load.begins()
    for stream in range(load.streams):
        connection.send((0, stream, load.tokens))
    await done.wait()
    load.ends()
    connection.transport.close()


class FloorReader:
    """A stream of the floor's client that a task reads."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            self._waiting.set_result(None)
            self._waiting = None

    async def chunks(self, connection: Frames, stream: int, tokens: int) -> AsyncGenerator[Any, None]:
        connection.send((0, stream, tokens))
        taken, is_last = 0, False
        while not is_last:
            while not self._items:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            is_last, item = self._items.popleft()
            taken += 1
            if taken == GRANT:
                connection.send((1, stream, GRANT))
                taken = 0
            yield Annotated(LLMEngineOutput(item["token_ids"], index=item["index"]))


async def floor_reading_client(address: dict[str, Any], load: Load) -> None:
    readers = [FloorReader() for _ in range(load.streams)]
    hops_us = load.hops_us

    def on_message(connection: Frames, message: Any) -> None:
        stream, is_last, item = message
        readers[stream].put((is_last, item))

    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Frames(on_message), "127.0.0.1", address["port"]
    )

    async def one(stream: int) -> None:
        async for item in readers[stream].chunks(connection, stream, load.tokens):
            if hops_us is not None:
                hops_us.append(_now_us() - item.data.token_ids[0])

    load.begins()
    async with asyncio.TaskGroup() as tasks:
        for stream in range(load.streams):
            tasks.create_task(one(stream))
    load.ends()
    connection.transport.close()


# -- the request plane


class TokenEngine(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """Answers with so many tokens, at each step or at once."""

    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        return ResponseStream(self._items(request.payload.stop_conditions.max_tokens or 0), request)

    async def _items(self, tokens: int) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        steps = self._steps
        if steps is None:
            item = Annotated(LLMEngineOutput([12345], index=0))
            for _ in range(tokens):
                yield item
            return
        for _ in range(tokens):
            await steps.wait()
            yield Annotated(LLMEngineOutput([_now_us()], index=0))


class Answering:
    """A request of `SteppingEngine`: how many tokens are still to be made, and those that wait."""

    __slots__ = ("left", "ready")

    def __init__(self, tokens: int, offer: Callable[[int], bool]) -> None:
        self.ready: ReadyTokens[int, int] = ReadyTokens()
        self.ready.take_lone = offer
        self.left = tokens


class SteppingEngine(LLMEngine):
    """An engine with a scheduler, which makes a token for every request at each step and offers it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._running: set[Answering] = set()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="bench")

    async def background(self) -> None:
        while True:
            await self._steps.wait()
            for answering in [one for one in self._running if one.left]:
                answering.left -= 1
                answering.ready.put(0, [_now_us()], offers=answering.left > 0)

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        answering = Answering(request.stop_conditions.max_tokens or 0, context.offer_token)
        ready = answering.ready
        self._running.add(answering)
        try:
            while answering.left or ready.waiting:
                while ready.waiting:
                    yield LLMEngineOutput(ready.take().tokens)
                if answering.left:
                    await ready.news.wait()
        finally:
            self._running.discard(answering)
        yield LLMEngineOutput.length()

    async def cleanup(self) -> None:
        self._running.clear()


async def plane_worker(row: str, is_paced: bool) -> None:
    steps = await _begun_steps(is_paced)
    async with AnyIOScheduler() as scheduler, AsyncExitStack() as engines:
        plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=row == "penstock unix"))
        await plane.open()
        engine: AsyncEngine[Any, Any] = TokenEngine(steps)
        if row == FED and steps is not None:
            engine = await engines.enter_async_context(as_engine(SteppingEngine(steps)))
        instance, _ = await plane.serve(Instance.of(ENDPOINT, 1), engine)
        print(to_json(instance).decode(), flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await plane.close()


def request_for(tokens: int) -> Context[PreprocessedRequest]:
    return Context(PreprocessedRequest([1], stop_conditions=StopConditions(max_tokens=tokens)))


async def read_all(
    engine: AsyncEngine[PreprocessedRequest, Any],
    streams: int,
    tokens: int,
    hops_us: list[int] | None,
    *,
    is_fed: bool = False,
) -> None:
    gate = Gate()

    def take(token_id: int, index: int | None) -> bool:
        if hops_us is not None:
            hops_us.append(_now_us() - token_id)
        return True

    async def one() -> None:
        async with await engine.generate(request_for(tokens)) as stream:
            if is_fed:
                stream.feed(take, gate)
            if hops_us is None:
                async for _ in stream:
                    pass
                return
            async for item in stream:
                if item.data.token_ids:
                    hops_us.append(_now_us() - item.data.token_ids[0])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(one())


async def plane_client(address: dict[str, Any], load: Load, *, is_fed: bool) -> None:
    instance = from_json(json.dumps(address), Instance)
    async with AnyIOScheduler() as scheduler:
        plane = TcpRequestPlane(scheduler, TcpOptions(has_unix_socket=False))
        await plane.open()
        kind: Any = Annotated[LLMEngineOutput]
        engine = plane.engine(instance, kind)
        await read_all(engine, 1, 3, None)
        load.begins()
        await read_all(engine, load.streams, load.tokens, load.hops_us, is_fed=is_fed)
        load.ends()
        await plane.close()


async def in_process(load: Load) -> None:
    steps = await _begun_steps(load.is_paced)
    load.begins()
    await read_all(TokenEngine(steps), load.streams, load.tokens, load.hops_us)
    load.ends()


_steps_tasks: set[asyncio.Task[None]] = set()


async def _begun_steps(is_paced: bool) -> Steps | None:
    if not is_paced:
        return None
    steps = Steps()
    _steps_tasks.add(asyncio.ensure_future(steps.run()))
    return steps


# -- measuring


@frozen
class Figures:
    """One row under one load."""

    row: str
    load: str
    loop: str
    cpu_us: float
    """CPU of both processes, for one token."""
    client_us: float
    worker_us: float
    tokens_per_s: float
    hop_p50_us: float | None
    hop_p99_us: float | None


def run_in(loop: str, main: Coroutine[Any, Any, None]) -> None:
    if loop == "uvloop":
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


def _cpu_s(pid: int) -> float:
    """Seconds of CPU of a process, all threads, to the nanosecond where the kernel counts so."""
    return (
        sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        / 1e9
    )


@contextmanager
def worker(row: str, load: str, loop: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """A worker process: its id and what it announces."""
    command = [sys.executable, "-m", "benchmarks.request_plane", "--worker", row, "--load", load, "--loop", loop]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.terminate()


def measure(row: str, load: str, loop: str, streams: int, tokens: int) -> Figures:
    """One turn of one row. Runs in a process of its own, so that no row inherits another one's heap."""
    if row == "in process":
        read = Load(streams, tokens, load == "paced", lambda: 0.0)
        run_in(loop, in_process(read))
    else:
        with worker(row, load, loop) as (pid, address):
            read = Load(streams, tokens, load == "paced", lambda: _cpu_s(pid))
            floors = {"floor": floor_client, "floor, read": floor_reading_client}
            client = floors.get(row) or partial(plane_client, is_fed=row == FED)
            run_in(loop, client(address, read))
    count, used_s, worker_s = streams * tokens, read.client_s, read.worker_s
    hops = sorted(read.hops_us) if read.hops_us else None
    return Figures(
        row, load, loop,
        cpu_us=(used_s + worker_s) / count * 1e6,
        client_us=used_s / count * 1e6,
        worker_us=worker_s / count * 1e6,
        tokens_per_s=count / read.took_s,
        hop_p50_us=hops[len(hops) // 2] if hops else None,
        hop_p99_us=hops[len(hops) * 99 // 100] if hops else None,
    )  # fmt: skip


def _turn(row: str, load: str, loop: str, streams: int, tokens: int) -> Figures:
    command = [sys.executable, "-m", "benchmarks.request_plane", "--turn", row, "--load", load, "--loop", loop]
    command += ["--streams", str(streams), "--tokens", str(tokens)]
    return Figures(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def _tokens(load: str, seconds: float, streams: int) -> int:
    per_stream_and_s = 1 / STEP_S if load == "paced" else 100_000 / streams
    return int(per_stream_and_s * seconds)


def _middle(turns: list[Figures]) -> Figures:
    """The turn whose CPU is the median."""
    return sorted(turns, key=lambda turn: turn.cpu_us)[len(turns) // 2]


def _table(figures: list[Figures]) -> Table:
    table = Table(title="A token across processes: CPU of both, and the hop")
    for column in ("loop", "load", "row", "CPU µs", "client", "worker", "of floor", "tokens/s", "hop p50 µs", "p99"):
        table.add_column(column, justify="left" if column in ("loop", "load", "row") else "right")
    floors = {(one.loop, one.load): one.cpu_us for one in figures if one.row == "floor"}
    for one in figures:
        floor_us = floors.get((one.loop, one.load))
        ratio = f"{one.cpu_us / floor_us:.2f}" if floor_us else ""
        hops = [f"{hop:.0f}" if hop is not None else "" for hop in (one.hop_p50_us, one.hop_p99_us)]
        cpu = (f"{part:.2f}" for part in (one.cpu_us, one.client_us, one.worker_us))
        table.add_row(one.loop, one.load, one.row, *cpu, ratio, f"{one.tokens_per_s:,.0f}", *hops)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=";".join(ROWS))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--json", type=Path)
    # Of the processes that it starts itself.
    parser.add_argument("--turn", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        is_paced = arguments.load == "paced"
        with suppress(KeyboardInterrupt):
            if arguments.worker.startswith("floor"):
                run_in(arguments.loop, floor_worker(is_paced, is_read=arguments.worker != "floor"))
            else:
                run_in(arguments.loop, plane_worker(arguments.worker, is_paced))
        return
    if arguments.turn:
        figures = measure(arguments.turn, arguments.load, arguments.loop, arguments.streams, arguments.tokens)
        print(json.dumps(asdict(figures)))
        return
    found: list[Figures] = []
    rows = arguments.only.split(";")
    for loop in arguments.loops.split(","):
        for load in arguments.loads.split(","):
            tokens = _tokens(load, arguments.seconds, arguments.streams)
            rounds = [
                [_turn(row, load, loop, arguments.streams, tokens) for row in rows] for _ in range(arguments.rounds)
            ]
            found += [_middle(list(turns)) for turns in zip(*rounds, strict=True)]
    Console(width=140).print(_table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=2))


if __name__ == "__main__":
    main()
