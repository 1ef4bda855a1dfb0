"""What a thousand instances cost a process that knows them all: python -m benchmarks.discovery file:DIR|nats

Other processes hold the instances, each with a model card and, unless `--stores` is fewer, a store of its own; this one
watches, as a front end does. Printed are the time until it knows all, that until its first request is answered, the
CPU of watching and of holding while nothing changes, and what one more instance costs: the time until it is known, CPU
of the process that joins and of the one that watches. `nats` starts a server of its own, whose CPU is the broker's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import anyio
from attrs import asdict, field, frozen

from pipeline import Context
from pipeline.network import Added, EndpointId, Instance, Model, Runtime
from pipeline.network.backends import Site, planes_at
from pipeline.network.discovery import MODELS, Discovery, Store
from pipeline.network.nats import NatsServer
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.rx import AnyIOScheduler
from pipeline.testing import ScriptedEngine
from pipeline.wire import to_json

WHERE = EndpointId("ns", "backend", "generate")
PROCESSES, JOINS = 4, 20
INSTANCES, IDLE_S, LEASE_TTL_S = 1000, 20.0, 10.0
SERVING_ID, JOINING_ID = 500_000, 1_000_000


@frozen
class Figures:
    """What was measured. CPU is in seconds, and in parts of one core where it is a rate."""

    instances: int
    snapshot_s: float
    """From the start of the watches until all are known."""
    snapshot_cpu_s: float
    first_answer_s: float
    """From the start of a runtime until the answer of an engine in another process, which it found among all."""
    watching_cpu: float
    """Of the process that watches, while nothing changes."""
    holding_cpu: float
    """Of all processes together that hold the instances, while nothing changes."""
    broker_cpu: float | None
    """Of the server, while nothing changes, where this benchmark started it."""
    join_s: float
    """The median time from the beginning of a registration until it is known elsewhere."""
    join_cpu_s: float
    """Of the process that joins: instance and card."""
    join_watching_cpu_s: float
    """Of the process that watches, for one join."""


@asynccontextmanager
async def store_at(url: str) -> AsyncIterator[Store]:
    """Return a store of the deployment, as a runtime has it."""
    async with AnyIOScheduler() as scheduler:
        site = Site(scheduler, Random(), LEASE_TTL_S, lambda: 0, None)
        store = planes_at(url, site, None).store
        await store.open()
        yield store
        await store.close()


async def serve(url: str, instance_id: int) -> None:
    """Serve an engine that answers with one item."""
    async with Runtime.at(url) as runtime:
        await runtime.serve(WHERE, ScriptedEngine(["answer"]), instance_id=instance_id)
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)


async def first_answer(url: str, instances: int, instance_id: int) -> float:
    """Return the seconds from the start of a runtime until the answer of that instance."""
    begun_s = perf_counter()
    async with Runtime.at(url) as runtime:
        workers = runtime.workers(WHERE, str)
        await workers.wait_for_instances(instances)
        async with await workers.engine(instance_id).generate(Context("request")) as stream:
            assert [item async for item in stream] == ["answer"]
        return perf_counter() - begun_s


async def hold(url: str, first: int, count: int, stores_count: int) -> None:
    """Hold instances by so many stores, each as if it were a process.

    For each line of the input print the time and the CPU so far; a number is an instance to join with before that.
    """
    async with AsyncExitStack() as held:
        stores = [await held.enter_async_context(store_at(url)) for _ in range(stores_count)]
        for number in range(first, first + count):  # without the checks of a join, which would be a million of them
            store = stores[number % stores_count]
            await Discovery(store).register(_instance(number))
            await store.create(f"{MODELS}/{_model(number).key}", to_json(_model(number)))
        print("ready", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            begun_s, before_s = perf_counter(), process_time()
            if line.strip():
                await _register(await held.enter_async_context(store_at(url)), int(line))
            print(begun_s, before_s, process_time() - before_s, flush=True)


async def _register(store: Store, number: int) -> None:
    discovery = Discovery(store)
    await discovery.register(_instance(number))
    await discovery.register_model(_model(number))


def _instance(number: int) -> Instance:
    address = f"10.0.{number // 256 % 256}.{number % 256}:4242"
    transport = {"tcp": address, "unix": f"/run/penstock/{number}", "host": "a" * 32}
    return Instance("ns", "backend", "generate", number, transport)


def _model(number: int) -> Model:
    return Model(WHERE, number, ModelDeploymentCard.named("model", kv_cache_block_size=16))


class _Holder:
    """A process that holds instances."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._child, self._input, self._output = child, child.stdin, child.stdout

    async def ready(self) -> None:
        """Return once it has registered all."""
        assert await self._output.readline() == b"ready\n"

    async def ask(self, line: str = "") -> list[float]:
        """Return the time, its CPU so far, and its CPU for the line."""
        self._input.write(f"{line}\n".encode())
        return [float(word) for word in (await self._output.readline()).split()]

    async def end(self) -> None:
        self._input.close()
        await self._child.wait()


@frozen
class _Front:
    """This process, as one that watches."""

    discovery: Discovery
    known: dict[int, float] = field(factory=dict)
    """When each instance became known."""

    def watch(self) -> None:
        self.discovery.watch_models().subscribe(lambda _: None)
        self.discovery.watch().subscribe(self._noted)

    async def knows(self, count: int) -> float:
        """Return when so many instances are known, once they are."""
        while len(self.known) < count:  # noqa: ASYNC110  # what it waits for happens in another process
            await anyio.sleep(0.01)
        return max(self.known.values())

    def _noted(self, change: object) -> None:
        if isinstance(change, Added):
            self.known[change.item.instance_id] = perf_counter()


async def measure(
    place: str, instances: int = INSTANCES, stores: int = INSTANCES, *, idle_s: float = IDLE_S, joins: int = JOINS
) -> Figures:
    """Measure a deployment of so many instances, held by so many stores, at the place, which must be empty."""
    async with AsyncExitStack() as held:
        server = await held.enter_async_context(_server()) if place == "nats" else None
        url = place if server is None else server.url
        each = instances // PROCESSES
        holders = [
            await _started(held, url, "--hold", number * each, each, stores // PROCESSES) for number in range(PROCESSES)
        ]
        for holder in holders:
            await holder.ready()
        front = _Front(Discovery(await held.enter_async_context(store_at(url))))
        begun_s, before_s = perf_counter(), process_time()
        front.watch()
        snapshot_s = await front.knows(each * PROCESSES) - begun_s
        snapshot_cpu_s = process_time() - before_s
        answering = await _started(held, url, "--serve", SERVING_ID)
        await answering.ready()
        first_answer_s = await first_answer(url, each * PROCESSES + 1, SERVING_ID)
        await anyio.sleep(3)
        holding_s, before_s = [(await holder.ask())[1] for holder in holders], process_time()
        broker_s = _cpu_s(server)
        await anyio.sleep(idle_s)
        broker = None if broker_s is None else (_cpu_s(server) or 0.0) - broker_s
        watching = (process_time() - before_s) / idle_s
        holding = (sum([(await holder.ask())[1] for holder in holders]) - sum(holding_s)) / idle_s
        joined = await _join(holders[0], front, watching, joins)
        idle = watching, holding, None if broker is None else broker / idle_s
        return Figures(each * PROCESSES, snapshot_s, snapshot_cpu_s, first_answer_s, *idle, *joined)


@asynccontextmanager
async def _server() -> AsyncIterator[NatsServer]:
    with TemporaryDirectory() as folder:
        async with NatsServer(Path(folder)) as server:
            yield server


def _cpu_s(server: NatsServer | None) -> float | None:
    """Return the CPU that the server has used, None without one."""
    if server is None or server.process is None:
        return None
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _started(held: AsyncExitStack, url: str, *role: object) -> _Holder:
    pipe = asyncio.subprocess.PIPE
    command = sys.executable, "-m", "benchmarks.discovery", url, *map(str, role)
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[1])
    holder = _Holder(child)
    held.push_async_callback(holder.end)
    return holder


async def _join(holder: _Holder, front: _Front, watching: float, joins: int) -> tuple[float, float, float]:
    """Return the median time until a join is known, and the CPU of one at the process that joins and at this one."""
    times_s, cpus_s = list[float](), list[float]()
    begun_s, before_s = perf_counter(), process_time()
    for number in range(JOINING_ID, JOINING_ID + joins):
        joined_s, _, cpu_s = await holder.ask(str(number))
        cpus_s.append(cpu_s)
        await front.knows(len(front.known) + (number not in front.known))
        times_s.append(front.known[number] - joined_s)
        await anyio.sleep(0.5)
    used_s = process_time() - before_s - watching * (perf_counter() - begun_s)
    return median(times_s), median(cpus_s), used_s / joins


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.discovery", description="Measures discovery.")
    parser.add_argument(
        "url",
        help="where the deployment is, which must be empty: file:DIR, nats://HOST:PORT; nats for a server of its own",
    )
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--stores", type=int, default=INSTANCES, help="with a connection to the broker each")
    parser.add_argument("--hold", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, metavar="ID", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        anyio.run(serve, arguments.url, arguments.serve)
    elif arguments.hold is not None:
        first, count, stores = arguments.hold
        anyio.run(hold, arguments.url, first, count, stores)
    else:
        print(json.dumps(asdict(anyio.run(measure, arguments.url, arguments.instances, arguments.stores)), indent=2))


if __name__ == "__main__":
    main()
